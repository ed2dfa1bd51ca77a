"""Linear layers with their weights laid out once for oneDNN, where this machine's torch can do that.

The two operators are private to torch (its compiler emits them), so they are tried before they are trusted, and
`F.linear` remains. The point is speed: at the few tokens of a query a plain linear takes twice as long.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)

# Where architectures keep a linear layer and the activation that follows it and nothing else.
_FUSABLE = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
_TYPICAL_TOKENS = 256


class PackedLinear(nn.Module):
    """y = activation(x Wᵀ + b) with a prepacked W; `activation` is "none" or "gelu", `form` is "none" or "tanh".

    `weight` has the dtype and shape that model code may ask for, and no storage.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, activation: str = "none", form: str = "none") -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = _prepack(linear.weight.detach().to(dtype))
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype).clone()
        self._activation = activation
        self._form = form
        self.weight = torch.empty(linear.weight.shape, dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[…, in_features] → […, out_features], in the dtype of the weight."""
        return _apply(x, self._packed, self._bias, self._activation, self._form)


def convert(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Let `model`, one of transformers', compute in `dtype` from now on, with prepacked linears on the CPU.

    There its vocabulary's table stays as it is in the file, mapped and shared between workers; what is looked up in it
    is converted. Buffers (rotary frequencies) keep their precision.
    """
    mapped = None
    if device.type == "cpu":
        mapped = _vocabulary_table(model)
        log.debug("prepacked %d linear layers in %s", convert_linears(model, dtype), dtype)
    if dtype is not torch.float32:
        for module in model.modules():
            if mapped is not None and module is mapped:
                module.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the wider weights, which no batch could use otherwise


def _vocabulary_table(model: Any) -> nn.Module | None:
    try:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    except NotImplementedError:  # a model of its own code; its tables are converted then
        return None


def convert_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace every `nn.Linear` in `model`, on the CPU, by its prepacked form in `dtype`; fuse GELU where it follows.

    A vocabulary decoder gets a copy of the table it shares its weight with: over 8 tokens and over 192 it is twice as
    fast for it, and of the table itself only rows that occur come into memory. Returns how many layers were prepacked:
    0 where the operators do not work here, and then only the dtype changes.
    """
    if not prepacking_works(dtype):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.to(dtype)
        return 0
    made: dict[nn.Module, PackedLinear] = {}  # a layer may hang in two places
    fused = 0
    for parent in list(model.modules()):
        fused += _fuse(parent, dtype)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                made[child] = made.get(child) or PackedLinear(child, dtype)
                setattr(parent, name, made[child])
    return len(made) + fused


@functools.cache
def prepacking_works(dtype: torch.dtype) -> bool:
    """Whether the private operators are here and agree with `F.linear` in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(32, 48).requires_grad_(False)
    linear.weight.copy_(torch.randn(48, 32, generator=generator))
    x = torch.randn(5, 32, generator=generator)
    truth = functional.gelu(linear(x))
    try:
        result = PackedLinear(linear, dtype, "gelu")(x.to(dtype)).float()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((result - truth).abs().max() <= (1e-4 if dtype is torch.float32 else 0.25))


def _fuse(parent: nn.Module, dtype: torch.dtype) -> int:
    """Make one operator of a linear and its GELU, if `parent` is such a pair."""
    for linear_name, activation_name in _FUSABLE:
        linear, activation = getattr(parent, linear_name, None), getattr(parent, activation_name, None)
        form = _gelu_form(activation)
        if type(linear) is nn.Linear and form is not None:
            setattr(parent, linear_name, PackedLinear(linear, dtype, "gelu", form))
            setattr(parent, activation_name, nn.Identity())
            return 1
    return 0


def _gelu_form(activation: Any) -> str | None:
    """ "none" for the exact GELU, "tanh" for its approximation, None for anything else."""
    if isinstance(activation, nn.GELU):
        return activation.approximate
    return {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}.get(type(activation).__name__)


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_TOKENS)
    return packed


def _apply(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str, form: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], form)
    return result
