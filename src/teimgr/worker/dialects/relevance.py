"""Relevance scores of documents to queries: a cross-encoder's scores, or products of vectors.

Dense and sparse vectors are compared by their product (of dense ones of length 1 that is the cosine), vectors per token
by the sum over the query's tokens of the best match in the document, as late interaction does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import InferOptions, Job, Output, Pair, SparseRow
from teimgr.worker.http.inference import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    HttpInference,
    JobSpec,
    need_kind,
    prompt_among,
)
from teimgr.worker.scores import RERANKER

# The output by which the texts of a model are compared.
_OUTPUT_OF_KIND = {
    "embedding": Output.DENSE,
    "sparse": Output.SPARSE,
    "multi-vector": Output.MULTI_VECTOR,
}


class Relevance(NamedTuple):
    """`scores` is float32 [N]; `tokens` counts all that the model read."""

    scores: NDArray[np.float32]
    tokens: int


async def relevance(
    inference: HttpInference,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    truncate: bool,
    raw_scores: bool = False,
    with_prompts: bool = False,
) -> Relevance:
    """A score per document, for one query or for one query each.

    `with_prompts` puts the model's own prompts for queries and for documents before the texts of embedding models.

    Raises:
        WrongModelKind: a classifier has no such score.
        TeimgrError: as `HttpInference.jobs`.
    """
    model = inference.served.model
    need_kind(model, (RERANKER, *_OUTPUT_OF_KIND), "scoring")
    if model.kind == RERANKER:
        pairs = [Pair(queries[min(row, len(queries) - 1)], text) for row, text in enumerate(documents)]
        options = InferOptions(frozenset({Output.SCORES}), truncate=truncate, raw_scores=raw_scores)
        [scored] = await inference.jobs([lambda served: JobSpec(pairs, options)])
        return Relevance(scored.scores[:, 0], scored.tokens)

    def side(role: str, prompts: Sequence[str]) -> InferOptions:
        name = role if model.kind == "multi-vector" else prompt_among(model, prompts if with_prompts else ())
        return InferOptions(frozenset({_OUTPUT_OF_KIND[model.kind]}), truncate=truncate, prompt_name=name)

    of_queries, of_documents = await inference.jobs(
        [
            lambda served: JobSpec(queries, side("query", QUERY_PROMPTS)),
            lambda served: JobSpec(documents, side("document", DOCUMENT_PROMPTS)),
        ]
    )
    scores = await inference.dispatcher.off_loop(_compared, model.kind, of_queries, of_documents)
    return Relevance(scores, of_queries.tokens + of_documents.tokens)


def _compared(kind: str, queries: Job, documents: Job) -> NDArray[np.float32]:
    last = len(queries.inputs) - 1
    if kind == "embedding":
        left = queries.vectors if last else np.broadcast_to(queries.vectors, documents.vectors.shape)
        return np.asarray(np.einsum("nd,nd->n", left, documents.vectors), np.float32)
    rows = range(len(documents.inputs))
    if kind == "sparse":
        return np.array([_product(queries.sparse[min(i, last)], documents.sparse[i]) for i in rows], np.float32)
    of_tokens = [(queries.multi_vectors[min(i, last)], documents.multi_vectors[i]) for i in rows]
    return np.array([_best_matches(*pair) for pair in of_tokens], np.float32)


def _product(first: SparseRow | None, second: SparseRow | None) -> np.float32:
    assert first is not None
    assert second is not None
    _, here, there = np.intersect1d(first.indices, second.indices, assume_unique=True, return_indices=True)
    return np.float32(first.values[here] @ second.values[there])


def _best_matches(query: NDArray[np.float32] | None, document: NDArray[np.float32] | None) -> np.float32:
    assert query is not None
    assert document is not None
    return np.float32((query @ document.T).max(axis=1).sum()) if len(document) else np.float32(0)
