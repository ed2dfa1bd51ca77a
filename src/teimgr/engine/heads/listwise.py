"""What a listwise reranker compares: a projected vector at each mark of its prompt."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.batch import PackedBatch, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.heads.multi_vector import offsets
from teimgr.models.layout import Listwise


class MarkedVectorsHead:
    """`projections` of the hidden states at the marks: of each document in its order, and of the query, the last."""

    def __init__(self, projections: nn.Sequential, listwise: Listwise, width: int) -> None:
        self.width = width
        self._projections = projections
        self._marks = np.array((listwise.document_id, listwise.query_id), dtype=np.int64)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """MULTI_VECTOR rows."""
        marked = np.isin(batch.ids, self._marks)
        at_marks = hidden[to_device(np.flatnonzero(marked), hidden.device)]
        return Rows(self._projections(at_marks.float()), to_device(offsets(marked, batch), hidden.device))


class OnlyDocumentHead:
    """The score of a list of one document: the cosine of the first marked vector with the last."""

    def __init__(self, vectors: MarkedVectorsHead) -> None:
        self.width = 1
        self._vectors = vectors

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        found = self._vectors(hidden, batch)
        assert found.offsets is not None
        first, last = found.values[found.offsets[:-1]], found.values[found.offsets[1:] - 1]
        return Rows(functional.cosine_similarity(first, last, dim=-1)[:, None])
