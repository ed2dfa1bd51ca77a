"""Forty small models of several kinds and sizes, with random weights, and what a worker of each is expected to take."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import models

from bench import weights
from teimgr.config.settings import Settings
from teimgr.control.ledger.footprints import Footprints
from teimgr.control.ledger.ledger import Footprint
from teimgr.control.placement.planner import worker_spec
from teimgr.spec import InstanceSpec

AT_ONCE = 4
"""The models that the host has memory for."""
KEYS: dict[str, Any] = {"load": "on_demand", "dtype": "float32", "max_batch_tokens": 512}
_WIDTHS = (32, 64, 128, 256)
_LAYERS = (2, 4, 6)
_FAMILIES = ("bert", "roberta", "xlm_roberta", "distilbert", "modernbert", "qwen3")


@dataclass(frozen=True)
class Model:
    """A model on disk. `kind` says which calls it answers: dense, reranker, sparse or classifier."""

    name: str
    kind: str
    folder: Path


def build(folder: Path, count: int) -> list[Model]:
    """Write `count` models, of all kinds even where they are few; the same ones each time."""
    makers = _makers()
    chosen = [makers[(2 * number + 1) * len(makers) // (2 * count)] for number in range(count)]
    made = []
    for number, (kind, make) in enumerate(chosen):
        name = f"m{number:02}-{kind}"
        make(folder / name, seed=number)
        made.append(Model(name, kind, folder / name))
    return made


def budget_mib(made: Sequence[Model], at_once: int = AT_ONCE) -> int:
    """Memory for so many of them of the mean size by what the ledger expects, at least for the load of the largest."""
    expected = [_expected(each) for each in made]
    mean = sum(each.host_bytes for each in expected) / len(expected)
    largest = max(each.peak_bytes for each in expected)
    return math.ceil(max(largest, mean * at_once) / 2**20)


def _expected(model: Model) -> Footprint:
    spec = InstanceSpec(name=model.name, model_id=str(model.folder), **KEYS)
    return asyncio.run(Footprints().of(worker_spec(spec, Settings())))


def _makers() -> list[tuple[str, Callable[..., object]]]:
    """Forty: twenty encoders of twelve sizes, six of other architectures, and fourteen of other kinds."""
    sizes = [(width, layers) for layers in _LAYERS for width in _WIDTHS]
    dense: list[tuple[str, Callable[..., object]]] = [
        ("dense", partial(encoder, width=width, layers=layers)) for width, layers in (*sizes, *sizes[:8])
    ]
    dense += [("dense", partial(models.build, family)) for family in _FAMILIES]
    rerankers = [("reranker", partial(models.build_cross_encoder, family)) for family in ("bert", "roberta") * 3]
    classifiers = [("classifier", partial(models.build_classifier, family)) for family in ("bert", "roberta") * 2]
    sparse = [("sparse", partial(models.build_splade, family)) for family in ("bert", "distilbert") * 2]
    return [*dense, *rerankers, *classifiers, *sparse]


def encoder(folder: Path, *, width: int, layers: int, seed: int) -> None:
    """A BERT of this size with the tokenizer of MiniLM."""
    import torch
    from transformers import BertConfig, BertModel

    weights.copy_tokenizer(folder, weights.minilm())
    torch.manual_seed(seed)
    config = json.loads((weights.minilm() / "config.json").read_text())
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width}
    BertModel(BertConfig(**config | size | {"initializer_range": 0.2}), add_pooling_layer=False).save_pretrained(folder)
