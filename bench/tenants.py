"""`bench tenants`: what quotas cost a call and a text, what one key's flood costs another key, how two busy keys share.

Costs are processor time of daemon, mux and worker, so that other work on the machine disturbs them little: the same
calls by two keys in turn, one with every kind of quota and one without, on a static model. The others are measured on
MiniLM. The client of a flood is in the idle class and has few connections, since the other key's queries are to wait
for the server alone; it is measured with the flood and without in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from bench.steady import OK, GrpcCalls, HttpCalls, SteadyCall, SteadyTask
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.batching.fair_share import FairLane, QueueEntry
from teimgr.engine.job import InferOptions, Job, Lane, Share

HEADER = ("what", "measured", "low", "high", "at most")
_CALL_US, _TEXT_US, _BESIDE, _GAP, _SHARE = 5.0, 0.2, 1.5, 2.0, 0.1
_NONE = (None, None, None)
_TEXTS = 64
_SHARED_TEXTS = 16  # of a call whose tokens count when it is answered: of larger ones too few are
_QUERY = "how long does the harbour stay open"
_EACH_S = 1.0  # of a load
_SETTLE_S = 0.5  # before a window
_REFUSED_RATE = 400.0  # calls a second, which a quota refuses
_AT_ONCE = 256  # calls of a key with a quota
_RATED_S = 2.0
_GAP_BATCHES, _GAP_TOKENS, _GAP_WAITING = 5000, 4096, 64
_RESAMPLES = 1000
_DRAW = random.Random(5)
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
    "unit": {},
    "daily": {"tokens_per_day": 1009},
    "rated": {"tokens_per_second": 2000, "burst_tokens": 500},
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the costs, each load once with each key (12)")
    parser.add_argument("--turns", type=int, default=7, help="turns of the floods (7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window of queries (2)")
    parser.add_argument("--rate", type=float, default=40.0, help="queries a second (40)")


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
        rows += _quotas(running)
        rows.append(_gap())
        rows.append(_shares(running, folder))
        rows += _beside_floods(running, folder, options)
    facts = {
        "costs": f"{options.rounds} rounds in turn: median, and the bounds between which the median of further rounds "
        "lies with 95 %; µs of daemon, mux and worker that a key with four quotas costs more than one with none, and "
        "that two keys with work waiting cost more than one key with as many callers and connections",
        "floods": f"p99 of {options.rate:g} queries a second over /v1/embeddings in {options.turns} windows of "
        f"{options.seconds:g} s beside a flood, over that in as many without it, in turns; low and high are the bounds "
        "of 95 % when windows are drawn again; the client of the flood is in the idle class",
        "gap": "of the tokens of two keys, each over its weight, while both always have texts waiting, in the queue's "
        f"batches of {_GAP_TOKENS} tokens: the largest over any time, in multiples of the largest text over the least "
        "weight",
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
            (name, key, of): _caller(stack, task, folder / f"{number}.json", bodies, key)
            for number, (name, (task, bodies, _)) in enumerate(loads.items())
            for key, of in (("plain", 1), ("plain", 2), ("metered", 1), ("second", 2))
        }
        found: dict[tuple[str, str], list[float]] = {}
        for number in rounds(count):
            for name, (_, _, size) in loads.items():
                turns = ("plain", "metered") if number % 2 else ("metered", "plain")
                cost = {key: _cost_us(pids, [callers[name, key, 1]], 8) for key in turns}
                found.setdefault((name, "four quotas"), []).append((cost["metered"] - cost["plain"]) / size)
                if size > 1:
                    in_turn = ("plain", "second") if number % 2 else ("second", "plain")
                    pairs = {key: (callers[name, "plain", 1], callers[name, key, 2]) for key in in_turn}
                    of = {key: _cost_us(pids, pair, 4) for key, pair in pairs.items()}
                    found.setdefault((name, "two keys"), []).append((of["second"] - of["plain"]) / size)
            say("; ".join(f"{name[0]}, {name[1]}: {values[-1]:.2f} µs" for name, values in found.items()))
    for (name, what), values in found.items():
        size = loads[name][2]
        unit, most = ("a text", _TEXT_US) if size > 1 else ("a call", _CALL_US)
        label = f"{what}, µs {unit}: {name}"
        yield [label, statistics.median(values), *bounds_of_median(values), most]


def _arrow_bodies(texts: Sequence[str], size: int = _TEXTS) -> list[bytes]:
    """Requests of EmbedArrow with `size` texts each."""
    return [arrow_request(texts[start : start + size]) for start in range(0, len(texts), size)]


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


class _Victim:
    """Queries at a steady rate, and their latencies in windows of time; a query belongs to the one it is due in."""

    def __init__(self, asking: Child, seconds: float) -> None:
        self._asking, self._seconds = asking, seconds

    def window(self) -> list[float]:
        """Latencies in ms of the next seconds. Raises RuntimeError: a query failed."""
        time.sleep(_SETTLE_S)  # what came before
        began = time.monotonic()
        until = began + self._seconds
        time.sleep(self._seconds)
        done: list[Any] = []
        while True:
            taken = self._asking.ask("take")
            done += [call for call in taken["calls"] if began <= call[1] < until]
            if all(due >= until for _, due in taken["waiting"]):
                break
            time.sleep(0.02)
        if failed := [outcome for *_, outcome in done if outcome != OK]:
            raise RuntimeError(f"{len(failed)} of {len(done)} queries failed: {failed[0]}")
        return [ms for _, _, ms, _ in done]


def _beside_floods(running: Fleet, folder: Path, options: argparse.Namespace) -> Iterator[list[Any]]:
    """Windows with a flood and without, in turns: what the machine does meanwhile meets both."""
    texts = corpus.queries(1024)
    bulk = _arrow_bodies(corpus.corpus(1024))
    single = [json.dumps({"model": INSTANCE, "input": text}).encode() for text in texts]
    query = base64.b64encode(json.dumps({"model": INSTANCE, "input": _QUERY}).encode()).decode()
    embeds = [embed_request(text) for text in texts]
    http = running.api_port, "/v1/embeddings"
    with ExitStack() as stack:
        arrow, embed = (LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}{name}") for name in ("EmbedArrow", "Embed"))
        openai = LoadTask("http", *http)
        floods = {
            f"EmbedArrow of {_TEXTS} texts, 8 callers": (_caller(stack, arrow, folder / "bulk.json", bulk, "flood"), 8),
            "Embed, 64 callers": (_caller(stack, embed, folder / "embed.json", embeds, "flood"), 64),
            "/v1/embeddings, 16 callers": (_caller(stack, openai, folder / "single.json", single, "flood"), 16),
        }
        for flood, _ in floods.values():
            _step_back(flood)
        steady = SteadyCall("query", "http", *http, query, options.rate, _key("plain"))
        victim = _Victim(stack.enter_context(child(SteadyTask([steady]))), options.seconds)
        spent = SteadyCall("spent", "http", *http, query, _REFUSED_RATE, _key("spent"))
        found: dict[str, list[tuple[list[float], list[float]]]] = {}
        for number in rounds(options.turns):
            for name, (flood, callers) in floods.items():
                found.setdefault(name, []).append(_paired(victim, number, _flooded(flood, callers, options.seconds)))
            refused = found.setdefault(f"{_REFUSED_RATE:g} calls a second that a quota refuses", [])
            refused.append(_paired(victim, number, _refused(SteadyTask([spent]))))
            say("; ".join(f"{name}: × {_ratio(pairs[-1:]):.2f}" for name, pairs in found.items()))
    for name, pairs in found.items():
        drawn = [_ratio(_DRAW.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)]
        low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
        yield [f"p99 beside {name}, × idle", _ratio(pairs), low, high, _BESIDE]
        for what, share, place in (("p50", 50, 1), ("p99", 99, 1), ("p50 idle", 50, 0), ("p99 idle", 99, 0)):
            yield [f"  {what}, ms", float(np.percentile([ms for pair in pairs for ms in pair[place]], share)), *_NONE]


def _paired(victim: _Victim, number: int, flood: AbstractContextManager[Any]) -> tuple[list[float], list[float]]:
    """Latencies of a window without the flood, and of one beside it, which comes first in each second round."""
    idle = [] if number % 2 else victim.window()
    with flood:
        beside = victim.window()
    return idle or victim.window(), beside


@contextmanager
def _flooded(flood: Child, callers: int, seconds: float) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood.ask, "run", {"callers": callers, "seconds": seconds + 2 * _SETTLE_S})
        yield
        flooding.result()


@contextmanager
def _refused(task: SteadyTask) -> Iterator[None]:
    with child(task) as calling:
        _step_back(calling)
        yield


def _step_back(client: Child) -> None:
    """Leave the cores to whom else wants them."""
    os.sched_setscheduler(client.pid, os.SCHED_IDLE, os.sched_param(0))


def _ratio(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    """The p99 of all windows beside a flood over that of all without."""
    idle, beside = (np.percentile([ms for pair in pairs for ms in pair[place]], 99) for place in (0, 1))
    return float(beside / idle)


# Quotas


def _quotas(running: Fleet) -> Iterator[list[Any]]:
    """Calls at once, half of each protocol: what is admitted beyond a quota, and what is counted otherwise."""
    query = base64.b64encode(json.dumps({"model": INSTANCE, "input": _QUERY}).encode()).decode()
    message = base64.b64encode(embed_request(_QUERY)).decode()

    def calls(key: str) -> tuple[HttpCalls, GrpcCalls]:
        http = SteadyCall("", "http", running.api_port, "/v1/embeddings", query, key=_key(key))
        return HttpCalls(http, None), GrpcCalls(
            SteadyCall("", "grpc", running.grpc_port, f"{MUX_SERVICE}Embed", message, key=_key(key)), None
        )

    async def one() -> None:
        await calls("unit")[0]()

    async def at_once() -> int:
        asks = calls("daily")
        return [*await asyncio.gather(*(_admitted(asks[number % 2]) for number in range(_AT_ONCE)))].count(OK)

    async def in_time() -> tuple[int, float]:
        asks, began, admitted = calls("rated"), time.monotonic(), 0

        async def again(number: int) -> int:
            count = 0
            while time.monotonic() - began < _RATED_S:
                count += await _admitted(asks[number % 2]) == OK
            return count

        admitted = sum(await asyncio.gather(*(again(number) for number in range(_AT_ONCE))))
        return admitted, time.monotonic() - began

    asyncio.run(one())
    cost = _tokens(running)["unit"]
    admitted = asyncio.run(at_once())
    most = _KEYS["daily"]["tokens_per_day"] // cost
    yield [
        f"tokens over a day's quota of {most * cost}, {_AT_ONCE} calls at once",
        (admitted - most) * cost,
        *_NONE[:2],
        0,
    ]
    in_rate, seconds = asyncio.run(in_time())
    quota = _KEYS["rated"]["burst_tokens"] + _KEYS["rated"]["tokens_per_second"] * seconds
    over = max(0.0, in_rate * cost - quota)
    yield [f"tokens over a rate's quota of {quota:.0f}, {_AT_ONCE} callers, {seconds:.1f} s", over, *_NONE[:2], 0]
    used = _tokens(running)
    differs = abs(used["daily"] - admitted * cost) + abs(used["rated"] - in_rate * cost)
    yield ["tokens by which /usage differs from the answers", differs, *_NONE[:2], 0]


async def _admitted(ask: HttpCalls | GrpcCalls) -> str:
    outcome = await ask()
    if outcome not in (OK, "429", "RESOURCE_EXHAUSTED"):
        raise RuntimeError(f"a call of a key with a quota failed: {outcome}")
    return outcome


# Shares


def _gap() -> list[Any]:
    """Texts of the corpus by two keys of weights 1 and 3 in the engine's queue; each has always some waiting."""
    draw, lane, shares = random.Random(7), FairLane(), {1: Share(1, 1), 2: Share(2, 3)}
    lengths = [max(1, len(text) // 4) for text in corpus.corpus(1024)]
    waiting, served, gaps = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0.0), [0.0]
    for _ in range(_GAP_BATCHES):
        for tenant, share in shares.items():
            while waiting[tenant] < _GAP_WAITING * 2:
                length = draw.choice(lengths)
                count = draw.choice((1, 1, _GAP_WAITING))
                job = Job(["x"] * count, InferOptions(), Lane.BULK, None)
                job.belongs_to(share)
                lane.put(QueueEntry(job, np.arange(count), Encoded(np.zeros((count, length), np.int32))))
                waiting[tenant] += count
        for entry in lane.take(_GAP_TOKENS, _GAP_WAITING, 0.0).entries:
            share = entry.job.share
            waiting[share.tenant] -= entry.texts
            served[share.tenant] += entry.tokens / share.weight
        gaps.append(served[1] - served[2])
    gap = (max(gaps) - min(gaps)) / (max(lengths) / min(share.weight for share in shares.values()))
    return ["gap of two busy keys, × largest text / weight", gap, None, None, _GAP]


def _shares(running: Fleet, folder: Path) -> list[Any]:
    """Both keys have calls waiting all the time; the larger one's tokens over the other's, from 3."""
    seconds = 12.0
    bulk = _arrow_bodies(corpus.corpus(1024), _SHARED_TEXTS)
    arrow = LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow")
    with ExitStack() as stack:
        callers = [_caller(stack, arrow, folder / "shared.json", bulk, key) for key in ("three", "flood")]
        with ThreadPoolExecutor(2) as pool:
            work = [pool.submit(each.ask, "run", {"callers": 32, "seconds": seconds + 4}) for each in callers]
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
