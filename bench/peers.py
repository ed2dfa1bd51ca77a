"""`bench peers`: bulk texts/s of the engine and of other runtimes in process, same texts and weights, taking turns."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import corpus, published, weights
from bench.contest import Row, compete, entrants
from bench.corpora import CORPORA, DESCRIBED, corpora, names
from bench.encoders import Task
from bench.fleet import fleet
from bench.machine import revision
from bench.progress import incomplete, partial, say
from bench.report import publish
from bench.table import ratios

HEADER = ("texts", "path", "dtype", "tokens/s median", "best", "× baseline median", "least", "most", "of limit")
KEYS = (
    *HEADER[:4],
    *("tokens/s best", "× baseline median", "× baseline least", "× baseline most", "of limit"),
)
# The last two columns, of vectors and of scores: their header and their keys.
_COSINES = ("cosine mean", "min"), ("cosine mean", "cosine min")
_DIFFERENCES = ("difference mean", "largest"), ("difference mean", "difference largest")
LIMIT = "matrix products alone"
BASELINE = "sentence-transformers, batch 32"
SERVED = "teimgr, EmbedArrow"
_PACKAGES = {"openvino": "openvino", "openvino-latency": "openvino", "onnxruntime": "onnxruntime"}
_INSTANCE = "bench"
_START_S = 300.0


@dataclass(frozen=True)
class Shape:
    """A model that can be measured: what the result says of it, the number of mixed texts (of other corpora as
    `corpora` has it), the baseline's kind, whether `exported` has a graph of it for other runtimes, the corpora, and
    the texts that a quantisation is calibrated with, few where weights are random.

    Where a few texts have to be enough they are of similar length: others would be one batch of the baseline, most of
    it padding.
    """

    model: str
    texts: int
    baseline: str = "sentence-transformers"
    has_graph: bool = True
    corpora: tuple[str, ...] = CORPORA
    calibration_texts: int = 16

    @property
    def has_vectors(self) -> bool:
        """Whether its results are dense vectors."""
        return self.baseline == "sentence-transformers"


_FEW = ("short",)
_RANDOM = "random weights, 512 tokens at most"
_WITH_MINILMS = f"MiniLM's tokenizer and vocabulary, {_RANDOM}"
SHAPES = {
    "minilm": Shape("all-MiniLM-L6-v2, the real weights, 256 tokens at most", 240, calibration_texts=128),
    "base": Shape(f"BERT-base (12 × 768), {_RANDOM}", 32),
    "large": Shape(f"BERT-large (24 × 1,024), {_RANDOM}", 12),
    "xlm-r-reranker": Shape(
        f"XLM-RoBERTa-base (12 × 768) with a head of one label, {_WITH_MINILMS}; scores of a query with each text",
        24,
        "cross-encoder",
        corpora=_FEW,
    ),
    "splade": Shape(
        f"BERT-base (12 × 768) with its masked-LM head and SPLADE's pooling, {_RANDOM}, biases that leave one word in "
        "128 a weight",
        12,
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
        "--corpora",
        nargs="+",
        choices=CORPORA,
        help="which texts (all that the model takes uncut, and mixed; of the last four models short)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATH", help="measure only paths whose name begins with one of these"
    )
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="minilm", help="all but minilm have random weights (minilm)"
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, whose engine takes turns too")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        _contest(_model(options.shape, Path(folder) / options.shape), Path(folder), options)
    return 0


def _model(shape: str, folder: Path) -> Path:
    if shape == "minilm":
        return weights.minilm()
    make = weights.random_bert if shape in weights.SHAPES else published.random_published
    return make(folder, weights.minilm(), shape)


def _contest(directory: Path, cache: Path, options: argparse.Namespace) -> None:
    shape, is_reranker = SHAPES[options.shape], weights.is_reranker(directory)
    missing = {kind for kind, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
    wanted = {name: task for name, task in tasks(directory, shape, cache).items() if task.kind not in missing}
    commit = (revision(options.against)[:7] or "other") if options.against else ""
    others = {name: f"{name} at {commit}" for name, task in wanted.items() if commit and task.kind == "engine"}
    wanted |= {other: wanted[ours] for ours, other in others.items()}
    if options.only:
        wanted = {name: task for name, task in wanted.items() if name.startswith((BASELINE, *options.only))}
    texts_of = corpora(directory, options.texts or shape.texts)
    lines: list[list[Any]] = []
    records: list[dict[str, Any]] = []
    counts: dict[str, str] = {}
    with ExitStack() as stack:
        own_cpu = _serve(directory, wanted, stack)
        checkouts = dict.fromkeys(others.values(), options.against)
        children = stack.enter_context(entrants(wanted, skip_failing=True, checkouts=checkouts))
        stack.enter_context(partial())
        last_header, last_keys = _DIFFERENCES if is_reranker else _COSINES
        for corpus_name in _chosen(directory, shape, options.corpora):
            if incomplete():
                break
            say(f"{corpus_name} texts")
            texts = texts_of[corpus_name]
            inputs = [*corpus.queries(1), *texts] if is_reranker else texts
            tokens = weights.count_tokens(directory, inputs)
            rows = compete(children, inputs, options.rounds, own_cpu)
            digest = corpus.digest(inputs)
            counts[corpus_name] = f"{len(texts)} texts of {DESCRIBED[corpus_name]}, {tokens} tokens, digest {digest}"
            if is_reranker:
                lowest, highest = rows[0].scores
                counts[corpus_name] += f", with a query, scores of the baseline {lowest:.3f} to {highest:.3f}"
            counts |= {f"{corpus_name}, {name}": said for name, said in _against(rows, others)}
            limits = {row.dtype: row for row in rows if row.name.startswith(LIMIT)}
            for row in rows:
                line = [corpus_name, *_line(row, rows[0], limits, tokens, is_reranker)]
                lines.append(line)
                raw = {"tokens": tokens, "passes_s": row.seconds, "foreign_cores": row.foreign_cores}
                records.append(dict(zip((*KEYS, *last_keys), line, strict=True)) | raw)
    notes = {name: child.note for name, child in children.items() if child.note}
    said = facts(shape, is_reranker, options.rounds, notes)
    ends = {
        "not installed": ", ".join(sorted(missing)) or "none",
        "could not load": ", ".join(wanted.keys() - children.keys()) or "none",
    }
    name = "peers" if options.shape == "minilm" else f"peers-{options.shape}"
    if commit:
        name += f"-{commit}"
    publish(name, counts | said | ends, (*HEADER, *last_header), lines, {"rows": records})


def _against(rows: list[Row], others: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What a result says of each path that was measured in both checkouts."""
    by_name = {row.name: row for row in rows}
    for ours, other in others.items():
        factor = ratios(by_name[ours], by_name[other])
        yield ours, f"{factor['median']:.3f} ({factor['least']:.3f} to {factor['most']:.3f}) × {other}"


def _chosen(directory: Path, shape: Shape, asked: list[str] | None) -> list[str]:
    """The corpora to measure.

    Raises:
        SystemExit: one was asked for that the model would cut.
    """
    if too_long := set(asked or ()) - set(names(directory)):
        raise SystemExit(f"bench peers: {', '.join(too_long)}: longer than this model's inputs")
    return [name for name in names(directory) if name in (asked or shape.corpora)]


def _serve(directory: Path, wanted: dict[str, Task], stack: ExitStack) -> dict[str, Callable[[], float]]:
    """Start a daemon for the path that calls one, if it is wanted, and give the path its address.

    The result has by the path's name what reads the CPU seconds of the daemon's processes.
    """
    if SERVED not in wanted:
        return {}
    running = stack.enter_context(fleet())
    running.client.create(_INSTANCE, str(directory))
    running.client.wait_until_running(_INSTANCE, deadline_s=_START_S)
    wanted[SERVED] = replace(wanted[SERVED], grpc=running.grpc)
    return {SERVED: running.cpu_s}


def facts(shape: Shape, is_reranker: bool, rounds: int, notes: dict[str, str]) -> dict[str, str]:
    """What a result says of the model, the method and the paths; `notes` are what paths say of themselves."""
    found = {
        "model": shape.model,
        "method": f"{rounds} rounds, one pass of each path in turn, each in a process of its own, all cores",
        "texts": "cut by tokens of the model's tokenizer, special ones included"
        + (", without the query" if is_reranker else "")
        + "; tokens are counted as the model sees them, cut at its longest input",
        "peers": "one traced graph with its head, shortest texts first, batches of 2,048 padded tokens; "
        "OpenVINO's throughput hint: smaller where there would be fewer than two for each of its streams"
        if shape.has_graph
        else "sentence-transformers alone",
        "of limit": "the time of the linear layers' matrix products alone in the same type (int8: unsigned by signed, "
        "results in bfloat16) over a path's: oneDNN's measured rate at the model's shapes, which a path with other "
        "kernels may exceed; attention, norms, activations and tokenization come on top of the products",
        "least, most": "of the rounds' own ratios, as the median; passes_s in the JSON file has the seconds of each",
    }
    if shape.has_vectors:
        found[SERVED] = "a daemon in the same run, its own choice of precision, by teimgr's client from another process"
    if is_reranker:
        found["difference"] = "absolute, of scores between 0 and 1, from the baseline's"
    return found | notes


def tasks(directory: Path, shape: Shape, cache: Path) -> dict[str, Task]:
    """What is measured; the others are compared with the first."""
    model = str(directory)
    found = {
        BASELINE: Task(shape.baseline, model),
        "sentence-transformers, bfloat16, batch 32": Task(shape.baseline, model, dtype="bfloat16"),
    }
    if shape.corpora != _FEW:
        found["sentence-transformers, batch 64"] = Task(shape.baseline, model, batch_size=64)
    if shape.has_graph:
        for dtype in ("float32", "bfloat16", "int8"):
            task = Task("openvino", model, dtype=dtype, cache=str(cache), calibration_texts=shape.calibration_texts)
            found[f"OpenVINO, {dtype}"] = task
            found[f"OpenVINO, {dtype}, latency hint"] = replace(task, kind="openvino-latency")
        for dtype in ("float32", "int8"):
            found[f"ONNX Runtime, {dtype}"] = Task("onnxruntime", model, dtype=dtype)
    for dtype in ("float32", "auto", "int8"):
        found[f"teimgr engine, {dtype}"] = Task("engine", model, dtype=dtype)
    if shape.has_vectors:
        found[SERVED] = Task("served", instance=_INSTANCE)
    for dtype in ("float32", "bfloat16", "int8"):
        found[f"{LIMIT}, {dtype}"] = Task("products", model, dtype=dtype)
    return found


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
    return [row.name, row.dtype, *rates, factor["median"], factor["least"], factor["most"], share, *closeness]
