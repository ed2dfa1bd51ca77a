"""Golden spaces and vectors of a tiny model of every kind: `python -m tests.engine.golden` writes them afresh.

A commit that changes one says so in CHANGELOG.md, with the digest that this command prints: indexes made before it have
to be made again.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.models import (
    WIDTH,
    build,
    build_classifier,
    build_cross_encoder,
    build_multi_vector,
    build_routed_sparse,
    build_splade,
    build_static,
    build_yes_no_reranker,
)
from tests.support.models.dual_encoders import build_clap, build_clip
from tests.support.models.scoring import build_token_classifier
from torch import nn

from teimgr.engine.engine import Engine
from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.engine.loading import EngineOptions

FILE = Path(__file__).with_name("golden.json")
TEXT, OTHER = "The boats lie in the harbour.", "Rain fell all night."
DIGITS = 5


def _three_outputs(folder: Path) -> None:
    """BGE-M3's layers on a BERT: the tokenizer of its own kind is another one after each training."""
    build("bert", folder, pooling="cls")
    torch.save(nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(nn.Linear(WIDTH, WIDTH).state_dict(), folder / "colbert_linear.pt")


MAKERS: dict[str, Callable[[Path], Any]] = {
    "embedding": partial(build, "bert", prompts={"query": "query: "}, modules=("Dense", "Normalize")),
    "static": build_static,
    "sparse": partial(build_splade, "bert"),
    "sparse with routes": build_routed_sparse,
    "multi-vector": partial(build_multi_vector, "bert"),
    "three outputs": _three_outputs,
    "reranker": partial(build_cross_encoder, "bert"),
    "classifier": partial(build_classifier, "bert"),
    "token classifier": partial(build_token_classifier, "bert"),
    "reranker that answers yes or no": build_yes_no_reranker,
    "texts and images": build_clip,
    "texts and sounds": build_clap,
}


def golden(kind: str) -> dict[str, Any]:
    """The space of a tiny model of `kind`, and the first numbers of each of its outputs for one input."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        MAKERS[kind](path)
        engine = Engine.load(EngineOptions(path=path, model_id="golden", dtype="float32"), lambda jobs: None)
        try:
            return {"space": engine.info.space, **{name: _numbers(engine, name) for name in engine.info.outputs}}
        finally:
            engine.close(0.0)


def _numbers(engine: Engine, name: str) -> list[float]:
    output = Output(name)
    options = InferOptions(frozenset({output}), normalize=engine.info.kind != "sparse", raw_scores=True)
    item = Pair(TEXT, OTHER) if engine.info.kind == "reranker" else TEXT
    return [round(float(value), DIGITS) for value in _first(engine.answers([item], options, 60.0), output)[:8]]


def _first(job: Job, output: Output) -> np.ndarray[Any, Any]:
    assert not job.errors, job.errors
    if output is Output.SPARSE:
        vector = job.sparse[0]
        assert vector is not None
        return np.concatenate([vector.indices[:4], vector.values[:4]])
    rows = {
        Output.DENSE: lambda: job.vectors[0],
        Output.SCORES: lambda: job.scores[0],
        Output.TOKENS: lambda: job.tokens_of[0],
        Output.MULTI_VECTOR: lambda: job.multi_vectors[0],
    }
    return np.asarray(rows[output]()).reshape(-1)


def digest(known: dict[str, Any]) -> str:
    """What CHANGELOG.md names: of all spaces and vectors."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    found = {kind: golden(kind) for kind in MAKERS}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"golden spaces {digest(found)}\n")
