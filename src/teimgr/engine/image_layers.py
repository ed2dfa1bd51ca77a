"""The layers of an image half on a CPU in one call of our library, as those of texts: `forward_kernel`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.forward_kernel import ForwardKernel, forward_kernel
from teimgr.engine.forward_trace import TRACED_TOKENS


class NativeLayers(nn.Module):
    """Takes the place of a library's layers: embedded pictures [N, T, width] → their hidden states in float32."""

    def __init__(self, kernel: ForwardKernel) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        rows = inputs_embeds.float().flatten(0, 1)
        found = self._kernel.of_rows(rows, inputs_embeds.shape[1], torch.get_num_threads())
        return SimpleNamespace(last_hidden_state=found.view(inputs_embeds.shape))


class _BehindRows(nn.Module):
    """Layers behind a table of rows, as a forward is traced from token ids on."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self._vision = vision
        self._table = torch.zeros(TRACED_TOKENS, int(vision.config.hidden_size))
        self.config = _Config(vision.config)

    def set_attn_implementation(self, name: str) -> None:
        self._vision.set_attn_implementation(name)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self._vision.encoder(inputs_embeds=functional.embedding(input_ids, self._table), attention_mask=None)


class _Config:
    """What a trace reads of a configuration."""

    vocab_size = TRACED_TOKENS

    def __init__(self, own: Any) -> None:
        self._attn_implementation = own._attn_implementation

    def get_text_config(self) -> _Config:
        return self


def native_layers(vision: Any, dtype: torch.dtype) -> NativeLayers:
    """What may take the place of `vision.encoder`, a library's layers in float32.

    Raises:
        CannotLowerError: the layers, the CPU or the installation do not allow it.
    """
    kernel, _ = forward_kernel(_BehindRows(vision), {}, dtype)
    return NativeLayers(kernel)
