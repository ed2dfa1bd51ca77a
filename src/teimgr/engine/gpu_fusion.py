"""Layers of a library's model fused for a GPU, whatever the architecture: fewer launches, and less memory traffic.

Query, key and value of an attention are one product. A linear layer and its GELU are one operator: cuBLAS applies the
activation before it writes a result, in its approximation by tanh, which differs by 0.0005 at most. The fidelity gate
tries the fused model first, and the plain one where its results stray.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

# Attribute names of the three projections of one attention, and of a linear layer before its activation.
_ATTENTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
_FEED_FORWARDS = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
_GELUS = frozenset({"GELU", "GELUActivation", "NewGELUActivation", "GELUTanh"})


class _Replaced(NamedTuple):
    parent: nn.Module
    name: str
    original: nn.Module


class Fusion:
    """The layers that were fused; the originals are kept until `keep` or `undo`."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self._replaced.append(_Replaced(parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    def keep(self) -> None:
        """Let go of the originals and their memory."""
        log.info("fused %d layers", len(self._replaced))
        self._replaced.clear()

    def undo(self) -> None:
        for parent, name, original in reversed(self._replaced):
            setattr(parent, name, original)
        self._replaced.clear()


def fuse(model: nn.Module) -> Fusion:
    """Fuse what is known in `model`, in place; empty where nothing is."""
    fusion = Fusion()
    for parent in list(model.modules()):
        for names in _ATTENTIONS:
            layers = [getattr(parent, name, None) for name in names]
            if (shared := _shared(layers)) is not None:
                for i, name in enumerate(names):
                    fusion.replace(parent, name, ProjectionPart(shared, i))
        for linear_name, activation_name in _FEED_FORWARDS:
            linear, activation = getattr(parent, linear_name, None), getattr(parent, activation_name, None)
            is_gelu = type(activation).__name__ in _GELUS
            if is_gelu and type(linear) is nn.Linear and linear.bias is not None:
                fusion.replace(parent, linear_name, LinearGelu(linear))
                fusion.replace(parent, activation_name, nn.Identity())
    return fusion


def _shared(layers: Sequence[nn.Module | None]) -> SharedProjection | None:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) < len(layers):
        return None
    is_alike = len({layer.in_features for layer in linears}) == 1 == len({layer.bias is None for layer in linears})
    return SharedProjection(linears) if is_alike else None


class _Product(threading.local):
    """Of one thread: the input of a product, and the parts of it that were not asked for yet."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}


class SharedProjection(nn.Module):
    """Linear layers of one input as one product; each part is a view of its columns.

    The product is kept from the first part that is asked for to the last, and made again for another input. Threads
    that run the model at the same time have products of their own.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        biases = [linear.bias for linear in linears]
        self.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
        self.bias = None
        if biases[0] is not None:
            self.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
        self._widths = [linear.out_features for linear in linears]
        self._kept = _Product()

    def part(self, i: int, x: Tensor) -> Tensor:
        """The result of layer `i`."""
        kept = self._kept
        if kept.input is not x or i not in kept.parts:
            product = nn.functional.linear(x, self.weight, self.bias)
            kept.input, kept.parts = x, dict(enumerate(torch.split(product, self._widths, dim=-1)))
        found = kept.parts.pop(i)
        if not kept.parts:
            kept.input = None
        return found


class ProjectionPart(nn.Module):
    """One of the layers of a `SharedProjection`, in its place in the model."""

    def __init__(self, shared: SharedProjection, i: int) -> None:
        super().__init__()
        self.shared = shared
        self._i = i

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        return self.shared.part(self._i, x)


class LinearGelu(nn.Module):
    """gelu(x Wᵀ + b) as one operator."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        rows = x.reshape(-1, x.shape[-1])
        result = torch.ops.aten._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return result.view(*x.shape[:-1], len(self.weight))  # type: ignore[no-any-return]
