"""`bench guard`: a short comparison whose ratios must not fall below those of `bounds.json`; never times."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bench import corpus, weights
from bench.contest import Row, compete
from bench.encoders import Task
from bench.fleet import fleet
from bench.forward import query_ratio
from bench.report import markdown_table
from teimgr.engine.native_library import native_library

_BOUNDS = Path(__file__).with_name("bounds.json")
_PEER, _ENGINE, _SERVED, _INT8 = "sentence-transformers", "engine", "EmbedArrow", "int8"
_TRIES = 2  # a machine may be disturbed


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=150, help="texts of a pass (150)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 where a ratio is below its bound in each of two tries."""
    bounds: dict[str, float] = json.loads(_BOUNDS.read_text())
    for left in reversed(range(_TRIES)):
        found = _bulk(options.texts, options.rounds)
        if native_library() is not None:
            found["native forward against the model's own, one query"] = query_ratio(options.rounds)
        below = [name for name, ratio in found.items() if ratio < bounds[name]]
        verdicts = [[name, ratio, bounds[name], "below" if name in below else ""] for name, ratio in found.items()]
        skipped = [[name, None, bound, "not on this machine"] for name, bound in bounds.items() if name not in found]
        print(markdown_table(("ratio", "measured", "at least", ""), verdicts + skipped))
        if not below or not left:
            return bool(below)
        print("\nOnce more: something else may have run.\n")
    return 1


def _bulk(count: int, rounds: int) -> dict[str, float]:
    library, model = native_library(), str(weights.minilm())
    with fleet() as running:
        running.client.create("guard", model)
        running.client.wait_until_running("guard", deadline_s=120)
        auto = running.client.info(instance="guard").dtype
        tasks = {
            _PEER: Task("sentence-transformers", model),
            _ENGINE: Task("engine", model, dtype=auto),
            _SERVED: Task("served", grpc=running.grpc, instance="guard"),
        }
        if library is not None and library.multiplies_bytes:
            tasks[_INT8] = Task("engine", model, dtype="int8")
        rows = {row.name: row for row in compete(tasks, corpus.corpus(count), rounds, {_SERVED: running.cpu_s})}
    found = {
        "engine against sentence-transformers, bulk": _times_as_fast(rows[_ENGINE], rows[_PEER]),
        "EmbedArrow against the engine, bulk": _times_as_fast(rows[_SERVED], rows[_ENGINE]),
    }
    if _INT8 in rows:
        found["int8 against auto, bulk"] = _times_as_fast(rows[_INT8], rows[_ENGINE])
    return found


def _times_as_fast(row: Row, other: Row) -> float:
    """The median over the rounds."""
    return statistics.median(theirs / ours for ours, theirs in zip(row.seconds, other.seconds, strict=True))
