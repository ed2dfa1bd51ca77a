"""`bench stages`: where the microseconds of one query and of one text of a bulk job go, stage by stage."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Bare, Task
from bench.fleet import fleet
from bench.forward import forward, load, packed
from bench.front import INSTANCE, Load, Target
from bench.progress import partial, rounds, say
from bench.report import publish
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.text.tokenizer import TokenizeOptions

HEADER = ("stage", "µs", "least", "most", "of the whole")
_QUERY, _BULK = "one query: ", "one bulk text: "
_EMBED, _MUX, _OPENAI = "/embed", "mux Embed", "/v1/embeddings"
_PROCESSES = ("daemon", "mux", "worker")
_THREADS = ("tokenizer", "engine-bulk", "finisher")
_REPEATS = 50


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=400, help="of a bulk pass, of mixed lengths (400)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of the queries through one interface (1.5)")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each stage, in turn (5)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts, queries = corpus.corpus(options.texts), corpus.queries(256)
    tokens = weights.count_tokens(weights.minilm(), texts) / len(texts)
    query_tokens = weights.count_tokens(weights.minilm(), queries) / len(queries)
    spent: dict[str, list[float]] = {}
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        running = open_.enter_context(fleet())
        target = Target(open_, running, weights.minilm(), queries, 1, folder / "requests")
        served = open_.enter_context(child(Task("served", grpc=running.grpc, instance=INSTANCE)))
        served.ask("texts", str(target.texts(texts)))
        dtype = running.client.info(instance=INSTANCE).dtype
        engine = Bare(Task("engine", str(weights.minilm()), dtype=dtype))
        ways = _in_process(dtype, engine, texts, queries)
        with partial(), torch.inference_mode():
            for _ in rounds(options.rounds + 1):
                for name, us in _round(ways, target, served, texts, options.seconds).items():
                    spent.setdefault(name, []).append(us)
        engine.close()
    found = {name: each[1:] or each for name, each in spent.items()}  # the first round warms up
    facts = {
        "model": f"all-MiniLM-L6-v2, {dtype}, {len(os.sched_getaffinity(0))} threads",
        "one query": f"wall time, one caller at a time; {len(queries)} queries, {query_tokens:.1f} tokens in the mean",
        "one bulk text": f"a pass of {options.texts} texts of {tokens:.1f} tokens in the mean, over their number; "
        "CPU rows are processor time of a process or thread, of which several work at once",
        "stages": "tokenize, forward and engine are measured in this process; what an interface adds is its round trip "
        "less that of the engine: client, sockets, mux or daemon, the worker's loop, reply",
        "method": f"{options.rounds} rounds in turn; medians of the rounds, least, most",
    }
    rows = _rows(found)
    publish("stages", facts, HEADER, rows, {"rows": [dict(zip(HEADER, row, strict=True)) for row in rows], "us": found})
    return 0


def _in_process(
    dtype: str, engine: Bare, texts: list[str], queries: list[str]
) -> dict[str, tuple[Callable[[], object], int]]:
    """Each stage and how many inputs a pass of it has."""
    parts = load(dtype, len(os.sched_getaffinity(0)), "")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenize = TokenizeOptions()
    some = queries[:_REPEATS]
    encoded = [each for each in parts.tokenizer.encode(texts, tokenize) if isinstance(each, Encoded)]
    singles = [each for each in parts.tokenizer.encode(some, tokenize) if isinstance(each, Encoded)]
    forwards = [forward(parts.model, packed([each])) for each in singles]
    return {
        f"{_QUERY}tokenize": (lambda: [parts.tokenizer.encode([text], tokenize) for text in some], len(some)),
        f"{_QUERY}pack": (lambda: [packed([each]) for each in singles], len(some)),
        f"{_QUERY}forward": (lambda: [each() for each in forwards], len(some)),
        f"{_QUERY}engine": (lambda: [engine.query(text) for text in some], len(some)),
        f"{_BULK}tokenize": (lambda: parts.tokenizer.encode(texts, tokenize), len(texts)),
        f"{_BULK}pack": (lambda: packed(encoded), len(texts)),
        f"{_BULK}forward": (forward(parts.model, packed(encoded)), len(texts)),
        f"{_BULK}engine": (lambda: engine.encode(texts), len(texts)),
    }


def _round(
    ways: dict[str, tuple[Callable[[], object], int]], target: Target, served: Child, texts: list[str], seconds: float
) -> dict[str, float]:
    """µs of every stage, of one input."""
    found: dict[str, float] = {}
    for name, (way, inputs) in ways.items():
        before, began = _thread_s(), time.perf_counter()
        way()
        found[name] = (time.perf_counter() - began) / inputs * 1e6
        if name == f"{_BULK}engine":
            for thread, used in _thread_s().items():
                found[f"{_BULK}CPU of the {thread} thread"] = (used - before[thread]) / inputs * 1e6
    for interface in (_EMBED, _MUX, _OPENAI):
        answer = target.measure(Load(interface, 1), seconds)
        found[f"{_QUERY}{interface}"] = answer["p50_ms"] * 1e3
        for process in _PROCESSES:
            found[f"{_QUERY}{interface}, CPU of the {process}"] = answer[f"{process}_cpu_s"] / answer["all_calls"] * 1e6
    before = target.cpu_s()
    found[f"{_BULK}EmbedArrow"] = served.ask("pass")["seconds"] / len(texts) * 1e6
    for process, used in target.cpu_s().items():
        found[f"{_BULK}EmbedArrow, CPU of the {process}"] = (used - before[process]) / len(texts) * 1e6
    query, text = found[f"{_QUERY}{_MUX}"], found[f"{_BULK}EmbedArrow"]
    say(f"  one query through the mux {query:.0f} µs, a bulk text {text:.0f} µs")
    return found


def _thread_s() -> dict[str, float]:
    """CPU seconds of the engine's threads in this process."""
    clocks = {thread.name.removeprefix("teimgr-"): thread.ident for thread in threading.enumerate()}
    return {
        name: time.clock_gettime(time.pthread_getcpuclockid(ident))
        for name in _THREADS
        if (ident := clocks.get(name)) is not None
    }


def _rows(found: dict[str, list[float]]) -> list[list[Any]]:
    """The stages in their order, with what the rows around them leave."""
    middle = {name: median(each) for name, each in found.items()}
    wholes = {_QUERY: middle.get(f"{_QUERY}{_MUX}"), _BULK: middle.get(f"{_BULK}EmbedArrow")}
    rows: list[list[Any]] = []

    def add(name: str, values: list[float]) -> None:
        whole = wholes[_QUERY if name.startswith(_QUERY) else _BULK]
        share = f"{median(values) / whole:.0%}" if whole else None
        rows.append([name, median(values), min(values), max(values), share])

    for prefix, interfaces in ((_QUERY, (_EMBED, _MUX, _OPENAI)), (_BULK, ("EmbedArrow",))):
        for name, values in found.items():
            if name.startswith(prefix) and not any(name == f"{prefix}{interface}" for interface in interfaces):
                add(name, values)
            elif name.startswith(prefix):
                add(f"{name}, whole", values)
                add(f"{name}, beside the engine", _less(values, found[f"{prefix}engine"]))
        stages = (found[f"{prefix}{stage}"] for stage in ("engine", "tokenize", "pack", "forward"))
        add(f"{prefix}queue, threads, results", _less(*stages))
    return rows


def _less(values: list[float], *others: list[float]) -> list[float]:
    """Round by round."""
    return [value - sum(rest) for value, *rest in zip(values, *others, strict=False)]
