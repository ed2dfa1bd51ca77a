"""`bench rerank`: 100 candidates for one query, by sentence-transformers' CrossEncoder and through the daemon."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench import corpus, weights
from bench.contest import compete, entrants
from bench.encoders import Task
from bench.fleet import fleet
from bench.report import publish
from bench.table import ratios

HEADER = (
    "path",
    "dtype",
    "candidates/s",
    "ms of a call",
    "least",
    "most",
    "× baseline median",
    "best",
    "foreign cores",
)
_KEYS = ("path", "dtype", "candidates_per_s", "ms", "least", "most", "ratio_median", "ratio_best", "foreign_cores")
BASELINE = "sentence-transformers CrossEncoder, batch 32"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--candidates", type=int, default=100, help="texts of a call, of mixed length (100)")
    parser.add_argument("--rounds", type=int, default=8, help="calls of each path, in turn (8)")
    parser.add_argument("--shape", choices=tuple(weights.SHAPES), default="mini", help="of the model (mini)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts = [*corpus.queries(1), *corpus.corpus(options.candidates)]
    with tempfile.TemporaryDirectory() as folder, fleet() as running:
        model = weights.random_reranker(Path(folder) / "model", weights.minilm(), options.shape)
        tasks = {BASELINE: Task("cross-encoder", str(model))}
        in_one_call = ["--max-client-batch-size", str(options.candidates)]  # the default is TEI's, 32
        for dtype in ("float32", "auto"):
            running.client.create(dtype, str(model), dtype=dtype, extra_args=in_one_call)
            running.client.wait_until_running(dtype, deadline_s=120)
            tasks[f"teimgr daemon, Rerank, {dtype}"] = Task("reranked", grpc=running.grpc, instance=dtype)
        own_cpu = {name: running.cpu_s for name in tasks if name != BASELINE}
        with entrants(tasks) as children:
            rows = compete(children, texts, options.rounds, own_cpu)
    records = []
    for row in rows:
        calls_ms = [seconds * 1e3 for seconds in row.seconds]
        times = ratios(row, rows[0])
        spread = (median(calls_ms), min(calls_ms), max(calls_ms), times["median"], times["best"])
        values = (row.name, row.dtype, options.candidates / row.median_s, *spread, median(row.foreign_cores))
        records.append(dict(zip(_KEYS, values, strict=True)))
    facts = {
        "model": f"a BERT of shape {options.shape} {weights.SHAPES[options.shape]} with one label and random weights",
        "texts": f"{options.candidates} candidates of mixed length for a query (digest {corpus.digest(texts)})",
        "method": f"{options.rounds} rounds, one call of each path in turn; ratios within a round",
    }
    publish("rerank", facts, HEADER, [[record[key] for key in _KEYS] for record in records], {"rows": records})
    return 0
