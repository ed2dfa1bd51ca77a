"""One vector per text: pooling and the modules behind it, then the cut and the normalisation of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads.base import Rows
from teimgr.engine.heads.pooling import pool


class DenseHead:
    """Pooling, then `projections`; float32 from the pooling on. Also a cross-encoder's score, where it is made so."""

    def __init__(self, poolings: Sequence[str], projections: nn.Sequential, width: int) -> None:
        self.width = width
        self._poolings = tuple(poolings)
        self._projections = projections

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Neither cut nor normalised by a request's wish."""
        return Rows(self._projections(pool(hidden, batch, self._poolings)))


def finish(vectors: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Cut [N, D] to `dimensions`, then scale every row to length 1 (norm in float64); a zero row stays zero."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if not normalize:
        return cut
    norms = np.sqrt(np.einsum("nd,nd->n", cut, cut, dtype=np.float64))
    norms[norms == 0.0] = 1.0
    return np.asarray(cut / norms[:, None], dtype=np.float32)
