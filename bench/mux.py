"""`bench mux`: single queries through the multiplexer, alone and beside bulk work, and requests per second."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Task
from bench.fleet import fleet
from bench.progress import partial, say
from bench.report import publish
from teimgr.client import AsyncClient

HEADER = ("load", "queries", "p50 ms", "p90 ms", "p99 ms", "max ms", "requests/s", "bulk texts/s")
_INSTANCE = "bench"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--queries", type=int, default=500, help="queries of a row (500)")
    parser.add_argument("--bulk", type=int, default=1500, help="texts of the bulk job (1500)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[2, 8, 64, 256], help="calls in flight (2 8 64 256)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    model = str(weights.minilm())
    with fleet() as running, tempfile.TemporaryDirectory() as folder:
        running.client.create(_INSTANCE, model)
        running.client.wait_until_running(_INSTANCE, deadline_s=120)
        dtype = running.client.info(instance=_INSTANCE).dtype
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(corpus.corpus(options.bulk)))
        records: list[dict[str, Any]] = []
        with child(Task("served", grpc=running.grpc, instance=_INSTANCE)) as bulk, partial():
            bulk.ask("texts", str(file))
            asyncio.run(_measure(running.grpc, bulk, options, records))
    texts = corpus.queries(options.queries)
    facts = {
        "model": f"all-MiniLM-L6-v2, {dtype}",
        "queries": f"{options.queries} of 4 to 14 words (digest {corpus.digest(texts)}), one unary Embed each",
        "bulk": f"{options.bulk} texts of mixed length by EmbedArrow from another process, two batches in flight",
    }
    keys = ("load", "queries", "p50", "p90", "p99", "max", "requests_per_s", "bulk_texts_per_s")
    publish("mux", facts, HEADER, [[record[key] for key in keys] for record in records], {"rows": records})
    return 0


async def _measure(grpc: str, bulk: Child, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Adds one record after the other."""
    texts = corpus.queries(options.queries)
    async with AsyncClient(grpc=grpc) as client:
        await client.embed(texts[:50], instance=_INSTANCE)  # warm
        alone_s = (await asyncio.to_thread(bulk.ask, "pass"))["seconds"]
        say("bulk alone, done; queries one at a time")
        records.append(_record("bulk alone", [], 0.0, options.bulk / alone_s))
        samples, elapsed_s = await _queries(client, texts, 1, lambda: False)
        records.append(_record("one at a time, idle", samples, elapsed_s))
        say("queries beside bulk")
        records.append(await _beside(client, texts, bulk, options.bulk))
        for concurrency in options.concurrency:
            say(f"{concurrency} queries in flight")
            samples, elapsed_s = await _queries(client, texts, concurrency, lambda: False)
            records.append(_record(f"{concurrency} in flight, idle", samples, elapsed_s))


async def _beside(client: AsyncClient, texts: list[str], bulk: Child, bulk_texts: int) -> dict[str, Any]:
    """Queries one at a time for as long as a bulk job runs, at most as many as there are texts."""
    working = asyncio.create_task(asyncio.to_thread(bulk.ask, "pass"))
    samples, elapsed_s = await _queries(client, texts, 1, working.done)
    seconds = (await working)["seconds"]
    return _record("one at a time, beside bulk", samples, elapsed_s, bulk_texts / seconds)


async def _queries(
    client: AsyncClient, texts: list[str], concurrency: int, enough: Callable[[], bool]
) -> tuple[list[float], float]:
    """Latencies in ms, and the seconds the whole took."""
    waiting = iter(texts)
    samples_ms: list[float] = []

    async def work() -> None:
        for text in waiting:
            if enough():
                return
            began = time.perf_counter()
            await client.embed(text, instance=_INSTANCE)
            samples_ms.append((time.perf_counter() - began) * 1e3)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return samples_ms, time.perf_counter() - began


def _record(load: str, samples_ms: list[float], elapsed_s: float, bulk: float | None = None) -> dict[str, Any]:
    p50, p90, p99 = np.percentile(samples_ms, (50, 90, 99)).tolist() if samples_ms else (None, None, None)
    return {
        "load": load,
        "queries": len(samples_ms),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(samples_ms, default=None),
        "requests_per_s": len(samples_ms) / elapsed_s if samples_ms else None,
        "bulk_texts_per_s": bulk,
    }
