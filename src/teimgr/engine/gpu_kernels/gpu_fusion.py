"""Fuses layers of any library model for a GPU: fewer launches and less memory traffic.

Query, key and value of an attention become one product. A linear layer and its GELU become one operator: cuBLAS applies
the activation, approximated by tanh with an error of at most 0.0005, before it writes a result. A residual add and the
next layer normalisation, or an RMSNorm, become one kernel if Triton is installed (`norm_kernel`). The fidelity gate
tries the fused model first, then without that kernel, then the plain model.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from teimgr.engine.gpu_kernels.norm_kernel import NormRows, Norms, NormShape

log = logging.getLogger(__name__)

# Attribute names of the three projections of one attention, and of a linear layer before its activation.
_ATTENTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
_FEED_FORWARDS = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
# Modules that end in `LayerNorm(dropout(dense(hidden_states)) + input_tensor)`, in BERT and its relatives.
_RESIDUAL_PARTS = {"dense", "LayerNorm", "dropout"}
_RESIDUAL_ARGUMENTS = ["hidden_states", "input_tensor"]
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

    @property
    def norms(self) -> int:
        """The number of fused normalisations."""
        return sum(isinstance(getattr(each.parent, each.name), (ResidualNorm, RmsNorm)) for each in self._replaced)

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


def fuse(model: nn.Module, norms: Norms | None = None) -> Fusion:
    """Fuse what is known in `model`, in place; empty where nothing is. Normalisations only with `norms`.

    Raises:
        DeviceFailed, OutOfDeviceMemory: while a kernel was tried.
    """
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
        if norms is not None:
            for name, child in list(parent.named_children()):
                if (norm := _norm(child, norms)) is not None:
                    fusion.replace(parent, name, norm)
    return fusion


def _norm(module: Any, norms: Norms) -> nn.Module | None:
    """Return the replacement of a normalising module; None for other modules, or without a kernel for it."""
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        weight = module.weight
        shape = NormShape(len(weight), weight.dtype, is_rms=True, adds=False, has_bias=False)
        return RmsNorm(module, norms.kernel) if norms.has(shape) else None
    arguments = list(inspect.signature(module.forward).parameters)
    if {name for name, _ in module.named_children()} != _RESIDUAL_PARTS or arguments != _RESIDUAL_ARGUMENTS:
        return None
    norm = module.LayerNorm
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.weight is None:
        return None
    shape = NormShape(len(norm.weight), norm.weight.dtype, is_rms=False, adds=True, has_bias=norm.bias is not None)
    return ResidualNorm(module.dense, norm, norms.kernel) if norms.has(shape) else None


def _shared(layers: Sequence[nn.Module | None]) -> SharedProjection | None:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if len(linears) < len(layers):
        return None
    is_alike = len({layer.in_features for layer in linears}) == 1 == len({layer.bias is None for layer in linears})
    return SharedProjection(linears) if is_alike else None


class _Product(threading.local):
    """One thread's state: the input of a product, and its parts that were not requested yet."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}


class SharedProjection(nn.Module):
    """Linear layers of one input as one product; each part is a view of its columns.

    The product is kept from the first requested part to the last, and computed again for another input. Each thread
    that runs the model has its own products.
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


class ResidualNorm(nn.Module):
    """norm(dense(x) + residual), add and normalisation by one kernel."""

    def __init__(self, dense: nn.Module, norm: nn.LayerNorm, kernel: NormRows) -> None:
        super().__init__()
        self.dense = dense
        self.weight, self.bias = norm.weight, norm.bias
        self._eps, self._kernel = norm.eps, kernel

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """[…, in] and […, out] → […, out]."""
        return self._kernel(self.dense(hidden_states), input_tensor, self.weight, self.bias, self._eps, False)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, by one kernel."""

    def __init__(self, norm: Any, kernel: NormRows) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps, self._kernel = float(norm.variance_epsilon), kernel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[…, width] → […, width]."""
        return self._kernel(hidden_states, None, self.weight, None, self._eps, True)
