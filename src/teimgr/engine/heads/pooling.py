"""Pooling of a packed row: one vector per text from one per token; sums are float32 in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads import Rows


@dataclass(frozen=True, slots=True)
class Segments:
    """The pooled tokens of each text: int64 [N] each, on the device. `begins` is the start of the text itself."""

    begins: Tensor
    starts: Tensor
    stops: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Segments:
        """Those of `batch`; a prompt that is not pooled lies between `begins` and `starts`."""
        borders = torch.from_numpy(batch.cu_seqlens.astype("int64")).to(device, non_blocking=True)
        begins, stops = borders[:-1], borders[1:]
        if batch.prompt_lens is None:
            return cls(begins, begins, stops)
        return cls(begins, begins + torch.from_numpy(batch.prompt_lens).to(device), stops)

    @property
    def lengths(self) -> Tensor:
        """Pooled tokens per text, float32 [N, 1]."""
        return (self.stops - self.starts).float().unsqueeze(1)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """`sum` or `max` over the pooled tokens: [T, H] → [N, H].

        The kernel takes segments without gaps, so prompt and rest of a text are two segments.
        """
        if self.starts is self.begins:
            borders = torch.cat([self.begins, self.stops[-1:]])
            return torch.segment_reduce(values, how, offsets=borders, axis=0)
        borders = torch.cat([torch.stack([self.begins, self.starts], dim=1).flatten(), self.stops[-1:]])
        return torch.segment_reduce(values, how, offsets=borders, axis=0, initial=None)[1::2]

    def positions(self, tokens: int) -> Tensor:
        """1, 2, 3 … within every text, prompt included: float32 [T, 1]."""
        counts = self.stops - self.begins
        begins = torch.repeat_interleave(self.begins, counts, output_size=tokens)
        return (torch.arange(1, tokens + 1, device=begins.device) - begins).float().unsqueeze(1)


def pool(hidden: Tensor, batch: PackedBatch, poolings: Sequence[str]) -> Tensor:
    """[T, H] of any float type → float32 [N, H × len(poolings)]."""
    segments = Segments.of(batch, hidden.device)
    parts = [POOLINGS[name](hidden, segments) for name in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weighted_mean(hidden: Tensor, segments: Segments) -> Tensor:
    weights = segments.positions(len(hidden))
    return segments.reduce(hidden.float() * weights, "sum") / segments.reduce(weights, "sum")


POOLINGS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "cls": lambda hidden, segments: hidden[segments.starts].float(),
    "last_token": lambda hidden, segments: hidden[segments.stops - 1].float(),
    "max": lambda hidden, segments: segments.reduce(hidden.float(), "max"),
    "mean": lambda hidden, segments: segments.reduce(hidden.float(), "sum") / segments.lengths,
    "mean_sqrt_len": lambda hidden, segments: segments.reduce(hidden.float(), "sum") / segments.lengths.sqrt(),
    "weighted_mean": _weighted_mean,
}


class DenseHead:
    """Pooling, then `projections`, in float32. Also the score of cross-encoders that are built from such modules."""

    def __init__(self, poolings: Sequence[str], projections: nn.Sequential, width: int) -> None:
        self.width = width
        self._poolings = tuple(poolings)
        self._projections = projections

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Neither cut nor normalised by the request's options."""
        return Rows(self._projections(pool(hidden, batch, self._poolings)))


def finish(vectors: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Cut [N, D] to `dimensions`, then scale every row to length 1 (norm in float64); a zero row stays zero."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if not normalize:
        return cut
    norms = np.sqrt(np.einsum("nd,nd->n", cut, cut, dtype=np.float64))
    norms[norms == 0.0] = 1.0
    return np.asarray(cut / norms[:, None], dtype=np.float32)
