"""What a call needs of the model, beyond the outputs that `engine.check` knows of; texts are TEI's.

TEI's two surfaces refuse a rerank in different words: HTTP with one sentence for all, gRPC with two and no prefix.
"""

from __future__ import annotations

from teimgr.engine.job import Output
from teimgr.errors import WrongModelKind
from teimgr.spec import ModelInfo

RERANKER = "reranker"
_SCORING = ("classifier", RERANKER)


def need_reranker_http(model: ModelInfo) -> None:
    """Ranks, asked for over HTTP.

    Raises:
        WrongModelKind: another kind.
    """
    if model.kind != RERANKER:
        raise WrongModelKind("Backend error: model is not a re-ranker model")


def need_reranker_grpc(model: ModelInfo) -> None:
    """Ranks, asked for over gRPC.

    Raises:
        WrongModelKind: another kind; a classifier hears another sentence than the rest.
    """
    if model.kind in _SCORING and model.kind != RERANKER:
        raise WrongModelKind("model is not a re-ranker model")
    if model.kind != RERANKER:
        raise WrongModelKind("model is not a classifier model")


def output_per_token(model: ModelInfo) -> Output:
    """What "all embeddings" means: a late-interaction model's own vectors, elsewhere the last hidden states."""
    return Output.MULTI_VECTOR if model.kind == "multi-vector" else Output.TOKENS
