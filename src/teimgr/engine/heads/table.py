"""Mean of the rows of an embedding table: a static model's vectors without the rows of its tokens in between."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from teimgr.engine.batching.batch import PackedBatch, to_device
from teimgr.engine.heads import Rows

_SUM, _MEAN = 0, 1  # of `torch.embedding_bag`, whose wrapper in `functional` takes some microseconds


class TableMeanHead:
    """Like mean pooling and `projections`, in float32; rows of tokens are never written out, so `hidden` is unused.

    `mapping` and `weights` are those of `StaticTable`.
    """

    def __init__(
        self, table: Tensor, mapping: Tensor | None, weights: Tensor | None, projections: nn.Sequential
    ) -> None:
        self.width = table.shape[1]
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self._projections = projections if len(projections) else None

    def __call__(self, hidden: Tensor | None, batch: PackedBatch) -> Rows:
        """Neither cut nor normalised by the request's options."""
        ids = to_device(batch.ids, self._table.device)
        borders = to_device(batch.cu_seqlens.astype("int64"), self._table.device)
        places = ids if self._mapping is None else self._mapping[ids]
        if self._weights is None:
            means = torch.embedding_bag(self._table, places, borders, mode=_MEAN, include_last_offset=True)[0]
        else:
            weights = self._weights[ids]
            bags = torch.embedding_bag(
                self._table, places, borders, mode=_SUM, per_sample_weights=weights, include_last_offset=True
            )
            means = bags[0] / borders.diff().float().unsqueeze(1)
        return Rows(means if self._projections is None else self._projections(means))
