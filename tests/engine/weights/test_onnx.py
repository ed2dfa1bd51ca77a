"""Models that are published for ONNX alone: the vectors of the model that they were exported from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engine.conftest import Served
from tests.support.models import TEXTS, build, build_classifier
from tests.support.models.other_forms import move_to_onnx, node, tensor

from teimgr.engine.job import Output
from teimgr.engine.weights.onnx import onnx_weights
from teimgr.errors import ModelLoadFailed
from teimgr.models.directory import missing_file, needed


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("bert", {}),  # Xenova/*, onnx-community/*
        ("distilbert", {"name": "model.onnx"}),  # Qdrant/*-onnx
        ("modernbert", {"external": True}),
        ("bert", {"half": True}),
    ],
)
def test_an_export_is_the_model_that_it_was_made_of(
    family: str, layout: dict[str, Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    path = build(family, tmp_path / "plain")
    copy = move_to_onnx(shutil.copytree(path, tmp_path / "onnx"), **layout)
    truth, served = serve(path).embed(TEXTS).vectors, serve(copy)
    together = served.embed(TEXTS).vectors

    assert missing_file(copy) is None
    assert served.engine.info.forward == "native"
    assert (together * truth).sum(axis=1).min() >= 0.99999
    np.testing.assert_allclose(together, truth, atol=2e-3 if "half" in layout else 0)


def test_an_exported_classifier_keeps_its_head(tmp_path: Path, serve: Callable[..., Served]) -> None:
    path = build_classifier("bert", tmp_path / "plain")
    copy = move_to_onnx(shutil.copytree(path, tmp_path / "onnx"))
    truth, ours = (serve(each).embed(TEXTS, outputs=frozenset({Output.SCORES})).scores for each in (path, copy))

    np.testing.assert_array_equal(ours, truth)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (node("MatMulInteger", "/encoder/x", ("a", "b"), ("c",)), r"quantised or optimised \(MatMulInteger\)"),
        (node("SkipLayerNormalization", "s", ("a", "b"), ("c",)), "SkipLayerNormalization"),
        (tensor("onnx::MatMul_999", torch.ones(3, 4)), "without a name that no layer is known for: onnx::MatMul_999"),
        (tensor("encoder.adapter.weight", torch.ones(3, 4)), "encoder.adapter.weight"),
    ],
)
def test_a_graph_that_is_no_plain_export_is_refused(
    extra: bytes, reason: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    path = move_to_onnx(build("bert", tmp_path), extra=extra)

    with pytest.raises(ModelLoadFailed, match=reason):
        serve(path)


@pytest.mark.parametrize("content", [b"", b"\x08\x08", b"\x3a\xff\xff\xff\xff\x7f", b"\x0b" * 40, b"\xff" * 40])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)

    with pytest.raises(ModelLoadFailed, match=r"model\.onnx"):
        onnx_weights(tmp_path / "model.onnx")


def test_external_weights_stay_in_the_folder(tmp_path: Path) -> None:
    path = move_to_onnx(build("bert", tmp_path / "model"), extra=tensor("a.b", torch.ones(2), ("../x", 0)))

    with pytest.raises(ModelLoadFailed, match=r"'\.\./x', which is not a file of its folder"):
        onnx_weights(path / "onnx" / "model.onnx")


def test_matrices_are_turned_and_equal_tensors_named_twice(tmp_path: Path) -> None:
    path = build("bert", tmp_path)
    weights = load_file(path / "model.safetensors")
    found = onnx_weights(move_to_onnx(path) / "onnx" / "model.onnx")

    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_graph_is_fetched_where_a_repository_has_no_other_weights() -> None:
    files = ["config.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_quantized.onnx", "tokenizer.json"]

    assert needed(files) == ["config.json", "onnx/model.onnx", "onnx/model.onnx_data", "tokenizer.json"]
    assert needed([*files, "model.safetensors"]) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert needed(["config.json", "model.onnx"]) == ["config.json", "model.onnx"]
