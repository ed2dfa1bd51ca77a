"""Late interaction: a vector for every kept token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads.base import Rows, moved
from teimgr.layout import LateInteraction


class MultiVectorHead:
    """`projections` of the kept tokens, in float32, each of length 1 where the model says so."""

    def __init__(self, projections: nn.Sequential, late: LateInteraction, width: int) -> None:
        self.width = width
        self._projections = projections
        self._normalize = late.normalize
        self._skipped = np.array(late.skip_ids, dtype=np.int64)
        self._skip_in_queries = late.skip_in_queries

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """MULTI_VECTOR rows; a text whose every token is skipped has none."""
        kept = self._kept(batch)
        if kept is not None:
            hidden = hidden[moved(np.flatnonzero(kept), hidden.device)]
        vectors: Tensor = self._projections(hidden.float())
        if self._normalize:
            vectors = functional.normalize(vectors, dim=-1)
        return Rows(vectors, moved(offsets(kept, batch), hidden.device))

    def _kept(self, batch: PackedBatch) -> NDArray[np.bool_] | None:
        """Which tokens have a vector, [T]; None where all have."""
        if len(self._skipped) == 0:
            return None
        kept = ~np.isin(batch.ids, self._skipped)
        if batch.queries is not None and not self._skip_in_queries:
            kept |= np.repeat(batch.queries, np.diff(batch.cu_seqlens))
        return None if kept.all() else kept


def offsets(kept: NDArray[np.bool_] | None, batch: PackedBatch) -> NDArray[np.int64]:
    """Where each text's kept tokens begin among all kept ones, [N + 1]."""
    borders = batch.cu_seqlens.astype(np.int64)
    if kept is None:
        return borders
    before = np.concatenate([[0], np.cumsum(kept)])
    return np.asarray(before[borders], dtype=np.int64)
