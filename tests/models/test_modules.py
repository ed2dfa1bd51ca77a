"""The pooling of sparse models, from their modules."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Splade
from teimgr.models.reading import read_layout
from tests.support.models import build, build_splade, edit


@pytest.mark.parametrize("layout", ["version-5", "saved"])
@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_splade_pooling_is_read(
    tmp_path: Path, layout: Literal["version-5", "saved"], strategy: str, activation: str
) -> None:
    path = build_splade("bert", tmp_path, layout=layout, strategy=strategy, activation=activation)

    assert read_layout(path).splade == Splade(strategy, activation)


def test_a_sparse_model_of_another_pooling_is_refused(tmp_path: Path) -> None:
    path = build_splade("bert", tmp_path)
    edit(path / "1_SpladePooling" / "config.json", pooling_strategy="median")

    with pytest.raises(ModelLoadFailed, match="SpladePooling with 'median' and 'relu'"):
        read_layout(path)


def test_a_dense_module_with_an_activation_of_the_models_own_is_refused(tmp_path: Path) -> None:
    """sentence-transformers would take Tanh for it."""
    path = build("bert", tmp_path, modules=("Dense", "Normalize"))
    edit(path / "2_Dense" / "config.json", activation_function="own.module.Swish")

    with pytest.raises(
        ModelLoadFailed, match=r"2_Dense has the activation own\.module\.Swish, code of the model's own"
    ):
        read_layout(path)
