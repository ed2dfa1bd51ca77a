"""`bench peers`: bulk texts/s of the engine and of other runtimes in process, same texts and weights, taking turns."""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from pathlib import Path
from typing import Any

from bench import corpus, weights
from bench.contest import Row, compete, entrants
from bench.encoders import Task
from bench.progress import incomplete, partial, say
from bench.report import publish
from bench.table import ratios

HEADER = (
    *("texts", "path", "dtype", "tokens/s median", "best", "× baseline median", "best", "of limit"),
    *("cosine mean", "min"),
)
KEYS = (*HEADER[:4], "tokens/s best", "× baseline median", "× baseline best", "of limit", "cosine mean", "cosine min")
LIMIT = "matrix products alone"
BASELINE = "sentence-transformers, batch 32"
_PACKAGES = {"openvino": "openvino", "openvino-latency": "openvino", "onnxruntime": "onnxruntime"}
_SEED = 21
_MODELS = {
    "minilm": "all-MiniLM-L6-v2, the real weights, 256 tokens at most",
    "base": "BERT-base (12 × 768), random weights, 512 tokens at most",
    "large": "BERT-large (24 × 1,024), random weights, 512 tokens at most",
}
_TEXTS = {"minilm": 240, "base": 50, "large": 20}
CORPORA = ("mixed", "short", "long")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, help="of mixed lengths (240; of BERT-base 50, of BERT-large 20)")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=CORPORA, help="which texts (all)")
    parser.add_argument(
        "--only", nargs="+", metavar="PATH", help="measure only paths whose name begins with one of these"
    )
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")
    parser.add_argument(
        "--shape", choices=tuple(_MODELS), default="minilm", help="BERT-base or -large with random weights"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        model = weights.minilm()
        if options.shape != "minilm":
            model = weights.random_bert(Path(folder) / options.shape, model, options.shape)
        _contest(model, options)
    return 0


def _contest(directory: Path, options: argparse.Namespace) -> None:
    model = str(directory)
    tasks = {
        BASELINE: Task("sentence-transformers", model),
        "OpenVINO, float32": Task("openvino", model, dtype="float32"),
        "OpenVINO, bfloat16": Task("openvino", model, dtype="bfloat16"),
        "OpenVINO, bfloat16, latency hint": Task("openvino-latency", model, dtype="bfloat16"),
        "ONNX Runtime, float32": Task("onnxruntime", model),
        "teimgr engine, float32": Task("engine", model),
        "teimgr engine, auto": Task("engine", model, dtype="auto"),
        f"{LIMIT}, float32": Task("products", model),
        f"{LIMIT}, bfloat16": Task("products", model, dtype="bfloat16"),
        "ONNX Runtime, int8": Task("onnxruntime", model, dtype="int8"),
        "teimgr engine, int8": Task("engine", model, dtype="int8"),
    }
    missing = {kind for kind, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
    tasks = {name: task for name, task in tasks.items() if task.kind not in missing}
    if options.only:
        tasks = {name: task for name, task in tasks.items() if name.startswith((BASELINE, *options.only))}
    lines: list[list[Any]] = []
    counts = {}
    with entrants(tasks, skip_failing=True) as children, partial():
        failed = ", ".join(tasks.keys() - children.keys())
        for corpus_name, texts in corpora(options.texts or _TEXTS[options.shape]).items():
            if corpus_name not in options.corpora or incomplete():
                continue
            say(f"{corpus_name} texts")
            tokens = weights.count_tokens(directory, texts)
            rows = compete(children, texts, options.rounds, {})
            counts[corpus_name] = f"{len(texts)} texts, {tokens} tokens, digest {corpus.digest(texts)}"
            limits = {row.dtype: row for row in rows if row.name.startswith(LIMIT)}
            lines += [[corpus_name, *_line(row, rows[0], limits, tokens)] for row in rows]
    facts = {
        **counts,
        "model": _MODELS[options.shape],
        "method": f"{options.rounds} rounds, one pass of each path in turn, each in a process of its own, all cores",
        "peers": "one traced graph with pooling, shortest texts first, batches of 2,048 padded tokens; "
        "ONNX Runtime without the fusions of its transformers tool",
        "of limit": "the time of the linear layers' matrix products alone in the same type, by oneDNN, over a path's; "
        "attention, norms, activations and tokenization come on top of them",
        "not installed": ", ".join(sorted(missing)) or "none",
        "could not load": failed or "none",
    }
    name = "peers" if options.shape == "minilm" else f"peers-{options.shape}"
    publish(name, facts, HEADER, lines, {"rows": [dict(zip(KEYS, line, strict=True)) for line in lines]})


def _line(row: Row, baseline: Row, limits: dict[str, Row], tokens: int) -> list[Any]:
    """One path, from its name on."""
    factor, limit = ratios(row, baseline), limits.get(row.dtype)
    share = None if limit is None else f"{ratios(row, limit)['median']:.0%}"
    is_limit = row.name.startswith(LIMIT)
    cosines = ["", ""] if is_limit else [f"{row.cosine_mean:.5f}", f"{row.cosine_min:.5f}"]
    rates = (tokens / row.median_s, tokens / row.best_s)
    return [row.name, row.dtype, *rates, factor["median"], factor["best"], share, *cosines]


def corpora(count: int) -> dict[str, list[str]]:
    """Different texts: of mixed lengths, of 5 to 20 words, and longer than the model takes."""
    chooser = random.Random(_SEED)
    mixed = list(dict.fromkeys(corpus.corpus(count)))
    words = " ".join(corpus.corpus(4 * count)).split()
    starts = [chooser.randrange(len(words) - 300) for _ in range(5 * count)]
    short = [" ".join(words[at : at + chooser.randint(4, 15)]) for at in starts[: 4 * count]]
    long = [" ".join(words[at : at + 300]) for at in starts[: count // 6]]
    return {"mixed": mixed, "short": list(dict.fromkeys(short)), "long": list(dict.fromkeys(long))}
