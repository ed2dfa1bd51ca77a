"""`bench tenants`: what quotas cost a call and a text, what one key's flood costs another key, how two busy keys share.

Costs are processor time of daemon, mux and worker, so that other work on the machine disturbs them little: the same
calls by two keys in turn, one with every kind of quota and one without. The model of these is a look-up table; the
others are measured on MiniLM.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.contest import Child, child
from bench.fleet import Fleet, fleet
from bench.front import INSTANCE, MUX_SERVICE, arrow_request, bounds_of_median, embed_request
from bench.load import LoadTask
from bench.machine import cpu_s
from bench.progress import partial, rounds, say
from bench.report import publish
from bench.steady import OK, SteadyCall, SteadyTask

HEADER = ("what", "measured", "low", "high", "at most")
_CALL_US, _TEXT_US, _BESIDE, _SHARE = 5.0, 0.2, 1.5, 0.1
_TEXTS = 64
_QUERY = "how long does the harbour stay open"
_EACH_S = 1.0  # of a load
_HUGE = 10**12
# name, and what its table has beside key and rights
_KEYS: dict[str, dict[str, int]] = {
    "bench": {},
    "plain": {},
    "metered": {
        "tokens_per_second": 10**9,
        "burst_tokens": 10**9,
        "tokens_per_day": _HUGE,
        "concurrent_tokens": 10**9,
    },
    "second": {},
    "flood": {},
    "spent": {"tokens_per_day": 1},
    "three": {"weight": 3},
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the costs, each load once with each key (12)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of queries, alone and beside each flood (15)")
    parser.add_argument("--rate", type=float, default=20.0, help="queries a second (20)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a figure is above its limit."""
    rows: list[list[Any]] = []
    with partial(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = stack.enter_context(fleet(config=_config(), api_key=_key("bench")))
        _create(running, INSTANCE, weights.random_static(folder / "static", weights.minilm()))
        rows += _costs(running, folder, options.rounds)
        running.client.delete(INSTANCE)
        _create(running, INSTANCE, weights.minilm())
        rows += _beside_floods(running, folder, options)
        rows.append(_shares(running, folder, options.seconds))
    facts = {
        "costs": f"{options.rounds} rounds in turn: median, and the bounds between which the median of further rounds "
        "lies with 95 %; µs of daemon, mux and worker that a key with four quotas costs more than one with none, and "
        "that two keys with work waiting cost more than one key with as many callers",
        "floods": f"p99 of {options.rate:g} queries a second over /v1/embeddings, in {options.seconds:g} s beside the "
        "flood over that without it",
        "shares": "difference between 3 and the ratio of tokens of two keys with weights 3 and 1, as a part of 3",
    }
    publish("tenants", facts, HEADER, rows, {"rows": [dict(zip(HEADER, row, strict=True)) for row in rows]})
    return int(not rows or any(limit is not None and measured > limit for _, measured, _, _, limit in rows))


def _config() -> str:
    tables = ['[auth]\nenabled = true\nproviders = ["api_keys"]\n']
    for name, more in _KEYS.items():
        rights = '["admin", "read", "inference"]' if name == "bench" else '["inference"]'
        given = "".join(f"{key} = {value}\n" for key, value in more.items())
        tables.append(f'[[auth.api_keys]]\nname = "{name}"\nkey = "{_key(name)}"\nrights = {rights}\n{given}')
    return "\n".join(tables)


def _key(name: str) -> str:
    return f"{name}-{'k' * 24}"


def _create(running: Fleet, name: str, model: Path) -> None:
    running.client.create(name, str(model))
    running.client.wait_until_running(name, deadline_s=120)


# Costs


def _costs(running: Fleet, folder: Path, count: int) -> Iterator[list[Any]]:
    """What quotas cost a call and a text, and what a second key in the same batches costs a text."""
    texts = corpus.queries(4096)
    pids = running.pids(INSTANCE)
    loads = {
        "/v1/embeddings, one text, 8 callers": (
            LoadTask("http", running.api_port, "/v1/embeddings"),
            [json.dumps({"model": INSTANCE, "input": text}).encode() for text in texts],
            1,
        ),
        "mux Embed, one text, 8 callers": (
            LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}Embed"),
            [embed_request(text) for text in texts],
            1,
        ),
        f"mux EmbedArrow, {_TEXTS} texts, 8 callers": (
            LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow"),
            _arrow_bodies(texts),
            _TEXTS,
        ),
    }
    with ExitStack() as stack:
        callers = {
            (name, key): _caller(stack, task, folder / f"{number}.json", bodies, key)
            for number, (name, (task, bodies, _)) in enumerate(loads.items())
            for key in ("plain", "metered", "second")
        }
        found: dict[tuple[str, str], list[float]] = {}
        for number in rounds(count):
            for name, (_, _, size) in loads.items():
                turns = ("plain", "metered") if number % 2 else ("metered", "plain")
                cost = {key: _cost_us(pids, [callers[name, key]], 8) for key in turns}
                found.setdefault((name, "four quotas"), []).append((cost["metered"] - cost["plain"]) / size)
                if size > 1:
                    one, two = (callers[name, "plain"],), (callers[name, "plain"], callers[name, "second"])
                    in_turn = (one, two) if number % 2 else (two, one)
                    of = {len(each): _cost_us(pids, each, 8 // len(each)) for each in in_turn}
                    found.setdefault((name, "two keys"), []).append((of[2] - of[1]) / size)
            say("; ".join(f"{name[0]}, {name[1]}: {values[-1]:.2f} µs" for name, values in found.items()))
    for (name, what), values in found.items():
        size = loads[name][2]
        unit, most = ("a text", _TEXT_US) if size > 1 else ("a call", _CALL_US)
        label = f"{what}, µs {unit}: {name}"
        yield [label, statistics.median(values), *bounds_of_median(values), most]


def _arrow_bodies(texts: Sequence[str]) -> list[bytes]:
    """Requests of EmbedArrow with `_TEXTS` texts each."""
    return [arrow_request(texts[start : start + _TEXTS]) for start in range(0, len(texts), _TEXTS)]


def _caller(stack: ExitStack, task: LoadTask, file: Path, bodies: Sequence[bytes], key: str) -> Child:
    if not file.exists():
        file.write_text(json.dumps([base64.b64encode(body).decode() for body in bodies]))
    made = stack.enter_context(child(LoadTask(task.kind, task.port, task.path, key=_key(key))))
    made.ask("requests", str(file))
    return made


def _cost_us(pids: dict[str, int], callers: Sequence[Child], of_each: int) -> float:
    """Processor time of the servers for each call, while all `callers` call."""
    before = sum(map(cpu_s, pids.values()))
    with ThreadPoolExecutor(len(callers)) as pool:
        answers = pool.map(
            lambda each: each.ask("run", {"callers": of_each, "seconds": _EACH_S, "whole": True}), callers
        )
        calls = sum(answer["all_calls"] for answer in answers)
    return (sum(map(cpu_s, pids.values())) - before) / calls * 1e6


# Floods


def _beside_floods(running: Fleet, folder: Path, options: argparse.Namespace) -> Iterator[list[Any]]:
    texts = corpus.queries(1024)
    bulk = _arrow_bodies(corpus.corpus(1024))
    single = [json.dumps({"model": INSTANCE, "input": text}).encode() for text in texts]
    arrow = LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow")
    openai = LoadTask("http", running.api_port, "/v1/embeddings")
    with ExitStack() as stack:
        query = base64.b64encode(json.dumps({"model": INSTANCE, "input": _QUERY}).encode()).decode()
        steady = SteadyCall("query", "http", running.api_port, "/v1/embeddings", query, options.rate, _key("plain"))
        asking = stack.enter_context(child(SteadyTask([steady])))
        spent = SteadyCall("spent", "http", running.api_port, "/v1/embeddings", query, 400.0, _key("spent"))
        floods = {
            f"bulk of {_TEXTS} texts, 8 callers": (_caller(stack, arrow, folder / "bulk.json", bulk, "flood"), 8),
            "single texts, 64 callers": (_caller(stack, openai, folder / "single.json", single, "flood"), 64),
        }
        idle = _p99_ms(asking, options.seconds)
        yield ["p99 of queries alone, ms", idle, None, None, None]
        for name, (flood, callers) in floods.items():
            with ThreadPoolExecutor(1) as pool:
                flooding = pool.submit(flood.ask, "run", {"callers": callers, "seconds": options.seconds + 1})
                beside = _p99_ms(asking, options.seconds)
                flooding.result()
            yield [f"p99 beside a flood of {name}, × idle", beside / idle, None, None, _BESIDE]
        with child(SteadyTask([spent])):
            beside = _p99_ms(asking, options.seconds)
        yield ["p99 beside 400 calls a second that a quota refuses, × idle", beside / idle, None, None, _BESIDE]


def _p99_ms(asking: Child, seconds: float) -> float:
    """Raises RuntimeError: a query failed."""
    time.sleep(0.5)  # what came before
    asking.ask("take")
    time.sleep(seconds)
    calls = asking.ask("take")["calls"]
    if failed := [outcome for *_, outcome in calls if outcome != OK]:
        raise RuntimeError(f"{len(failed)} of {len(calls)} queries failed: {failed[0]}")
    return float(np.percentile([ms for _, _, ms, _ in calls], 99))


# Shares


def _shares(running: Fleet, folder: Path, seconds: float) -> list[Any]:
    """Both keys have calls waiting all the time; the larger one's tokens over the other's, from 3."""
    bulk = _arrow_bodies(corpus.corpus(1024))
    arrow = LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow")
    with ExitStack() as stack:
        callers = [_caller(stack, arrow, folder / "bulk.json", bulk, key) for key in ("three", "flood")]
        with ThreadPoolExecutor(2) as pool:
            work = [pool.submit(each.ask, "run", {"callers": 16, "seconds": seconds + 4}) for each in callers]
            time.sleep(2)
            before = _tokens(running)
            time.sleep(seconds)
            after = _tokens(running)
            for each in work:
                each.result()
    three, one = (after.get(key, 0) - before.get(key, 0) for key in ("three", "flood"))
    if not one:
        raise RuntimeError(f"no call of the key with weight 1 was answered within {seconds:g} s")
    return ["share of weight 3 beside weight 1, off by", abs(three / one - 3) / 3, None, None, _SHARE]


def _tokens(running: Fleet) -> dict[str, int]:
    """The tokens that each key has used."""
    return {row["key"]: row["tokens"] for row in running.client.usage(["key"])["usage"]}
