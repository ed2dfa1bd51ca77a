"""Dense, LayerNorm and Normalize modules behind the pooling, and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer import modules
from torch import nn

from teimgr.engine.heads.projections import load_projections, width_behind
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Dense, LayerNorm, Normalize, OwnModule, Projection

MODULES = (
    (modules.Dense(8, 12, activation_function=nn.Tanh()),),
    (modules.Dense(8, 8, bias=False, activation_function=None), modules.Normalize(), modules.Dense(8, 4)),
    (modules.Dense(8, 8, use_residual=True), modules.LayerNorm(8)),
    (modules.LayerNorm(8), modules.Dense(8, 5, activation_function=nn.GELU(), use_residual=True)),
    (modules.Dense(8, 6, activation_function=nn.GLU()), modules.Dense(3, 4, activation_function=nn.PReLU(init=0.6))),
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


OWN = """
import json
from pathlib import Path

import torch


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, features):
        features["sentence_embedding"] = torch.cat([features["sentence_embedding"] * self.factor] * 2, dim=-1)
        return features

    @staticmethod
    def load(input_path):
        return Scale(json.loads((Path(input_path) / "config.json").read_text())["factor"])


class Broken(Scale):
    @staticmethod
    def load(input_path):
        raise KeyError("factor")
"""


def test_a_module_of_the_models_own_code_runs_behind_the_pooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "2_Scale").mkdir()
    (tmp_path / "2_Scale" / "config.json").write_text('{"factor": 3.0}')
    (tmp_path / "own.py").write_text(OWN)
    chain: list[Projection] = [OwnModule(tmp_path / "2_Scale", "own.Scale", tmp_path), Normalize()]
    vectors = torch.randn(5, 8)

    assert width_behind(chain, 8) == 16
    expected = nn.functional.normalize(torch.cat([vectors, vectors], dim=-1), dim=-1)
    torch.testing.assert_close(load_projections(chain, torch.device("cpu"))(vectors), expected)
    with pytest.raises(ModelLoadFailed, match=r"own\.Broken of modules\.json fails: KeyError"):
        load_projections([OwnModule(tmp_path / "2_Scale", "own.Broken", tmp_path)], torch.device("cpu"))


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
    weights = {"linear.weight": torch.ones(4, 8), "linear.bias": torch.ones(4), "linear2.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadFailed, match=r"the files have linear2\.weight, which its config.json does not declare"
    ):
        load_projections([Dense(tmp_path, 8, 4, True, identity)], torch.device("cpu"))
    modules.Dense(8, 4).save(str(tmp_path))
    with pytest.raises(ModelLoadFailed, match="has no weights"):
        load_projections([Dense(tmp_path / "nowhere", 8, 4, True, identity)], torch.device("cpu"))
    with pytest.raises(ModelLoadFailed, match=r"os\.system is not served"):
        load_projections([Dense(tmp_path, 8, 4, True, "os.system")], torch.device("cpu"))


def test_an_activation_of_another_shape_of_vectors_is_refused_by_name(tmp_path: Path) -> None:
    dense = Dense(tmp_path, 8, 6, bias=True, activation="torch.nn.modules.activation.Softmax2d")

    with pytest.raises(ModelLoadFailed, match="Softmax2d, which does not take vectors of 6"):
        width_behind([dense], 8)


def test_weights_may_lie_beside_those_of_a_transformer(tmp_path: Path) -> None:
    weights = {"linear.weight": torch.randn(4, 8), "bert.linear.weight": torch.randn(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    dense = Dense(tmp_path, 8, 4, False, "torch.nn.modules.linear.Identity")
    vectors = torch.randn(3, 8)

    found = load_projections([dense], torch.device("cpu"))(vectors)
    torch.testing.assert_close(found, vectors @ weights["linear.weight"].T)
