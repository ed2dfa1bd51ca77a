"""What is measured of a case: how far our results are from the reference's, and how far from themselves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

MIN_COSINE = 0.99999
MAX_DIFFERENCE = 2e-5
MAX_SCORE_DIFFERENCE = 1e-5
MAX_ALONE_DIFFERENCE = 1e-6


@dataclass(frozen=True, slots=True)
class Distance:
    """Between two lists of results. `cosine` is the lowest over rows (None for scores), `difference` the largest
    absolute one: of unit vectors for vectors, of the numbers themselves for scores.
    """

    cosine: float | None
    difference: float

    def meets(self, limit: float) -> bool:
        """Whether it is within `limit` and the cosine within `MIN_COSINE`."""
        return self.difference <= limit and (self.cosine is None or self.cosine >= MIN_COSINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case: `reference` against sentence-transformers or transformers, `alone` against a text by itself."""

    inputs: int
    tokens: int
    batches: int
    batching: str
    reference: Distance
    alone: Distance

    @property
    def limit(self) -> float:
        """What `reference.difference` may be."""
        return MAX_SCORE_DIFFERENCE if self.reference.cosine is None else MAX_DIFFERENCE

    @property
    def pass_(self) -> bool:
        """Whether the case holds."""
        return self.reference.meets(self.limit) and self.alone.difference <= MAX_ALONE_DIFFERENCE


def between_vectors(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> Distance:
    """Between results of [vectors, width] each; a zero vector must be zero on both sides.

    Raises:
        AssertionError: an input has another number of vectors, or of another width, than in the reference.
    """
    cosine, difference = 1.0, 0.0
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.shape == other.shape, f"input {i}: {mine.shape} where the reference has {other.shape}"
        a, b = _unit(mine), _unit(other)
        difference = max(difference, float(np.abs(a - b).max(initial=0.0)))
        lengths = (a * a).sum(axis=1)
        if (alive := lengths > 0.5).any():
            cosine = min(cosine, float((a * b).sum(axis=1)[alive].min()))
    return Distance(cosine, difference)


def between_scores(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> Distance:
    """Between results of [labels] each.

    Raises:
        AssertionError: an input has another number of labels.
    """
    mine, other = np.stack(list(ours)), np.stack(list(theirs))
    assert mine.shape == other.shape, f"{mine.shape} where the reference has {other.shape}"
    return Distance(None, float(np.abs(mine - other).max()))


def _unit(rows: Matrix) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(norms == 0.0, 1.0, norms)
