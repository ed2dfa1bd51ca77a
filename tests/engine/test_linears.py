"""A prepacked layer is the layer it replaces."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from teimgr.engine import linears
from teimgr.engine.linears import PackedLinear, convert_linears, prepacking_works

needs_operators = pytest.mark.skipif(not prepacking_works(torch.float32), reason="this torch cannot prepack")


class Pair(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(24, 40)
        self.intermediate_act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(x))


@needs_operators
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_prepacked_layer_is_exact_in_float32(bias: bool, rows: int) -> None:
    linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, 24)

    torch.testing.assert_close(PackedLinear(linear, torch.float32)(x), linear(x), atol=2e-6, rtol=1e-5)


@needs_operators
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_a_gelu_behind_a_layer_is_fused(form: str) -> None:
    pair = Pair(nn.GELU(approximate=form)).requires_grad_(False)
    x = torch.randn(5, 24)
    before = pair(x)

    assert convert_linears(pair, torch.float32) == 1
    assert isinstance(pair.intermediate_act_fn, nn.Identity)
    torch.testing.assert_close(pair(x), before, atol=2e-6, rtol=1e-5)


@needs_operators
def test_another_activation_stays_itself() -> None:
    pair = Pair(nn.ReLU()).requires_grad_(False)
    x = torch.randn(5, 24)
    before = pair(x)

    assert convert_linears(pair, torch.float32) == 1
    assert isinstance(pair.intermediate_act_fn, nn.ReLU)
    torch.testing.assert_close(pair(x), before, atol=2e-6, rtol=1e-5)


def test_without_the_operators_plain_layers_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "prepacking_works", lambda dtype: False)
    pair = Pair(nn.GELU()).requires_grad_(False)
    x = torch.randn(5, 24).bfloat16()

    assert convert_linears(pair, torch.bfloat16) == 0
    assert pair.dense.weight.dtype is torch.bfloat16
    expected = functional.gelu(functional.linear(x, pair.dense.weight, pair.dense.bias))
    torch.testing.assert_close(pair(x), expected)
