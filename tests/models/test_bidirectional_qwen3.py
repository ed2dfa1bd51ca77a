"""voyage-4-nano and pplx-embed-v1: Qwen3 whose tokens attend to all others, and what is behind it, without trust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.engine.exact_models import assert_exact, ids_of
from tests.support import plain_forwards
from tests.support.models import edit
from tests.support.models.single_families import WIDER, build_pplx, build_voyage


@pytest.mark.parametrize("with_code", [True, False])
def test_the_linear_layer_of_voyage_is_behind_the_mean(
    with_code: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    weights, config = build_voyage(tmp_path, **({} if with_code else {"auto_map": None}))
    served = serve(tmp_path)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return plain_forwards.causal(weights, config, ids, both_ways=True) @ weights["linear.weight"].T

    assert served.engine.info.dimension == WIDER
    assert served.engine.info.warnings == ()
    assert_exact(served, forward, "mean")


def test_vectors_of_pplx_are_integers(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    """Cut before they get length 1, where a request asks for it."""
    weights, config = build_pplx(tmp_path)
    served = serve(tmp_path)
    texts = ids_of()
    pooled = [
        plain_forwards.causal(weights, config, torch.from_numpy(text.astype(np.int64)), both_ways=True).mean(0)
        for text in texts
    ]
    exact = torch.stack(pooled).tanh() * 127
    found = served.embed(texts, normalize=False).vectors

    assert served.engine.info.warnings == ()
    assert (found == np.rint(found)).all()
    assert np.abs(found - exact.numpy()).max() <= 0.5 + 1e-3
    scaled = served.embed(texts, dimensions=8).vectors
    np.testing.assert_allclose(scaled, found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention"),
        ({"num_labels": None}, "num_labels"),
        ({"num_labels": "many"}, "num_labels = 'many'"),
        ({"is_causal": True}, "contradict"),
        (
            {"auto_map": {"AutoModel": "voyageai/voyage-5--modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}},
            "trust",
        ),
    ],
)
def test_another_voyage_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    build_voyage(tmp_path)
    edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("labels", "named"), [(WIDER + 1, "linear.weight is"), (None, "linear.weight")], ids=["another-width", "no-width"]
)
def test_a_linear_layer_that_does_not_fit_is_refused(
    labels: int | None,
    named: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build_voyage(tmp_path)
    edit(tmp_path / "config.json", num_labels=labels, auto_map=None)

    with pytest.raises(ModelLoadFailed, match=named):
        serve(tmp_path)


def test_the_contextual_variant_of_pplx_is_not_known(tmp_path: Path) -> None:
    build_pplx(tmp_path)
    edit(tmp_path / "config.json", auto_map={"AutoModel": "modeling.PPLXQwen3ContextualModel"})

    with pytest.raises(ModelLoadFailed, match=r"PPLXQwen3ContextualModel.*trust_remote_code"):
        read_layout(tmp_path)
