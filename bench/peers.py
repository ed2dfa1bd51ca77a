"""`bench peers`: bulk texts/s of the engine and of other runtimes in process, same texts and weights, taking turns."""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import corpus, published, weights
from bench.contest import Row, compete, entrants
from bench.encoders import Task
from bench.progress import incomplete, partial, say
from bench.report import publish
from bench.table import ratios

HEADER = ("texts", "path", "dtype", "tokens/s median", "best", "× baseline median", "best", "of limit")
KEYS = (*HEADER[:4], "tokens/s best", "× baseline median", "× baseline best", "of limit")
# The last two columns, of vectors and of scores: their header and their keys.
_COSINES = ("cosine mean", "min"), ("cosine mean", "cosine min")
_DIFFERENCES = ("difference mean", "largest"), ("difference mean", "difference largest")
LIMIT = "matrix products alone"
BASELINE = "sentence-transformers, batch 32"
_PACKAGES = {"openvino": "openvino", "openvino-latency": "openvino", "onnxruntime": "onnxruntime"}
_SEED = 21
CORPORA = ("mixed", "short", "long")


@dataclass(frozen=True)
class Shape:
    """A model that can be measured: what the result says of it, the number of mixed texts (of short ones four times as
    many), the baseline's kind, whether `exported` has a graph of it for other runtimes, and the corpora.

    Where a few texts have to be enough they are of similar length: others would be one batch of the baseline, most of
    it padding.
    """

    model: str
    texts: int
    baseline: str = "sentence-transformers"
    has_graph: bool = True
    corpora: tuple[str, ...] = CORPORA


_FEW = ("short",)
_RANDOM = "random weights, 512 tokens at most"
_WITH_MINILMS = f"MiniLM's tokenizer and vocabulary, {_RANDOM}"
SHAPES = {
    "minilm": Shape("all-MiniLM-L6-v2, the real weights, 256 tokens at most", 240),
    "base": Shape(f"BERT-base (12 × 768), {_RANDOM}", 50),
    "large": Shape(f"BERT-large (24 × 1,024), {_RANDOM}", 20),
    "xlm-r-reranker": Shape(
        f"XLM-RoBERTa-base (12 × 768) with a head of one label, {_WITH_MINILMS}; scores of a query with each text",
        12,
        "cross-encoder",
        corpora=_FEW,
    ),
    "splade": Shape(
        f"BERT-base (12 × 768) with its masked-LM head and SPLADE's pooling, {_RANDOM}, biases that leave one word in "
        "128 a weight",
        8,
        "sparse-encoder",
        corpora=_FEW,
    ),
    "modernbert": Shape(
        f"ModernBERT-base (22 × 768, two of three layers with local attention), mean pooling, {_WITH_MINILMS}",
        16,
        has_graph=False,
        corpora=_FEW,
    ),
    "qwen3": Shape(
        f"Qwen3-Embedding-0.6B (28 × 1,024, 16 heads, 8 of keys and values), last-token pooling, {_WITH_MINILMS}",
        8,
        has_graph=False,
        corpora=_FEW,
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, help="of mixed lengths (240; of bigger models fewer)")
    parser.add_argument(
        "--corpora", nargs="+", choices=CORPORA, help="which texts (all; of the last four models short)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATH", help="measure only paths whose name begins with one of these"
    )
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="minilm", help="all but minilm have random weights (minilm)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        _contest(_model(options.shape, Path(folder) / options.shape), options)
    return 0


def _model(shape: str, folder: Path) -> Path:
    if shape == "minilm":
        return weights.minilm()
    make = weights.random_bert if shape in weights.SHAPES else published.random_published
    return make(folder, weights.minilm(), shape)


def _contest(directory: Path, options: argparse.Namespace) -> None:
    shape, is_reranker = SHAPES[options.shape], weights.is_reranker(directory)
    missing = {kind for kind, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
    tasks = {name: task for name, task in _tasks(str(directory), shape).items() if task.kind not in missing}
    if options.only:
        tasks = {name: task for name, task in tasks.items() if name.startswith((BASELINE, *options.only))}
    lines: list[list[Any]] = []
    counts = {}
    with entrants(tasks, skip_failing=True) as children, partial():
        failed = ", ".join(tasks.keys() - children.keys())
        for corpus_name, texts in corpora(options.texts or shape.texts).items():
            if corpus_name not in (options.corpora or shape.corpora) or incomplete():
                continue
            say(f"{corpus_name} texts")
            inputs = [*corpus.queries(1), *texts] if is_reranker else texts
            tokens = weights.count_tokens(directory, inputs)
            rows = compete(children, inputs, options.rounds, {})
            counts[corpus_name] = f"{len(texts)} texts, {tokens} tokens, digest {corpus.digest(inputs)}"
            if is_reranker:
                lowest, highest = rows[0].scores
                counts[corpus_name] += f", with a query, scores of the baseline {lowest:.3f} to {highest:.3f}"
            limits = {row.dtype: row for row in rows if row.name.startswith(LIMIT)}
            lines += [[corpus_name, *_line(row, rows[0], limits, tokens, is_reranker)] for row in rows]
    facts = {
        **counts,
        "model": shape.model,
        "method": f"{options.rounds} rounds, one pass of each path in turn, each in a process of its own, all cores",
        "peers": "one traced graph with its head, shortest texts first, batches of 2,048 padded tokens; "
        "ONNX Runtime without the fusions of its transformers tool"
        if shape.has_graph
        else "sentence-transformers alone",
        "of limit": "the time of the linear layers' matrix products alone in the same type, by oneDNN, over a path's; "
        "attention, norms, activations and tokenization come on top of them",
        "not installed": ", ".join(sorted(missing)) or "none",
        "could not load": failed or "none",
    }
    if is_reranker:
        facts["difference"] = "absolute, of scores between 0 and 1, from the baseline's"
    last_header, last_keys = _DIFFERENCES if is_reranker else _COSINES
    name = "peers" if options.shape == "minilm" else f"peers-{options.shape}"
    records = [dict(zip((*KEYS, *last_keys), line, strict=True)) for line in lines]
    publish(name, facts, (*HEADER, *last_header), lines, {"rows": records})


def _tasks(model: str, shape: Shape) -> dict[str, Task]:
    """What is measured; the others are compared with the first."""
    tasks = {BASELINE: Task(shape.baseline, model)}
    if shape.has_graph:
        tasks |= {
            "OpenVINO, float32": Task("openvino", model, dtype="float32"),
            "OpenVINO, bfloat16": Task("openvino", model, dtype="bfloat16"),
            "OpenVINO, bfloat16, latency hint": Task("openvino-latency", model, dtype="bfloat16"),
            "ONNX Runtime, float32": Task("onnxruntime", model),
            "ONNX Runtime, int8": Task("onnxruntime", model, dtype="int8"),
        }
    else:
        tasks["sentence-transformers, bfloat16, batch 32"] = Task(shape.baseline, model, dtype="bfloat16")
    return tasks | {
        "teimgr engine, float32": Task("engine", model),
        "teimgr engine, auto": Task("engine", model, dtype="auto"),
        "teimgr engine, int8": Task("engine", model, dtype="int8"),
        f"{LIMIT}, float32": Task("products", model),
        f"{LIMIT}, bfloat16": Task("products", model, dtype="bfloat16"),
    }


def _line(row: Row, baseline: Row, limits: dict[str, Row], tokens: int, of_scores: bool) -> list[Any]:
    """One path, from its name on."""
    factor, limit = ratios(row, baseline), limits.get(row.dtype)
    share = None if limit is None else f"{ratios(row, limit)['median']:.0%}"
    closeness = [f"{row.cosine_mean:.5f}", f"{row.cosine_min:.5f}"]
    if of_scores:
        closeness = [f"{row.difference_mean:.1e}", f"{row.difference_max:.1e}"]
    if row.name.startswith(LIMIT):
        closeness = ["", ""]
    rates = (tokens / row.median_s, tokens / row.best_s)
    return [row.name, row.dtype, *rates, factor["median"], factor["best"], share, *closeness]


def corpora(count: int) -> dict[str, list[str]]:
    """Different texts: of mixed lengths, of 5 to 20 words, and longer than the model takes."""
    chooser = random.Random(_SEED)
    mixed = list(dict.fromkeys(corpus.corpus(count)))
    words = " ".join(corpus.corpus(4 * count)).split()
    starts = [chooser.randrange(len(words) - 300) for _ in range(5 * count)]
    short = [" ".join(words[at : at + chooser.randint(4, 15)]) for at in starts[: 4 * count]]
    long = [" ".join(words[at : at + 300]) for at in starts[: max(1, count // 6)]]
    return {"mixed": mixed, "short": list(dict.fromkeys(short)), "long": list(dict.fromkeys(long))}
