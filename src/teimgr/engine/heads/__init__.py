"""Heads: results from hidden states, by kind.

    pooling        one vector per text, also as the mean of rows of an embedding table; late interaction: a projected
                   vector per kept token; BGE-M3's sparse weights and token vectors; the vectors at the marks of a
                   listwise reranker's prompt; dimensions and norm by request (`finish`)
    projections    the Dense, LayerNorm and Normalize modules after a pooling or every token
    splade         a weight per vocabulary entry, from a masked-LM head
    scoring        classifiers, cross-encoders and causal rerankers, by the head of a transformers model that is run
                   separately on hidden states (`LibraryHead`); activations (`activate`)

Heads are independent of jobs and requests: the finisher applies dimensions, norm and activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from teimgr.engine.batching.batch import PackedBatch, to_device


@dataclass(slots=True)  # `frozen` would cost half a microsecond per query
class Rows:
    """The results of N texts, in the batch's own order, on the device.

    If every text has one row of fixed width, `values` is [N, width] and `offsets` None (DENSE, SCORES). Otherwise text
    i has `values[offsets[i] : offsets[i + 1]]`, with `offsets` int64 [N + 1]: rows of [*, width] (TOKENS,
    MULTI_VECTOR), or single numbers [*] whose positions are in `indices`, int64 [*] ascending within a text (SPARSE).
    `values` are float32, or in the model's dtype if they are converted later (TOKENS).

    SPARSE rows may have unused numbers after the last text. If their number is only on the device, `offsets` may end
    beyond `values`; then `whole` waits for the device and returns all.
    """

    values: Tensor
    offsets: Tensor | None = None
    indices: Tensor | None = None
    whole: Callable[[], Rows] | None = None


class Head(Protocol):
    """Makes one kind of output; `width` is the size of a vector or of the vocabulary, or the number of labels."""

    width: int

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """The output for hidden states [T, H] of `batch`: in the model's dtype, or float32 from a native forward."""
        ...


class TokensHead:
    """The last hidden states unchanged, special tokens and prompt included."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        return Rows(hidden, to_device(batch.cu_seqlens.astype(np.int64), hidden.device))
