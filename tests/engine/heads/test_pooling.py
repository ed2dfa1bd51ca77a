"""Vectors of texts: every pooling against its formula, and the modules behind it against sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer import modules
from torch import nn

from teimgr.engine.batch import Encoded, PackedBatch, pack
from teimgr.engine.heads.pooling import POOLINGS, finish, pool
from teimgr.engine.heads.projections import load_projections, width_behind
from teimgr.errors import ModelLoadFailed
from teimgr.model_files.layout import Dense, LayerNorm, Normalize, Projection

LENGTHS = (4, 1, 9, 4)
PROMPTS = (2, 0, 3, 2)


def packed(lengths: Sequence[int], prompts: Sequence[int] | None = None) -> PackedBatch:
    return pack(
        [
            Encoded(np.zeros(length, dtype=np.int32), prompt_tokens=prompt)
            for length, prompt in zip(lengths, prompts or (0,) * len(lengths), strict=True)
        ]
    )


def plainly(name: str, rows: np.ndarray, prompt: int) -> np.ndarray:
    kept, weights = rows[prompt:], np.arange(1, len(rows) + 1)[prompt:, None]
    return {
        "cls": kept[0],
        "last_token": kept[-1],
        "max": kept.max(0),
        "mean": kept.mean(0),
        "mean_sqrt_len": kept.sum(0) / np.sqrt(len(kept)),
        "weighted_mean": (kept * weights).sum(0) / weights.sum(),
    }[name]


@pytest.mark.parametrize("prompts", [None, PROMPTS])
@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_pooling_is_its_formula(name: str, prompts: tuple[int, ...] | None) -> None:
    batch = packed(LENGTHS, prompts)
    hidden = torch.randn(batch.tokens, 6, generator=torch.Generator().manual_seed(1))
    result = pool(hidden, batch, [name]).numpy()

    for row, source in enumerate(batch.order):
        rows = hidden[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].numpy()
        np.testing.assert_allclose(result[row], plainly(name, rows, prompts[source] if prompts else 0), atol=1e-6)


def test_several_poolings_are_concatenated() -> None:
    batch = packed([3])
    hidden = torch.randn(3, 6)

    torch.testing.assert_close(pool(hidden, batch, ["cls", "mean"])[0], torch.cat([hidden[0], hidden.mean(0)]))


def test_half_precision_is_summed_in_single() -> None:
    batch = packed([4096])
    hidden = torch.full((4096, 1), 1.0078125, dtype=torch.bfloat16)

    assert pool(hidden, batch, ["mean"]).item() == 1.0078125


def test_the_cut_comes_before_the_norm_and_a_zero_row_stays_zero() -> None:
    rows = np.array([[3, 4, 12], [0, 0, 5]], dtype=np.float32)

    np.testing.assert_allclose(finish(rows, 2, True), [[0.6, 0.8], [0, 0]])
    np.testing.assert_allclose(finish(rows, None, True)[0], rows[0] / 13)
    np.testing.assert_allclose(finish(rows, 1, False), [[3], [0]])


MODULES = (
    (modules.Dense(8, 12, activation_function=nn.Tanh()),),
    (modules.Dense(8, 8, bias=False, activation_function=None), modules.Normalize(), modules.Dense(8, 4)),
    (modules.Dense(8, 8, use_residual=True), modules.LayerNorm(8)),
    (modules.LayerNorm(8), modules.Dense(8, 5, activation_function=nn.GELU(), use_residual=True)),
)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("chain", MODULES)
def test_modules_behind_the_pooling_are_those_of_sentence_transformers(
    chain: tuple[Any, ...], safe: bool, tmp_path: Path
) -> None:
    for index, module in enumerate(chain):
        (tmp_path / str(index)).mkdir()
        module.save(str(tmp_path / str(index)), safe_serialization=safe)
    projections = [described(module, tmp_path / str(index)) for index, module in enumerate(chain)]
    vectors = torch.randn(6, 8)
    features = {"sentence_embedding": vectors}
    with torch.inference_mode():
        for module in chain:
            features = module(features)
        ours = load_projections(projections, torch.device("cpu"))(vectors)

    assert width_behind(projections, 8) == ours.shape[1]
    torch.testing.assert_close(ours, features["sentence_embedding"], atol=1e-6, rtol=0)


def described(module: Any, path: Path) -> Projection:
    if isinstance(module, modules.Normalize):
        return Normalize()
    if isinstance(module, modules.LayerNorm):
        return LayerNorm(path, module.dimension)
    config = module.get_config_dict()
    return Dense(
        path,
        config["in_features"],
        config["out_features"],
        config["bias"],
        config["activation_function"],
        config.get("use_residual", False),
    )


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    modules.Dense(8, 4).save(str(tmp_path))
    identity = "torch.nn.modules.linear.Identity"

    for wrong in (Dense(tmp_path, 8, 5, True, identity), Dense(tmp_path, 8, 4, False, identity)):
        with pytest.raises(ModelLoadFailed, match="do not fit"):
            load_projections([wrong], torch.device("cpu"))
    with pytest.raises(ModelLoadFailed, match="has no weights"):
        load_projections([Dense(tmp_path / "nowhere", 8, 4, True, identity)], torch.device("cpu"))
    with pytest.raises(ModelLoadFailed, match=r"os\.system is not served"):
        load_projections([Dense(tmp_path, 8, 4, True, "os.system")], torch.device("cpu"))


def test_weights_may_lie_beside_those_of_a_transformer(tmp_path: Path) -> None:
    weights = {"linear.weight": torch.randn(4, 8), "bert.linear.weight": torch.randn(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    dense = Dense(tmp_path, 8, 4, False, "torch.nn.modules.linear.Identity")
    vectors = torch.randn(3, 8)

    found = load_projections([dense], torch.device("cpu"))(vectors)
    torch.testing.assert_close(found, vectors @ weights["linear.weight"].T)
