"""What a call needs of the model, beyond the outputs that `engine.check` knows of; texts are TEI's.

TEI's two surfaces refuse a rerank in different words: HTTP with one sentence for all, gRPC with two and no prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import Output
from teimgr.errors import WrongModelKind
from teimgr.spec import LoadedModel


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


RERANKER = "reranker"
_SCORING = ("classifier", RERANKER)


def need_reranker_http(model: LoadedModel) -> None:
    """Ranks, asked for over HTTP.

    Raises:
        WrongModelKind: another kind.
    """
    if model.kind != RERANKER:
        raise WrongModelKind("Backend error: model is not a re-ranker model")


def need_reranker_grpc(model: LoadedModel) -> None:
    """Ranks, asked for over gRPC.

    Raises:
        WrongModelKind: another kind; a classifier hears another sentence than the rest.
    """
    if model.kind in _SCORING and model.kind != RERANKER:
        raise WrongModelKind("model is not a re-ranker model")
    if model.kind != RERANKER:
        raise WrongModelKind("model is not a classifier model")


def output_per_token(model: LoadedModel) -> Output:
    """What "all embeddings" means: a late-interaction model's own vectors, elsewhere the last hidden states."""
    return Output.MULTI_VECTOR if model.kind == "multi-vector" else Output.TOKENS
