"""Scores in reply order, and checks of the model's kind with TEI's error texts, which differ between HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import Output
from teimgr.errors import WrongModelKind
from teimgr.spec import Kind, LoadedModel


class ScoredLabel(NamedTuple):
    """A label and its score; the field names are keys of JSON replies."""

    score: np.float32
    label: str


class ScoredRow(NamedTuple):
    """A text's row in the request, and its score."""

    row: int
    score: np.float32


def predictions(scores: NDArray[np.float32], labels: Sequence[str]) -> list[ScoredLabel]:
    """Return all labels of one input, best first; `scores` is float32 [labels]."""
    return [ScoredLabel(scores[i], labels[i]) for i in _best_first(scores)]


def ranks(scores: NDArray[np.float32]) -> list[ScoredRow]:
    """Return all texts of one rerank, best first; `scores` is float32 [texts, 1]."""
    column = scores[:, 0]
    return [ScoredRow(i, column[i]) for i in _best_first(column)]


def _best_first(scores: NDArray[np.float32]) -> list[int]:
    order: list[int] = np.argsort(scores, kind="stable")[::-1].tolist()
    return order


def need_reranker_http(model: LoadedModel) -> None:
    """Raise WrongModelKind if the model is not a reranker, for a request over HTTP."""
    if model.kind != Kind.RERANKER:
        raise WrongModelKind("Backend error: model is not a re-ranker model")


def need_reranker_grpc(model: LoadedModel) -> None:
    """Raise WrongModelKind if the model is not a reranker, for a request over gRPC."""
    if model.kind != Kind.RERANKER:
        is_classifier = model.kind == Kind.CLASSIFIER
        raise WrongModelKind(f"model is not a {'re-ranker' if is_classifier else 'classifier'} model")


def output_per_token(model: LoadedModel) -> Output:
    """Return the output of "embed all": a late-interaction model's vectors, any other model's last hidden states.

    Raises:
        WrongModelKind: the model is a token classifier, whose tokens have labels.
    """
    if model.kind == Kind.TOKEN_CLASSIFIER:
        raise WrongModelKind("Backend error: Model is not an embedding model")
    return Output.MULTI_VECTOR if model.kind == Kind.MULTI_VECTOR else Output.TOKENS
