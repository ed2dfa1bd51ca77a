"""How well documents answer queries, by whatever the model has for it: a cross-encoder's scores, or its vectors.

Dense and sparse vectors are compared by their product (of dense ones of length 1 that is the cosine), vectors per token
by the sum over the query's tokens of the best match in the document, as late interaction does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import InferOptions, Input, Job, Output, Pair, SparseRow
from teimgr.spec import ModelInfo
from teimgr.worker.http.common import DOCUMENT_PROMPTS, MOST_INPUTS, QUERY_PROMPTS, need_kind, prompt_among
from teimgr.worker.http.inference import CallOptions, HttpInference, Inference, ServedModel
from teimgr.worker.scores import RERANKER

# What a model's texts are compared by.
_OUTPUT_OF_KIND = {
    "embedding": Output.DENSE,
    "sparse": Output.SPARSE,
    "multi-vector": Output.MULTI_VECTOR,
}


class Relevance(NamedTuple):
    """`scores` is float32 [N]; `jobs` are those that it took."""

    scores: NDArray[np.float32]
    jobs: Sequence[Job]

    @property
    def tokens(self) -> int:
        """All that the model read."""
        return sum(job.tokens for job in self.jobs)


async def relevance(
    exchange: HttpInference,
    queries: Sequence[str],
    documents: Sequence[str],
    terms: CallOptions,
    *,
    truncate: bool,
    raw_scores: bool = False,
    with_prompts: bool = False,
) -> Relevance:
    """A score per document, for one query or for one query each.

    `with_prompts` puts the model's own prompts for queries and for documents before the texts of embedding models.

    Raises:
        WrongModelKind: a classifier has no such score.
        TeimgrError: as `Exchange.jobs`.
    """
    model = exchange.served.model
    need_kind(model, (RERANKER, *_OUTPUT_OF_KIND), "scoring")
    if model.kind == RERANKER:
        pairs = [Pair(queries[min(row, len(queries) - 1)], text) for row, text in enumerate(documents)]
        options = InferOptions(frozenset({Output.SCORES}), truncate=truncate, raw_scores=raw_scores)
        jobs = await exchange.jobs([partial(_inference, pairs, options)], terms)
        return Relevance(jobs[0].scores[:, 0], jobs)
    sides = ((queries, QUERY_PROMPTS, "query"), (documents, DOCUMENT_PROMPTS, "document"))
    asked = [
        partial(_inference, texts, _options(model, truncate, names if with_prompts else (), role))
        for texts, names, role in sides
    ]
    of_queries, of_documents = await exchange.jobs(asked, terms)
    scores = await exchange.dispatcher.off_loop(_compared, model.kind, of_queries, of_documents)
    return Relevance(scores, (of_queries, of_documents))


def _options(model: ModelInfo, truncate: bool, prompts: Sequence[str], role: str) -> InferOptions:
    name = role if model.kind == "multi-vector" else prompt_among(model, prompts)
    return InferOptions(frozenset({_OUTPUT_OF_KIND[model.kind]}), truncate=truncate, prompt_name=name)


def _inference(inputs: Sequence[Input], options: InferOptions, served: ServedModel) -> Inference:
    return Inference(inputs, options, _unwritten, MOST_INPUTS)


def _unwritten(job: Job) -> bytes:
    raise NotImplementedError("the answer is made of all jobs together")


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
