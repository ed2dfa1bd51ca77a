"""What is made of hidden states: one file per kind of head.

    pooling, dense     one vector per text
    projections        the Dense, LayerNorm and Normalize modules behind a pooling or every token
    splade             a weight per vocabulary entry, from a masked-LM head
    tokens             the hidden states themselves
    multi_vector       late interaction: a projected vector per kept token
    m3                 BGE-M3's sparse weights and token vectors, beside its dense vector
    library            the head of a transformers model, run by itself on hidden states; three of those below use it
    classification     labels and cross-encoders
    causal             rerankers that are language models: the logits of two tokens

A head knows neither jobs nor requests. Normalising, cutting and activations that a request decides on are the
finisher's (`dense.finish`, `classification.activate`).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teimgr.engine.batch import PackedBatch

__all__ = ["Head", "Rows"]


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

    width: int

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """[T, H] hidden states of `batch`, in the model's type, to what they mean."""
        ...


def moved(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` on `device`, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class TokensHead:
    """The last hidden states as they are, special tokens and prompt included."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """The batch's own rows, in the model's type."""
        return Rows(hidden, moved(batch.cu_seqlens.astype(np.int64), hidden.device))
