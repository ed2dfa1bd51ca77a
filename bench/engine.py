"""`bench engine`: the same texts and weights through sentence-transformers, the bare engine and the daemon."""

from __future__ import annotations

import argparse
import os

from bench import corpus, weights
from bench.contest import Row, compete, entrants
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.machine import peak_rss_mib, unique_mib
from bench.report import publish
from bench.table import HEADER, line, ratios, record
from teimgr.client import Instance

BASELINE = "sentence-transformers, batch 32"
BARE = "teimgr engine, auto"
SERVED = "teimgr daemon, EmbedArrow"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=600, help="texts of the corpus (600)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    model = weights.minilm()
    texts = corpus.corpus(options.texts)
    tokens = weights.count_tokens(model, texts)
    with fleet() as running:
        running.client.create("bench", str(model))
        worker = running.client.wait_until_running("bench", deadline_s=120)
        # What `auto` means is measured at load; the bare engine takes the daemon's answer, so that the two compare.
        auto = running.client.info(instance="bench").dtype
        tasks = {
            BASELINE: Task("sentence-transformers", str(model)),
            "teimgr engine, float32": Task("engine", str(model)),
            BARE: Task("engine", str(model), dtype=auto),
            SERVED: Task("served", grpc=running.grpc, instance="bench"),
        }
        with entrants(tasks) as children:
            rows = compete(children, texts, options.rounds, {SERVED: running.cpu_s})
        served = next(row for row in rows if row.name == SERVED)
        served.memory = _worker_memory(running, worker.pid)
    _publish(rows, texts, tokens, options.rounds, worker)
    return 0


def _worker_memory(running: Fleet, pid: int | None) -> dict[str, float]:
    """Of the worker process, which holds the model; the client's own is of no interest."""
    if pid is None:
        raise RuntimeError("the running instance has no process")
    return {"peak_rss_mib": peak_rss_mib(pid), "unique_mib": unique_mib(pid)}


def _publish(rows: list[Row], texts: list[str], tokens: int, rounds: int, worker: Instance) -> None:
    by_name = {row.name: row for row in rows}
    bare = ratios(by_name[SERVED], by_name[BARE])
    facts = {
        "texts": f"{len(texts)} of mixed length (digest {corpus.digest(texts)}), {tokens} real tokens",
        "model": "all-MiniLM-L6-v2, the real weights, 256 tokens at most",
        "threads": f"{len(os.sched_getaffinity(0))} bare, {worker.details.get('threads')} in the worker",
        "method": f"{rounds} rounds, one pass of each path in turn; ratios within a round",
        "EmbedArrow against the bare engine": f"{bare['median']:.1%} (median), {bare['best']:.1%} (best passes)",
    }
    table = [line(row, rows[0], len(texts), tokens) for row in rows]
    publish("engine", facts, HEADER, table, {"rows": [record(row, rows[0], len(texts), tokens) for row in rows]})
