"""Scores in the order that callers get them: best first, and of equal ones the one with the higher index first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Prediction(NamedTuple):
    """A label and its score."""

    score: np.float32
    label: str


class Rank(NamedTuple):
    """A text, by its place in the request, and its score."""

    row: int
    score: np.float32


def predictions(scores: NDArray[np.float32], labels: Sequence[str]) -> list[Prediction]:
    """All labels of one input; `scores` is float32 [labels]."""
    return [Prediction(scores[i], labels[i]) for i in _best_first(scores)]


def ranks(scores: NDArray[np.float32]) -> list[Rank]:
    """All texts of one rerank; `scores` is a row per text, float32 [N, 1]."""
    column = scores[:, 0]
    return [Rank(i, column[i]) for i in _best_first(column)]


def _best_first(scores: NDArray[np.float32]) -> list[int]:
    order: list[int] = np.argsort(scores, kind="stable")[::-1].tolist()
    return order
