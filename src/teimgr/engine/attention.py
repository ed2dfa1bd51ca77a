"""Attention over a packed row, registered with transformers under one name for every architecture.

No mask function is registered under that name, so transformers builds no mask and hands the call through. What a
mask would say follows from `Packing`, which travels as a keyword argument of the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from teimgr.engine.batch import PackedBatch, Run

PACKED = "teimgr_packed"


class CannotPackError(Exception):
    """The model's attention wants something that the packed function does not do."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the texts of a packed row begin and end.

    `cu_seqlens` (int32 [N + 1] on the device) is set where the device has a kernel for texts of unequal length; else
    attention goes run by run.
    """

    runs: tuple[Run, ...]
    max_seqlen: int
    cu_seqlens: Tensor | None
    _windows: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PackedBatch, cu_seqlens: Tensor | None) -> Packing:
        """The packing of `batch`."""
        return cls(batch.runs, batch.max_seqlen, cu_seqlens)

    def window(self, length: int, reach: int, causal: bool, device: torch.device) -> Tensor | None:
        """The mask of a text of `length` tokens that see `reach` tokens to each side; None where they see all."""
        if length <= reach + 1:
            return None
        key = (length, reach, causal)
        if key not in self._windows:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            seen = distance.abs() <= reach
            self._windows[key] = seen & (distance >= 0) if causal else seen
        return self._windows[key]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within each text of a packed row: [1, heads, T, d] in, [1, T, heads, d] out.

    Raises:
        CannotPackError: the call carries a mask, a bias or a cap, or the model did not pass `packing` on.
    """
    if packing is None or attention_mask is not None or any(kwargs.get(name) is not None for name in _UNSERVED):
        raise CannotPackError(f"{type(module).__name__} asks for more than packed attention does")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    reach = None if sliding_window is None else sliding_window - 1
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if packing.cu_seqlens is not None:
        return _varlen(*rows, packing, packing.cu_seqlens, scaling, causal, reach).unsqueeze(0), None
    return _by_run(*rows, packing, scaling, causal, reach).unsqueeze(0), None


_UNSERVED = ("softcap", "s_aux", "position_bias", "past_key_values", "head_mask")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    cu_seqlens: Tensor,
    scaling: float | None,
    causal: bool,
    reach: int | None,
) -> Tensor:
    """One kernel for all texts, [T, heads, d]. `num_splits=1` keeps a text's result free of its neighbours."""
    from torch.nn.attention.varlen import varlen_attn

    side = -1 if reach is None else reach
    longest = packing.max_seqlen
    result = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(side, 0 if causal else side),
        enable_gqa=query.shape[1] != key.shape[1],
        num_splits=1,
    )
    assert isinstance(result, Tensor)  # a tuple is returned only where auxiliary results are asked for
    return result


def _by_run(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, causal: bool, reach: int | None
) -> Tensor:
    """One call per run of equal lengths, on views of [T, heads, d]."""
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for run in packing.runs:
        q, k, v = (_of_run(rows, run) for rows in (query, key, value))
        mask = None if reach is None else packing.window(run.length, reach, causal, query.device)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scaling, enable_gqa=grouped
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_run(rows: Tensor, run: Run) -> Tensor:
    """[T, heads, d] → the run's [texts, heads, length, d], a view."""
    return rows[run.start : run.stop].view(run.texts, run.length, *rows.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
