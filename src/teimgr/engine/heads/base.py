"""What every head takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from teimgr.engine.batch import PackedBatch
from teimgr.engine.job import Output


@dataclass(frozen=True, slots=True)
class Rows:
    """The results of N texts, in the batch's own order, on the device.

    Where every text has one row of fixed width, `values` is [N, width] and `offsets` None (DENSE, SCORES). Else text i
    has `values[offsets[i] : offsets[i + 1]]`, with `offsets` int64 [N + 1]: rows of [*, width] (TOKENS,
    MULTI_VECTOR), or single numbers [*] whose places are in `indices`, int64 [*] ascending within a text (SPARSE).
    `values` are float32, or the model's own type where they are only widened later (TOKENS).
    """

    values: Tensor
    offsets: Tensor | None = None
    indices: Tensor | None = None


class Head(Protocol):
    """Makes one kind of output; `width` is the size of a vector, the vocabulary, or the number of labels."""

    output: Output
    width: int

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """[T, H] hidden states of `batch`, in the model's type, to what they mean."""
        ...

    def to(self, device: object) -> object:
        """Move the weights."""
        ...
