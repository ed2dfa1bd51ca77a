"""`bench attention`: the C kernel against torch's operator by runs of equal length, alone and in a whole forward."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import corpus, weights
from bench.report import publish
from teimgr.engine.attention import Packing, packed_attention
from teimgr.engine.attention_kernel import attention_kernel
from teimgr.engine.backbone import Batching
from teimgr.engine.batch import Encoded, PackedBatch, pack
from teimgr.engine.job import Output
from teimgr.engine.loading import EngineOptions, load_parts
from teimgr.engine.model import Model
from teimgr.engine.tokenizer import TextTokenizer, TokenizeOptions

HEADER = ("what", "texts", "tokens", "dtype", "kernel ms", "by run ms", "× best", "× median")
_BUDGET_TOKENS = 2048
_HEADS = ((12, 32), (12, 64))


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=400, help="of mixed lengths (400)")
    parser.add_argument("--rounds", type=int, default=7, help="passes of each way, in turn (7)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    kernel = attention_kernel()
    if kernel is None:
        print("this installation has no attention kernel: it was built without a compiler")
        return 1
    threads = len(os.sched_getaffinity(0))
    rows: list[tuple[Any, ...]] = []
    for dtype in ("bfloat16", "float32"):
        parts = load_parts(EngineOptions(path=weights.minilm(), model_id="minilm", dtype=dtype, threads=threads))
        torch.set_num_threads(threads)  # loading uses one
        kind = getattr(torch, dtype)
        for name, encoded in _texts(parts.tokenizer, options.texts).items():
            batches = _batches(encoded)
            for heads, size in _HEADS:
                ways = [_attend(batches, heads, size, kind, way) for way in (True, False)]
                rows.append(_row(f"attention {heads} × {size}, {name}", encoded, dtype, ways, options.rounds))
            ways = [_forward(parts.model, batches, way) for way in (Batching.VARLEN, Batching.BY_RUN)]
            rows.append(_row(f"MiniLM, {name}", encoded, dtype, ways, options.rounds))
    facts = {
        "kernel": f"{kernel.level}, {threads} threads",
        "batches": f"of {_BUDGET_TOKENS} tokens, shortest texts first; random numbers for attention alone",
        "method": f"{options.rounds} rounds, one pass of each way in turn; ratios within a round",
    }
    publish("attention", facts, HEADER, rows, {"rows": [dict(zip(HEADER, row, strict=True)) for row in rows]})
    return 0


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


def _batches(encoded: Sequence[Encoded]) -> list[PackedBatch]:
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


def _forward(model: Model, batches: Sequence[PackedBatch], batching: Batching) -> Callable[[], None]:
    def pass_() -> None:
        model.backbone.use(batching)
        for batch in batches:
            model.run(batch, {Output.DENSE})

    return pass_


def _row(
    name: str, encoded: Sequence[Encoded], dtype: str, ways: Sequence[Callable[[], None]], rounds: int
) -> tuple[Any, ...]:
    times: list[list[float]] = [[], []]
    repeats = 1 if len(encoded) > 1 else 50
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for way, spent in zip(ways, times, strict=True):
                began = time.perf_counter()
                for _ in range(repeats):
                    way()
                if round_:  # the first warms up
                    spent.append((time.perf_counter() - began) / repeats * 1e3)
    ours, theirs = times
    paired = statistics.median(np.array(theirs) / np.array(ours))
    tokens = sum(len(each.ids) for each in encoded)
    best = min(theirs) / min(ours)
    return (name, len(encoded), tokens, dtype, statistics.median(ours), statistics.median(theirs), best, float(paired))
