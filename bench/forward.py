"""`bench forward`: the native forward against the model's own, with native attention and with torch's operators."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import corpus, weights
from bench.progress import partial, say
from bench.report import publish
from teimgr.engine.attention import Packing, packed_attention
from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.job import Output
from teimgr.engine.loading import EngineOptions, EngineParts, load_parts
from teimgr.engine.model import Model
from teimgr.engine.native_library import LEVELS, native_library
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions

HEADER = ("what", "texts", "tokens", "dtype", "native ms", "own ms", "torch ms", "× own", "× torch", "lowest cosine")
_SWITCH = "TEIMGR_NATIVE"
_BUDGET_TOKENS = 2048
_HEADS = ((12, 32), (12, 64))


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=200, help="of mixed lengths (200)")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each way, in turn (5)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    library = native_library()
    if library is None:
        print("this installation has no native library: it was built without a compiler")
        return 1
    threads = len(os.sched_getaffinity(0))
    rows: list[tuple[Any, ...]] = []
    with partial():
        for dtype in ("bfloat16", "float32"):
            rows.extend(_rows(dtype, threads, options))
    facts = {
        "library": f"{LEVELS[library.level]}, {threads} threads",
        "native": "the whole forward in one call of the C library; for attention alone: its attention",
        "own": "the model's own code, its attention in one call of the C library",
        "torch": "the model's own code, attention by torch's operator, a call per run of equal lengths",
        "batches": f"of {_BUDGET_TOKENS} tokens, shortest texts first; random numbers for attention alone",
        "method": f"{options.rounds} rounds, one pass of each way in turn; medians, ratios within a round",
        "lowest cosine": "of native vectors to the model's own in float32",
    }
    lines = [(*row[:-1], row[-1] and f"{row[-1]:.5f}") for row in rows]
    publish("forward", facts, HEADER, lines, {"rows": [dict(zip(HEADER, row, strict=True)) for row in rows]})
    return 0


def _rows(dtype: str, threads: int, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    native, own = (load(dtype, threads, allowed) for allowed in ("", "attention"))
    torch.set_num_threads(threads)  # loading uses one
    for name, encoded in _texts(native.tokenizer, options.texts).items():
        batches = packed(encoded)
        ways = [forward(native.model, batches)]
        ways += [forward(own.model, batches, way) for way in (Batching.VARLEN, Batching.BY_RUN)]
        say(f"MiniLM, {name}, {dtype}")
        lowest = _lowest_cosine(native.model, encoded)
        yield (*_row(f"MiniLM, {name}", encoded, dtype, ways, options.rounds), lowest)
        for heads, size in _HEADS:
            ways = [_attend(batches, heads, size, getattr(torch, dtype), way) for way in (True, False)]
            spent = _row(f"attention {heads} × {size}, {name}", encoded, dtype, ways, options.rounds)
            yield (*spent[:5], "", spent[5], "", spent[6], "")


def load(dtype: str, threads: int, allowed: str) -> EngineParts:
    """MiniLM, with what TEIMGR_NATIVE allows it of the C library."""
    former = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = allowed
    try:
        return load_parts(EngineOptions(path=weights.minilm(), model_id="minilm", dtype=dtype, threads=threads))
    finally:  # daemons that this process starts later inherit it
        os.environ.pop(_SWITCH)
        if former is not None:
            os.environ[_SWITCH] = former


def _texts(tokenizer: TextTokenizer, count: int) -> dict[str, list[Encoded]]:
    """Mixed lengths, 5 to 20 words, and the longest that the model takes; one short text by itself."""
    texts = corpus.corpus(count)
    words = " ".join(texts).split()
    short = [" ".join(words[at : at + 3 + at % 12]) for at in range(0, count * 8, 8)]
    long = [" ".join(words[at : at + 300]) for at in range(0, 300 * (count // 8), 300)]
    kinds = {"mixed": texts, "short": short, "long": long, "one query": short[7:8]}
    return {
        name: [each for each in tokenizer.encode(these, TokenizeOptions()) if isinstance(each, Encoded)]
        for name, these in kinds.items()
    }


def packed(encoded: Sequence[Encoded]) -> list[PackedBatch]:
    """Batches of 2,048 tokens, shortest texts first."""
    batches: list[list[Encoded]] = [[]]
    for each in sorted(encoded, key=lambda one: len(one.ids)):
        if sum(len(one.ids) for one in batches[-1]) + len(each.ids) > _BUDGET_TOKENS:
            batches.append([])
        batches[-1].append(each)
    return [pack(batch) for batch in batches]


def _attend(
    batches: Sequence[PackedBatch], heads: int, size: int, dtype: torch.dtype, by_kernel: bool
) -> Callable[[], None]:
    module, inputs = torch.nn.Module(), []
    for batch in batches:
        rows: list[Tensor] = [torch.randn(1, batch.tokens, heads, size).to(dtype).transpose(1, 2) for _ in range(3)]
        inputs.append((rows, Packing.of(batch, torch.from_numpy(batch.cu_seqlens) if by_kernel else None)))

    def pass_() -> None:
        for rows, packing in inputs:
            packed_attention(module, *rows, None, packing=packing)

    return pass_


def forward(model: Model, batches: Sequence[PackedBatch], batching: Batching | None = None) -> Callable[[], None]:
    """A pass of all batches through the model, to its vectors."""

    def pass_() -> None:
        if batching is not None:
            model.backbone.use(batching)
        for batch in batches:
            model.run(batch, {Output.DENSE})

    return pass_


def _lowest_cosine(model: Model, encoded: Sequence[Encoded]) -> float:
    exact = load("float32", 1, "0").model
    lowest = 1.0
    for batch in packed(encoded):
        ours, theirs = (each.run(batch, {Output.DENSE})[Output.DENSE].values.double() for each in (model, exact))
        lowest = min(lowest, float(torch.cosine_similarity(ours, theirs).min()))
    return lowest


def _row(
    name: str, encoded: Sequence[Encoded], dtype: str, ways: Sequence[Callable[[], None]], rounds: int
) -> tuple[Any, ...]:
    """Name, texts, tokens, dtype, the median of every way in ms, and the ratios of the others to the first."""
    times: list[list[float]] = [[] for _ in ways]
    repeats = 1 if len(encoded) > 1 else 50
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for way, spent in zip(ways, times, strict=True):
                began = time.perf_counter()
                for _ in range(repeats):
                    way()
                if round_:  # the first warms up
                    spent.append((time.perf_counter() - began) / repeats * 1e3)
    tokens = sum(len(each.ids) for each in encoded)
    ratios = [float(statistics.median(np.array(other) / np.array(times[0]))) for other in times[1:]]
    return (name, len(encoded), tokens, dtype, *(statistics.median(spent) for spent in times), *ratios)
