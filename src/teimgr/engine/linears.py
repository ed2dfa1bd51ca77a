"""Linear layers with weights prepacked for oneDNN, where this machine's torch supports it.

The two operators are private to torch (its compiler emits them), so they are tested before use, with `F.linear` as the
fallback. With the few tokens of a query a plain linear takes twice as long.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)

# Attribute names of a linear layer directly followed by its activation, in various architectures.
_FUSABLE = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
_TYPICAL_TOKENS = 256


class PackedLinear(nn.Module):
    """y = activation(x Wᵀ + b) with a prepacked W; `activation` is "none" or "gelu", `form` is "none" or "tanh".

    `weight` has the dtype and shape, for model code that reads them, but no storage.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, activation: str = "none", form: str = "none") -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().to(dtype), _TYPICAL_TOKENS
        )
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype).clone()
        self._activation = activation
        self._form = form
        self.weight = torch.empty(linear.weight.shape, dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[…, in_features] → […, out_features], in the dtype of the weight."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, self._activation, [], self._form
        )
        return result


def convert(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Convert a transformers model to `dtype`, with prepacked linears on the CPU.

    There the embedding table keeps the dtype of its file, memory-mapped and shared between workers; its outputs are
    converted. Buffers (rotary frequencies) keep their precision.
    """
    mapped = None
    if device.type == "cpu":
        mapped = _embedding_table(model)
        log.debug("prepacked %d linear layers in %s", convert_linears(model, dtype), dtype)
    if dtype is not torch.float32:
        for module in model.modules():
            if mapped is not None and module is mapped:
                module.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # free the wider weights


def _embedding_table(model: Any) -> nn.Module | None:
    try:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    except NotImplementedError:  # custom model code; its table is converted
        return None


def convert_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace every `nn.Linear` in `model`, on the CPU, by its prepacked form in `dtype`; fuse GELU where it follows.

    A decoder that shares its weight with the embedding table gets a copy: twice as fast, with 8 tokens or 192, and of
    the memory-mapped table only the rows in use are resident. Returns the number of prepacked layers: 0 where the
    operators do not work here, and then only the dtype changes.
    """
    if not prepacking_works(dtype):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.to(dtype)
        return 0
    made: dict[nn.Module, PackedLinear] = {}  # a layer may have two parents
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
    """Whether the private operators exist and agree with `F.linear` in `dtype`."""
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
    """Fuse a linear and its GELU into one operator, if `parent` has such a pair; returns the number of pairs."""
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
