"""Reranking in the dialects of Cohere, Jina, vLLM and Infinity: one tolerant request, and an answer in each form.

`/v1/rerank` is a path of three of them, so its answer is the union of theirs. They disagree only on whether documents
are returned by default: Jina and vLLM return them, the others do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.errors import EmptyInput
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.http.bodies import (
    U32,
    BadRequest,
    Body,
    ModelName,
    best_first,
    new_id,
    text_of_parts,
    to_json,
    unix_time,
    usage,
)
from teimgr.worker.http.inference import HttpHandler, HttpInference, JobSpec, ServedModel, need_kind
from teimgr.worker.scores import RERANKER

_DOCUMENTS_PER_SEARCH_UNIT = 100

Document = str | dict[str, Any]


class RerankRequest(Body):
    """A query, and the documents that are to be ordered by how well they answer it."""

    model: ModelName = None
    query: str
    documents: Annotated[
        list[Document], Field(description="texts, or objects with `text` (or what `rank_fields` names)")
    ]
    top_n: Annotated[U32 | None, Field(description="how many to answer with; absent or 0: all")] = None
    return_documents: bool | None = None
    rank_fields: Annotated[list[str] | None, Field(description="fields of a document that make its text")] = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, description="documents are cut to so many tokens")] = None
    raw_scores: Annotated[bool | None, Field(description="logits instead of scores")] = None
    truncation: Annotated[bool | None, Field(description="false: what is too long is refused")] = None

    def texts(self) -> list[str]:
        """The text of each document; raises BadRequest where one has none."""
        return [self._text(place, document) for place, document in enumerate(self.documents)]

    def _text(self, place: int, document: Document) -> str:
        if isinstance(document, str):
            return document
        if self.rank_fields:
            return "\n".join(str(document[field]) for field in self.rank_fields if document.get(field) is not None)
        found = document.get("text", document.get("content"))
        if isinstance(found, list):
            found = text_of_parts(found)
        if not isinstance(found, str):
            raise BadRequest(400, f"documents.{place}: has no text; only texts can be ranked here", "documents")
        return found


class Ranking(NamedTuple):
    """The contents of an answer: `rows` best first, and `documents` by row where they are returned."""

    model: str
    job: Job
    rows: list[int]
    documents: list[Document] | None


class RerankForm(NamedTuple):
    """A dialect's answer; `documents` is whether they are returned by default."""

    write: Callable[[Ranking], dict[str, Any]]
    documents: bool


def handler(form: RerankForm) -> HttpHandler:
    """The handler of a route that answers in `form`."""

    async def handle(inference: HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, RerankRequest)
        texts = await inference.truncated(body.texts(), body.max_tokens_per_doc)
        return await inference.respond(lambda served: _job(body, texts, form, served))

    return handle


def _job(body: RerankRequest, texts: list[str], form: RerankForm, served: ServedModel) -> JobSpec:
    if not texts:
        raise EmptyInput("`documents` cannot be empty")
    need_kind(served.model, (RERANKER,), "reranking")
    truncate = served.spec.auto_truncate if body.truncation is None else body.truncation
    options = InferOptions(outputs=frozenset({Output.SCORES}), truncate=truncate, raw_scores=bool(body.raw_scores))
    returned = form.documents if body.return_documents is None else body.return_documents

    def encode(job: Job) -> bytes:
        rows = best_first(job.scores[:, 0], body.top_n or None)
        return to_json(form.write(Ranking(body.model or served.name, job, rows, body.documents if returned else None)))

    return JobSpec([Pair(body.query, text) for text in texts], options, encode)


def _union(version: str, ranking: Ranking) -> dict[str, Any]:
    """Cohere's `id` and `meta`, Jina's `object` and `usage`, vLLM's `model` and `usage`."""
    units = math.ceil(len(ranking.job.inputs) / _DOCUMENTS_PER_SEARCH_UNIT)
    return {
        "id": new_id("rerank"),
        "object": "list",
        "model": ranking.model,
        "results": _results(ranking),
        "usage": usage(ranking.job.tokens),
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": units},
            "tokens": {"input_tokens": ranking.job.tokens},
        },
    }


def _vllm(ranking: Ranking) -> dict[str, Any]:
    return {
        "id": new_id("rerank"),
        "model": ranking.model,
        "usage": usage(ranking.job.tokens),
        "results": _results(ranking),
    }


def _infinity(ranking: Ranking) -> dict[str, Any]:
    documents, scores = ranking.documents, ranking.job.scores
    texts = None if documents is None else [one if isinstance(one, str) else str(one.get("text")) for one in documents]
    return {
        "object": "rerank",
        "results": [
            {"relevance_score": scores[row, 0], "index": row, "document": None if texts is None else texts[row]}
            for row in ranking.rows
        ],
        "model": ranking.model,
        "usage": usage(ranking.job.tokens),
        "id": new_id("infinity"),
        "created": unix_time(),
    }


def _results(ranking: Ranking) -> list[dict[str, Any]]:
    """The results of all but Infinity: a document that was sent as a text is returned as an object."""
    results: list[dict[str, Any]] = []
    for row in ranking.rows:
        result: dict[str, Any] = {"index": row, "relevance_score": ranking.job.scores[row, 0]}
        if ranking.documents is not None:
            document = ranking.documents[row]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    return results


COHERE_1 = RerankForm(partial(_union, "1"), documents=False)
COHERE_2 = RerankForm(partial(_union, "2"), documents=False)
JINA = RerankForm(partial(_union, "1"), documents=True)
VLLM = RerankForm(_vllm, documents=True)
INFINITY = RerankForm(_infinity, documents=False)
