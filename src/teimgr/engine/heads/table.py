"""Mean of the rows of an embedding table: a static model's vectors without the rows of its tokens in between."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.batch import PackedBatch, to_device
from teimgr.engine.heads import Rows


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
        self._projections = projections

    def __call__(self, hidden: Tensor | None, batch: PackedBatch) -> Rows:
        """Neither cut nor normalised by the request's options."""
        ids = to_device(batch.ids, self._table.device)
        borders = to_device(batch.cu_seqlens.astype("int64"), self._table.device)
        places = ids if self._mapping is None else self._mapping[ids]
        if self._weights is None:
            means = functional.embedding_bag(places, self._table, borders, mode="mean", include_last_offset=True)
        else:
            sums = functional.embedding_bag(
                places,
                self._table,
                borders,
                mode="sum",
                per_sample_weights=self._weights[ids],
                include_last_offset=True,
            )
            means = sums / borders.diff().float().unsqueeze(1)
        return Rows(self._projections(means))
