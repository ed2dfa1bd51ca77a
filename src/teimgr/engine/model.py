"""Packed ids in, raw vectors out: transformer, pooling and Dense modules as one thing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from teimgr.engine.batch import PackedBatch, pack
from teimgr.engine.heads.dense import load_heads
from teimgr.engine.heads.pooling import pool
from teimgr.engine.transformer import Transformer, load_transformer
from teimgr.layout import Layout


class Model:
    """A whole embedding model on one device; one thread uses it at a time."""

    def __init__(self, transformer: Transformer, heads: nn.Sequential, poolings: Sequence[str]) -> None:
        self.transformer = transformer
        self._heads = heads
        self._poolings = tuple(poolings)

    @torch.inference_mode()
    def embed(self, batch: PackedBatch) -> Tensor:
        """Float32 [N, dimension] on the device, in the batch's own order; neither cut nor normalised."""
        return self._finish(self.transformer.hidden(batch), batch)

    @torch.inference_mode()
    def embed_plainly(self, ids: NDArray[np.int32]) -> Tensor:
        """The vector of one text, [dimension], through the library's own forward: the measure of every other way."""
        batch = pack([ids])
        return self._finish(self.transformer.hidden_plain(batch.ids[None, :]), batch)[0]

    def _finish(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        vectors: Tensor = self._heads(pool(hidden, batch, self._poolings))
        return vectors


def load_model(layout: Layout, device: torch.device) -> Model:
    """The model in float32.

    Raises:
        ModelLoadFailed: weights are missing, of another shape, or of an unknown architecture.
    """
    return Model(load_transformer(layout, device), load_heads(layout.projections, device), layout.poolings)
