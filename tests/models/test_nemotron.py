"""llama-nemotron-rerank: a Llama whose tokens attend to all others, and a linear layer behind the mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from teimgr.engine.job import Output, Pair
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support import plain_forwards
from tests.support.models.single_families import NEMOTRON_CLASSES, build_nemotron
from tests.support.plain_forwards import POOLINGS

PAIRS = [Pair("the lazy fox", "fog"), Pair("a ship", "The quick brown fox jumps over the lazy dog. ")]


@pytest.mark.parametrize(
    ("changes", "pooling"), [({}, "mean"), ({"temperature": 0.2}, "mean"), ({"pooling": "last"}, "lasttoken")]
)
def test_scores_are_those_of_the_pooled_states_divided_by_the_temperature(
    changes: dict[str, Any],
    pooling: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    weights, config = build_nemotron(tmp_path, **changes)
    served = serve(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    scores = frozenset({Output.SCORES})
    together = served.embed(PAIRS, outputs=scores, raw_scores=True)

    assert (served.engine.info.kind, served.engine.info.warnings) == ("reranker", ())
    assert together.errors == {}
    for found, pair in zip(together.scores, PAIRS, strict=True):
        ids = torch.tensor(tokenizer.encode(f"question:{pair.first} \n \n passage:{pair.second}").ids)
        pooled = POOLINGS[pooling](plain_forwards.causal(weights, config, ids, both_ways=True))
        truth = weights["score.weight"] @ pooled / config["temperature"]
        np.testing.assert_allclose(found, truth.numpy(), atol=3e-5)
        alone = served.embed([pair], outputs=scores, raw_scores=True).scores[0]
        np.testing.assert_allclose(alone, truth.numpy(), atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0}, "temperature = 0"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        (
            {
                "auto_map": {
                    **NEMOTRON_CLASSES,
                    "AutoModel": "someone/else--llama_bidirectional_model.LlamaBidirectionalModel",
                }
            },
            "trust",
        ),
    ],
)
def test_another_setting_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    build_nemotron(tmp_path, **changes)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


def test_without_its_layer_it_is_refused(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    build_nemotron(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelLoadFailed, match=r"they have no score\.weight"):
        serve(tmp_path)
