"""`bench gpu`: the bare engine on CUDA against sentence-transformers, in a process each; no server is involved.

It needs torch, transformers and numpy, and `PYTHONPATH=src` where teimgr is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import corpus, weights
from bench.contest import compete, entrants
from bench.encoders import Task
from bench.report import publish
from bench.table import HEADER, line, record

_BATCHES = (32, 256)
_DTYPES = ("float16", "bfloat16")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=20_000, help="texts of the corpus (20000)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each path, in turn (3)")
    parser.add_argument("--model", type=Path, help="a local model directory instead of MiniLM")
    parser.add_argument("--brief", action="store_true", help="half precision alone")
    parser.add_argument("--shape", choices=("minilm", "base"), default="minilm", help="base: 12 × 768, random weights")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; without a device report that and succeed."""
    device = _device()
    if device is None:
        print("bench gpu: skipped, no CUDA device here", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = options.model or weights.minilm()
        except FileNotFoundError as error:
            print(f"bench gpu: {error}", file=sys.stderr)
            return 1
        if options.shape == "base":
            model = weights.random_bert(Path(folder) / "base", model, "base")
        _contest(device, model, options)
    return 0


def _contest(device: str, model: Path, options: argparse.Namespace) -> None:
    texts = corpus.corpus(options.texts)
    tokens = weights.count_tokens(model, texts)
    tasks = _tasks(str(model), options.brief)
    with entrants(tasks) as children:
        rows = compete(children, texts, options.rounds, {})
    facts = {
        "device": device,
        "texts": f"{len(texts)} of mixed length (digest {corpus.digest(texts)}), {tokens} real tokens",
        "model": "12 × 768, random weights" if options.shape == "base" else model.name,
        "method": f"{options.rounds} rounds, one pass of each path in turn; ratios within a round",
        "reference": f"{rows[0].name} for ratios and cosines",
    }
    table = [line(row, rows[0], len(texts), tokens) for row in rows]
    name = f"gpu-{options.shape}"
    publish(name, facts, HEADER, table, {"rows": [record(row, rows[0], len(texts), tokens) for row in rows]})


def _tasks(model: str, is_brief: bool) -> dict[str, Task]:
    """The usual way in single and half precision, small and large batches; then ours."""
    kind = "sentence-transformers" if importlib.util.find_spec("sentence_transformers") else "padded"
    label = kind if kind != "padded" else "transformers, padded"
    dtypes = _DTYPES[:1] if is_brief else _DTYPES
    plans = [] if is_brief else [(f"{label}, batch 32", Task(kind, model, "cuda", "float32", 32))]
    for dtype in dtypes:
        plans += [(f"{label}, {dtype}, batch {size}", Task(kind, model, "cuda", dtype, size)) for size in _BATCHES]
    plans += [(f"teimgr engine, {dtype}", Task("engine", model, "cuda", dtype)) for dtype in dtypes]
    return dict(plans if is_brief else [*plans, ("teimgr engine, auto", Task("engine", model, "cuda", "auto"))])


def _device() -> Any:
    """The name of the first CUDA device, None without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
