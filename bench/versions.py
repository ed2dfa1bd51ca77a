"""`bench versions --against PATH`: MiniLM in bulk and as single queries, this checkout and an older one in turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.bimodal import paced
from bench.contest import Child, child
from bench.corpora import DESCRIBED, corpora, names
from bench.encoders import Task
from bench.fleet import fleet
from bench.machine import revision
from bench.progress import partial, rounds, say
from bench.report import publish
from teimgr.client import AsyncClient

HEADER = ("figure", "here", "there", "× median", "least", "most")
_INSTANCE = "bench"
_WARM_UP_QUERIES = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--against", type=Path, metavar="PATH", required=True, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of bulk and queries (5)")
    parser.add_argument("--texts", type=int, default=480, help="of the mixed corpus (480)")
    parser.add_argument("--queries", type=int, default=200, help="back to back, in a round (200)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of one query every 50 ms, in a round (6)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    bulk, queries = corpora(weights.minilm(), options.texts), corpus.queries(1000)
    found: dict[str, list[dict[str, float]]] = {"here": [], "there": []}
    with ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        for name, texts in bulk.items():
            (folder / f"{name}.json").write_text(json.dumps(texts))
        checkouts = {"here": None, "there": options.against}
        targets = {name: open_.enter_context(_served(path)) for name, path in checkouts.items()}
        with partial():
            for _ in rounds(options.rounds):
                for name, target in targets.items():
                    found[name].append(_round(target, folder, queries, options))
                    say(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found[name][-1].items()))
    if not found["there"]:
        raise KeyboardInterrupt
    records = [_record(figure, found) for figure in found["there"][0]]
    tokens = ", ".join(
        f"{name} ({DESCRIBED[name]}) {weights.count_tokens(weights.minilm(), texts):,}" for name, texts in bulk.items()
    )
    facts = {
        "there": revision(options.against),
        "model": "all-MiniLM-L6-v2, one replica in a daemon of each, by its own choice of precision",
        "bulk": "EmbedArrow from another process by the checkout's own client; tokens: " + tokens,
        "queries": f"of 4 to 14 words (digest {corpus.digest(queries)}), one unary Embed each through the mux: "
        f"{options.queries} back to back, then one every 50 ms for {options.seconds:g} s",
        "method": f"{options.rounds} rounds, in turn; × is the factor of a round by which this checkout is faster",
    }
    publish("versions", facts, HEADER, [list(record.values())[:6] for record in records], {"rows": records})
    return 0


@dataclass(frozen=True)
class _Target:
    """The gRPC address of a daemon with one instance, and a bulk caller."""

    grpc: str
    bulk: Child


@contextmanager
def _served(checkout: Path | None) -> Iterator[_Target]:
    with fleet(checkout) as running:
        running.client.create(_INSTANCE, str(weights.minilm()))
        running.client.wait_until_running(_INSTANCE, deadline_s=120)
        with child(Task("served", grpc=running.grpc, instance=_INSTANCE), checkout) as bulk:
            yield _Target(running.grpc, bulk)


def _round(target: _Target, folder: Path, queries: list[str], options: argparse.Namespace) -> dict[str, float]:
    """The figures of one checkout: rates in texts/s, latencies in ms."""
    found = {}
    for name in names(weights.minilm()):
        file = folder / f"{name}.json"
        target.bulk.ask("texts", str(file))
        found[f"bulk, {name} texts"] = len(json.loads(file.read_text())) / target.bulk.ask("pass")["seconds"]
    one_by_one = asyncio.run(_back_to_back(target.grpc, queries[: options.queries]))
    end = time.perf_counter() + options.seconds
    every_50_ms, _ = asyncio.run(paced(target.grpc, queries, 20.0, lambda: time.perf_counter() > end))
    for what, samples_ms in (("queries back to back", one_by_one), ("one query every 50 ms", every_50_ms)):
        p50, p99 = np.percentile(samples_ms, (50, 99)).tolist()
        found |= {f"{what}, p50 ms": p50, f"{what}, p99 ms": p99}
    return found


async def _back_to_back(grpc: str, queries: list[str]) -> list[float]:
    """Latencies in ms."""
    samples_ms = []
    async with AsyncClient(grpc=grpc) as client:
        for text in [*queries[:_WARM_UP_QUERIES], *queries]:
            began = time.perf_counter()
            await client.embed(text, instance=_INSTANCE)
            samples_ms.append((time.perf_counter() - began) * 1e3)
    return samples_ms[_WARM_UP_QUERIES:]


def _record(figure: str, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    here, there = ([each[figure] for each in found[name]] for name in ("here", "there"))
    is_time = figure.endswith("ms")
    factors = [theirs / own if is_time else own / theirs for own, theirs in zip(here, there, strict=False)]
    return {
        "figure": figure,
        "here": median(here),
        "there": median(there),
        "times": median(factors),
        "least": min(factors),
        "most": max(factors),
        "rounds": {"here": here, "there": there},
    }
