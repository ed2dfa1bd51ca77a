"""ALiBi to both sides: scores of attention fall by a slope of their head with the distance of the two tokens.

Press et al., "Train Short, Test Long", 2022, as encoders use it: score − slope · |i − j|.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_SCORES = 16_000_000
"""Scores whose biases are in memory at a time: 64 MB."""


@functools.lru_cache(maxsize=64)
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head, float32 [heads]: a geometric sequence for a power of two; else that of the next lower
    power, and then every second one of the next higher.
    """

    def of_power(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (i + 1) for i in range(count)]

    power = 1 << (heads.bit_length() - 1)
    slopes = of_power(power) + of_power(2 * power)[::2][: heads - power]
    with torch.inference_mode(mode=False):
        return torch.tensor(slopes, dtype=torch.float32, device=device)


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    scale: float | None = None,
    seen: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ − slope · |i − j|) v by torch's operators, [texts, heads, T, d], of equal shapes.

    `seen` is boolean, [T, T] or broadcast to [texts, heads, T, T]: the keys that a query attends to. Queries are taken
    in chunks, so that a long text's biases need not be in memory at once.
    """
    texts, heads, length, _ = query.shape
    step = max(1, _CHUNK_SCORES // max(1, (texts if seen is not None else 1) * heads * length))
    places = torch.arange(length, device=query.device)
    parts = []
    for first in range(0, length, step):
        rows = slice(first, min(first + step, length))
        distances = places[rows, None] - places[None, :]
        bias = (slopes[:, None, None] * -distances.abs()).to(query.dtype)
        if causal:
            bias = bias.masked_fill(distances < 0, -math.inf)
        if seen is not None:
            whole = seen if seen.shape[-2] == 1 else seen[..., rows, :]
            bias = bias.masked_fill(~whole, -math.inf)
        mask = bias if bias.dim() == 4 else bias[None]
        parts.append(functional.scaled_dot_product_attention(query[:, :, rows], key, value, mask, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
