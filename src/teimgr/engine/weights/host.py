"""The weights of a model as loaded, on the host, and their way to a device in one dtype after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class HostWeights:
    """The float32 parameters of a module on the host: memory-mapped files, or what their types were widened to.

    They are kept until a dtype is chosen, so that another one needs neither the files again nor float32 copies on the
    device: each parameter is converted here and then copied, half as many bytes over the bus.
    """

    def __init__(self, module: nn.Module, heads: Sequence[nn.Module] = (), apart: nn.Module | None = None) -> None:
        """`heads` are modules of our own behind `module`, which compute in float32; `apart` is placed for itself."""
        self.module = module
        self.apart = None if apart is None else HostWeights(apart)
        self._heads = heads
        self._parameters = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the module on `device`, parameters in `dtype`; buffers (rotary frequencies) keep their precision.

        Raises:
            RuntimeError: torch's own, if one cannot be allocated.
        """
        placed: dict[int, nn.Parameter] = {}  # a parameter may have two owners
        for owner, name, source in self._parameters:
            owner._parameters[name] = None  # what an earlier call put there goes first
            if id(source) not in placed:
                copy = source.detach().to(dtype).to(device)
                placed[id(source)] = nn.Parameter(copy, requires_grad=False)
            owner._parameters[name] = placed[id(source)]
        for owner in self.module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device)
        for head in self._heads:
            head.to(device)
