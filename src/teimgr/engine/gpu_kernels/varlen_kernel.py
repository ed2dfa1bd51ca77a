"""Attention of packed rows on GPUs: one call of torch's flash attention for all texts of a row, of unequal length.

It calls the operator instead of `torch.nn.attention.varlen.varlen_attn`, which takes grouped heads and a number of
splits only after torch 2.11, and adds 30 µs and a kernel to every call. The operator's schema lists its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZE_STEP = 8
_LARGEST_HEAD_SIZE = 256
_NEEDED = frozenset({"cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale", "window_size_left", "window_size_right"})


class Borders(NamedTuple):
    """Borders of the texts among the queries and among the keys, int32 [N + 1] on the device, and the longest of each.

    Texts may be empty: they fill rows with a fixed number of texts.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


class VarlenKernel:
    """`aten::_flash_attention_forward` in its form for packed rows; needs `DTYPES`."""

    def __init__(self, operator: Any) -> None:
        """Raises ValueError: the operator lacks an argument that we need."""
        taken = {argument.name for argument in operator._schema.arguments}
        if missing := sorted(_NEEDED - taken):
            raise ValueError(f"flash attention of this torch has no {', '.join(missing)}")
        self._operator: Callable[..., Any] = operator
        # One split of a text's keys, so that its result does not depend on the batch. Earlier versions never split.
        self._fixed = {"num_splits": 1} if "num_splits" in taken else {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: Borders,
        *,
        scale: float | None = None,
        causal: bool = False,
        reach: int | None = None,
    ) -> Tensor:
        """softmax(scale · q kᵀ) v within each text, [T, heads, d] from queries [T, heads, d] and keys and values
        [T, key heads, d]. `reach` is a window of that many tokens to each side. Undefined behind the last text.

        Raises:
            RuntimeError: the head size is not a multiple of 8, or above 256.
        """
        size = query.shape[2]
        if size % _HEAD_SIZE_STEP or size > _LARGEST_HEAD_SIZE:
            raise RuntimeError(f"flash attention takes no heads of size {size}")
        side = -1 if reach is None else reach
        result = self._operator(
            query,
            key,
            value,
            borders.queries,
            borders.keys,
            borders.longest_queries,
            borders.longest_keys,
            0.0,  # dropout
            causal,
            False,  # no mask for debugging
            scale=scale,
            window_size_left=side,
            window_size_right=0 if causal else side,
            **self._fixed,
        )
        output: Tensor = result[0]
        return output


@functools.cache
def varlen_kernel() -> VarlenKernel | None:
    """The kernel, or None if this torch has none of that form."""
    operator = getattr(getattr(torch.ops.aten, "_flash_attention_forward", None), "default", None)
    try:
        return None if operator is None else VarlenKernel(operator)
    except ValueError:
        return None
