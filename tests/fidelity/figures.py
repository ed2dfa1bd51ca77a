"""What is measured of a case: how far our results are from the reference's, and how far from themselves alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a precision may be off: the lowest and the mean cosine of vectors, the largest difference of unit vectors
    and of scores, and the largest difference between a text alone and in a batch. `by_library` are those of a model
    whose forward is its own code in torch, where they are others.
    """

    cosine: float
    mean_cosine: float
    difference: float
    score_difference: float
    alone: float
    by_library: Limits | None = None


# What the gate of `fidelity_gate` allows of a type with 16 bits that a user asks for; `auto` would not take it.
_TORCH_BFLOAT16 = Limits(0.99, 0.99, math.inf, 1e-1, 1e-6)
LIMITS = {
    "float32": Limits(0.99999, 0.99999, 2e-5, 1e-5, 1e-6),
    "bfloat16": Limits(0.999, 0.999, math.inf, 2e-2, 1e-6, by_library=_TORCH_BFLOAT16),
    "int8": Limits(0.98, 0.98, math.inf, 1e-1, 1e-6),
}
"""By precision, for random weights."""

REAL_WEIGHTS_LIMITS = LIMITS | {
    # By torch's operators, as on CPUs with AVX2: how they round depends on the number of rows.
    "bfloat16": Limits(0.9999, 0.9999, math.inf, 2e-2, 1e-6, Limits(0.999, 0.999, math.inf, 1e-1, 5e-3)),
    "int8": Limits(0.98, 0.997, math.inf, 1e-1, 1e-6),
}


@dataclass(frozen=True, slots=True)
class Distance:
    """Between two lists of results. `cosine` is the lowest over rows and `mean_cosine` their mean (None for scores),
    `difference` the largest absolute one: of unit vectors for vectors, for scores as in `between_scores`.
    """

    cosine: float | None
    difference: float
    mean_cosine: float | None = None

    def meets(self, limits: Limits) -> bool:
        """Whether it is within them."""
        if self.cosine is None or self.mean_cosine is None:
            return self.difference <= limits.score_difference
        return (
            self.difference <= limits.difference
            and self.cosine >= limits.cosine
            and self.mean_cosine >= limits.mean_cosine
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case in one precision: `reference` against sentence-transformers or transformers in float32, `alone`
    against a text by itself in the same precision.
    """

    inputs: int
    tokens: int
    batches: int
    batching: str
    reference: Distance
    alone: Distance
    forward: str = "native"
    limits: Limits = LIMITS["float32"]

    @property
    def pass_(self) -> bool:
        """Whether the case holds."""
        return self.reference.meets(self.limits) and self.alone.difference <= self.limits.alone

    @property
    def is_bit_for_bit(self) -> bool:
        """Whether every text gave the same numbers alone and in its batch."""
        return self.alone.difference == 0.0


def between_vectors(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> Distance:
    """Between results of [vectors, width] each; a zero vector must be zero on both sides.

    Raises:
        AssertionError: an input has another number of vectors, or of another width, than in the reference.
    """
    cosines: list[float] = []
    difference = 0.0
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.shape == other.shape, f"input {i}: {mine.shape} where the reference has {other.shape}"
        a, b = _unit(mine), _unit(other)
        difference = max(difference, float(np.abs(a - b).max(initial=0.0)))
        lengths = (a * a).sum(axis=1)
        if (alive := lengths > 0.5).any():
            cosines += (a * b).sum(axis=1)[alive].tolist()
    found = cosines or [1.0]
    return Distance(min(found), difference, sum(found) / len(found))


def between_scores(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> Distance:
    """Between results of [labels] each, as a part of the largest score where that is above 1, as the gate has it.

    Raises:
        AssertionError: an input has another number of labels.
    """
    mine, other = np.stack(list(ours)), np.stack(list(theirs))
    assert mine.shape == other.shape, f"{mine.shape} where the reference has {other.shape}"
    return Distance(None, float(np.abs(mine - other).max() / max(1.0, np.abs(other).max())))


def _unit(rows: Matrix) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(norms == 0.0, 1.0, norms)
