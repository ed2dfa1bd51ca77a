"""`bench bimodal`: queries at a fixed rate beside a bulk job that saturates the instance; what each costs the other."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Task
from bench.fleet import fleet
from bench.progress import partial, rounds, say
from bench.report import publish
from teimgr.client import AsyncClient

HEADER = (
    *("checkout", "bulk texts/s alone", "beside queries", "bulk lost %", "least", "most"),
    *("idle p50 ms", "idle p99 ms", "beside p50 ms", "beside p99 ms", "p99 − 2 × idle p99 ms", "in bulk tokens"),
)
_INSTANCE = "bench"
# Until a query has come, bulk batches are large: the first second of a phase is no steady state.
_WARM_S = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rate", type=float, default=20.0, help="queries a second (20)")
    parser.add_argument("--idle", type=float, default=6.0, help="seconds of queries without bulk, in a round (6)")
    parser.add_argument("--texts", type=int, default=1000, help="of a bulk pass, of mixed lengths (1000)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of idle, alone and beside (4)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in turns")


@dataclass
class Found:
    """Of one checkout: latencies in ms of all rounds, and of each round the rates of bulk in texts/s."""

    idle_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts, queries = corpus.corpus(options.texts), corpus.queries(1000)
    tokens = weights.count_tokens(weights.minilm(), texts) / len(texts)
    checkouts = {"here": None} | ({"against": options.against} if options.against else {})
    found = {name: Found() for name in checkouts}
    with ExitStack() as open_:
        file = Path(open_.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
        file.write_text(json.dumps(texts))
        targets = {name: open_.enter_context(_served(path, file)) for name, path in checkouts.items()}
        with partial():
            for number in rounds(options.rounds):
                for name, target in targets.items():
                    _round(target, queries, options, found[name], alone_first=number % 2 == 1)
                    say(f"  {name}: {found[name].alone[-1]:.0f} and {found[name].beside[-1]:.0f} texts/s")
    records = [_record(name, each, tokens) for name, each in found.items() if each.beside]
    facts = {
        "model": "all-MiniLM-L6-v2, one instance",
        "queries": f"{options.rate:g} a second, one unary Embed each, of 4 to 14 words "
        f"(digest {corpus.digest(queries)}); a latency begins when the schedule names it, answered earlier ones or not",
        "bulk": f"{options.texts} texts of mixed length by EmbedArrow from another process, two batches in flight, "
        f"{tokens:.0f} tokens each",
        "method": f"{options.rounds} rounds of three phases: queries for {options.idle:g} s, bulk alone, both; the "
        "rate lost is that of a round: median, least, most; latencies are of all rounds, less a phase's first second",
        "target": "the p99 beside bulk is at most 2 × the idle p99 + one batch, and bulk loses less than 5 %; the last "
        "column is the part of p99 above 2 × idle, as the bulk tokens that are computed in that time",
    }
    rows = [[record[key] for key in _KEYS] for record in records]
    publish("bimodal", facts, HEADER, rows, {"rows": records})
    return 0


_KEYS = (
    *("checkout", "alone_texts_per_s", "beside_texts_per_s", "lost", "lost_least", "lost_most"),
    *("idle_p50_ms", "idle_p99_ms", "beside_p50_ms", "beside_p99_ms", "over_ms", "over_tokens"),
)


@dataclass(frozen=True)
class Target:
    """The gRPC address of a daemon with one instance, and a bulk caller."""

    grpc: str
    bulk: Child


@contextmanager
def _served(checkout: Path | None, file: Path) -> Iterator[Target]:
    with fleet(checkout) as running:
        running.client.create(_INSTANCE, str(weights.minilm()))
        running.client.wait_until_running(_INSTANCE, deadline_s=120)
        with child(Task("served", grpc=running.grpc, instance=_INSTANCE)) as bulk:
            bulk.ask("texts", str(file))
            yield Target(running.grpc, bulk)


def _round(target: Target, queries: list[str], options: argparse.Namespace, found: Found, alone_first: bool) -> None:
    end = time.perf_counter() + options.idle
    idle, _ = asyncio.run(paced(target.grpc, queries, options.rate, lambda: time.perf_counter() > end))
    alone_s = float(target.bulk.ask("pass")["seconds"]) if alone_first else 0.0
    beside, beside_s = asyncio.run(paced(target.grpc, queries, options.rate, target.bulk))
    alone_s = alone_s or float(target.bulk.ask("pass")["seconds"])
    found.idle_ms += idle
    found.beside_ms += beside
    found.alone.append(options.texts / alone_s)
    found.beside.append(options.texts / beside_s)


async def paced(
    grpc: str, texts: list[str], rate: float, until: Callable[[], bool] | Child
) -> tuple[list[float], float]:
    """Latencies in ms of `rate` queries a second, each from the moment it was due, less those of the first second;
    until the function is true, or for as long as a pass of the bulk caller takes, which is begun here. The seconds of
    that pass are the second result.
    """
    samples: list[tuple[float, float]] = []
    async with AsyncClient(grpc=grpc) as client, asyncio.TaskGroup() as group:
        await client.embed(texts[0], instance=_INSTANCE)
        bulk = asyncio.create_task(asyncio.to_thread(until.ask, "pass")) if isinstance(until, Child) else None
        began = time.perf_counter()

        async def one(text: str, due: float) -> None:
            await client.embed(text, instance=_INSTANCE)
            samples.append((due - began, (time.perf_counter() - due) * 1e3))

        number = 0
        while not (until() if callable(until) else bulk and bulk.done()):
            number += 1
            due = began + number / rate
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(one(texts[number % len(texts)], due))
    seconds = float((await bulk)["seconds"]) if bulk else 0.0
    return [latency for at, latency in samples if at > _WARM_S], seconds


def _record(name: str, found: Found, tokens: float) -> dict[str, Any]:
    alone, beside = median(found.alone), median(found.beside)
    lost = [100 * (1 - with_ / without) for without, with_ in zip(found.alone, found.beside, strict=True)]
    idle_p50, idle_p99 = np.percentile(found.idle_ms, (50, 99)).tolist()
    beside_p50, beside_p99 = np.percentile(found.beside_ms, (50, 99)).tolist()
    over_ms = beside_p99 - 2 * idle_p99
    return {
        "checkout": name,
        "alone_texts_per_s": alone,
        "beside_texts_per_s": beside,
        "lost": median(lost),
        "lost_least": min(lost),
        "lost_most": max(lost),
        "idle_p50_ms": idle_p50,
        "idle_p99_ms": idle_p99,
        "beside_p50_ms": beside_p50,
        "beside_p99_ms": beside_p99,
        "over_ms": over_ms,
        "over_tokens": over_ms / 1e3 * alone * tokens,
        "samples": vars(found),
    }
