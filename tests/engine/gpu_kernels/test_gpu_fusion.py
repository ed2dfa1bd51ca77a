"""Fused layers give what the library's give, are undone where they do not, and keep no product longer than needed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.card import StandInCard
from torch import nn

from teimgr.engine.backbone import Batching
from teimgr.engine.fidelity.fidelity_gate import Choice, probe_inputs
from teimgr.engine.gpu_choice import choose_on_gpu
from teimgr.engine.gpu_kernels import gpu_fusion, norm_kernel
from teimgr.engine.gpu_kernels.gpu_fusion import (
    LinearGelu,
    ProjectionPart,
    ResidualNorm,
    RmsNorm,
    SharedProjection,
    fuse,
)
from teimgr.engine.gpu_kernels.norm_kernel import Norms
from teimgr.engine.model import Model, load_model
from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.models.reading import read_layout

CPU = torch.device("cpu")


def loaded(path: Path) -> Any:
    return load_model(read_layout(path), CPU).host_weights().module


def chosen(path: Path, wanted: torch.dtype | None) -> tuple[Model, Choice]:
    layout = read_layout(path)
    model = load_model(layout, CPU)
    return model, choose_on_gpu(model, CPU, wanted, probe_inputs(layout, TextTokenizer(layout, layout.max_length)))


@pytest.mark.parametrize(
    ("family", "parts", "activations"),
    [("bert", 6, 2), ("roberta", 6, 2), ("distilbert", 6, 2), ("qwen3", 6, 0), ("t5", 0, 0)],
)
@torch.inference_mode()
def test_a_fused_model_is_the_librarys(
    family: str, parts: int, activations: int, model_dir: Callable[..., Path]
) -> None:
    module = loaded(model_dir(family))
    ids = torch.arange(5, 25).view(2, 10)
    truth = module(input_ids=ids).last_hidden_state
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    fusion = fuse(module)
    kinds = [type(each) for each in module.modules()]

    assert (kinds.count(ProjectionPart), kinds.count(LinearGelu)) == (parts, activations)
    torch.testing.assert_close(module(input_ids=ids).last_hidden_state, truth, atol=2e-5, rtol=0)
    torch.testing.assert_close(module(input_ids=ids.flip(1)).last_hidden_state[:, :1].shape, truth[:, :1].shape)
    shared = [each for each in module.modules() if isinstance(each, SharedProjection)]
    assert all(each._kept.input is None and not each._kept.parts for each in shared)

    fusion.undo()
    assert module.state_dict().keys() == weights.keys()
    assert torch.equal(module(input_ids=ids).last_hidden_state, truth)


def test_a_product_is_made_again_for_another_input() -> None:
    """As in attention across two inputs."""
    layers = [nn.Linear(4, width) for width in (4, 2, 2)]
    shared = SharedProjection(layers)
    first, second = torch.randn(3, 4), torch.randn(5, 4)

    for i, x in ((0, first), (1, second), (2, second), (0, first), (0, first), (1, first), (2, first)):
        torch.testing.assert_close(shared.part(i, x), layers[i](x))


def test_threads_have_products_of_their_own() -> None:
    """A graph is captured while the engine's thread runs the same layers."""
    shared = SharedProjection([nn.Linear(4, 2), nn.Linear(4, 2)])
    x = torch.randn(3, 4)
    first = shared.part(0, x)
    with ThreadPoolExecutor(1) as other:
        other.submit(shared.part, 0, x).result()

    assert len(shared._kept.parts) == 1
    torch.testing.assert_close(
        torch.cat([first, shared.part(1, x)], 1), nn.functional.linear(x, shared.weight, shared.bias)
    )


def test_layers_that_differ_are_left(model_dir: Callable[..., Path]) -> None:
    holder: Any = nn.Module()
    holder.query, holder.key, holder.value = nn.Linear(4, 4), nn.Linear(6, 4), nn.Linear(6, 4)
    holder.dense, holder.intermediate_act_fn = nn.Linear(4, 4), nn.ReLU()

    assert not fuse(holder)


def test_a_card_serves_fused_layers(card: StandInCard, model_dir: Callable[..., Path]) -> None:
    model, choice = chosen(model_dir("bert"), torch.float16)

    assert choice.batching is Batching.VARLEN
    assert any(isinstance(each, LinearGelu) for each in model.host_weights().module.modules())
    assert choice.closeness.min_cosine > 0.9999


def test_fused_layers_that_stray_are_undone(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_fusion.LinearGelu, "forward", lambda self, x: x[..., :1].expand(*x.shape[:-1], 64) * 3)
    model, choice = chosen(model_dir("bert"), None)

    assert (choice.dtype, choice.batching) == (torch.float16, Batching.VARLEN)
    assert not any(isinstance(each, LinearGelu) for each in model.host_weights().module.modules())


def test_model_code_that_reads_a_weight_is_left_as_it_is(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_fusion.ProjectionPart, "forward", lambda self, x: self.weight)
    model, choice = chosen(model_dir("bert"), None)

    assert (choice.dtype, choice.batching) == (torch.float16, Batching.VARLEN)
    assert not any(isinstance(each, ProjectionPart) for each in model.host_weights().module.modules())
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["weight" in record.message for record in warned] == [True]


def test_single_precision_is_not_fused(card: StandInCard, model_dir: Callable[..., Path]) -> None:
    model, _ = chosen(model_dir("bert"), torch.float32)

    assert not any(isinstance(each, LinearGelu | ProjectionPart) for each in model.host_weights().module.modules())


@pytest.fixture
def with_norms(card: StandInCard, monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """A kernel that needs no Triton; counts its calls by whether they are of RMSNorm."""
    calls: Counter[bool] = Counter()

    def kernel(*given: Any) -> torch.Tensor:
        calls[given[-1]] += 1
        return norm_kernel.eager_norm(*given)

    monkeypatch.setattr(norm_kernel, "norm_kernel", lambda: kernel)
    return calls


@pytest.mark.parametrize(
    ("family", "kind", "norms"),
    [("bert", ResidualNorm, 4), ("roberta", ResidualNorm, 4), ("qwen3", RmsNorm, 9), ("distilbert", ResidualNorm, 0)],
)
@torch.inference_mode()
def test_fused_normalisations_are_the_librarys(
    family: str, kind: type[nn.Module], norms: int, model_dir: Callable[..., Path]
) -> None:
    module = loaded(model_dir(family)).bfloat16()
    ids = torch.arange(5, 25).view(2, 10)
    truth = module(input_ids=ids).last_hidden_state
    fusion = fuse(module, Norms(norm_kernel.eager_norm, CPU))

    assert fusion.norms == sum(type(each) is kind for each in module.modules()) == norms
    torch.testing.assert_close(module(input_ids=ids).last_hidden_state, truth, atol=0.06, rtol=0.02)
    fusion.undo()
    assert torch.equal(module(input_ids=ids).last_hidden_state, truth)


def test_a_card_serves_fused_normalisations(with_norms: Counter[bool], model_dir: Callable[..., Path]) -> None:
    model, choice = chosen(model_dir("bert"), torch.float16)

    assert (choice.batching, choice.closeness.min_cosine > 0.9999) == (Batching.VARLEN, True)
    kinds = [type(each) for each in model.host_weights().module.modules()]
    assert (kinds.count(ResidualNorm), kinds.count(LinearGelu)) == (4, 2)
    assert with_norms[False] > 4


def test_normalisations_that_stray_are_undone_and_nothing_else_is(
    with_norms: Counter[bool],
    model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Right for the shapes that were tried, and wrong in the model."""
    monkeypatch.setattr(ResidualNorm, "forward", lambda self, x, residual: residual)
    model, choice = chosen(model_dir("bert"), torch.float16)

    kinds = [type(each) for each in model.host_weights().module.modules()]
    assert (kinds.count(ResidualNorm), kinds.count(LinearGelu)) == (0, 2)
    assert choice.closeness.min_cosine > 0.9999
    assert "fused normalisations" in caplog.text


def test_a_kernel_that_is_refused_leaves_the_other_fused_layers(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any) -> torch.Tensor:
        raise OSError("no compiler")

    monkeypatch.setattr(norm_kernel, "norm_kernel", lambda: refused)
    model, _ = chosen(model_dir("bert"), torch.float16)

    kinds = [type(each) for each in model.host_weights().module.modules()]
    assert (kinds.count(ResidualNorm), kinds.count(LinearGelu)) == (0, 2)
