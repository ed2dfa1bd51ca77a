"""Reranking as Cohere, Jina, vLLM and Infinity ask for it: one tolerant request, and an answer in the form of each.

`/v1/rerank` is claimed by three of them, so its answer is the union of theirs. Whether documents come back where the
request does not say is the one thing they disagree on: they do for Jina and vLLM, and do not for the others.
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
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import U32, Body
from teimgr.worker.http.common import (
    MOST_INPUTS,
    Refused,
    best_first,
    named,
    need_kind,
    now,
    read,
    shortened,
    text_of_parts,
    usage,
)
from teimgr.worker.http.inference import CallOptions, HttpHandler, HttpInference, Inference, ServedModel, json_reply
from teimgr.worker.scores import RERANKER

_DOCUMENTS_PER_SEARCH_UNIT = 100

Document = str | dict[str, Any]


class RerankRequest(Body):
    """A query, and the documents that are to be ordered by how well they answer it."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
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
        """The text of each document.

        Raises:
            Refused: one of them has none.
        """
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
            raise Refused(400, f"documents.{place}: has no text; only texts can be ranked here", "documents")
        return found


class Ranked(NamedTuple):
    """A document by its row in the request."""

    row: int
    score: Any
    document: Document | None


class Ranking(NamedTuple):
    """What an answer is made of."""

    model: str
    job: Job
    ranks: list[Ranked]


class Form(NamedTuple):
    """How a dialect answers; `documents` is whether they come back where the request does not say."""

    write: Callable[[Ranking], dict[str, Any]]
    documents: bool


def route(form: Form) -> HttpHandler:
    """A route that answers in `form`."""

    async def answer(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
        asked = await read(exchange, request, RerankRequest)
        texts = await shortened(exchange, asked.texts(), asked.max_tokens_per_doc)
        [reply] = await exchange.infer([partial(_inference, asked, texts, form)], terms)
        return json_reply(reply.payload)

    return answer


def _inference(asked: RerankRequest, texts: list[str], form: Form, served: ServedModel) -> Inference:
    if not texts:
        raise EmptyInput("`documents` cannot be empty")
    need_kind(served.model, (RERANKER,), "reranking")
    truncate = served.spec.auto_truncate if asked.truncation is None else asked.truncation
    options = InferOptions(outputs=frozenset({Output.SCORES}), truncate=truncate, raw_scores=bool(asked.raw_scores))
    wanted = form.documents if asked.return_documents is None else asked.return_documents

    def answer(job: Job) -> bytes:
        scores = job.scores[:, 0]
        ranks = [
            Ranked(row, scores[row], asked.documents[row] if wanted else None)
            for row in best_first(scores, asked.top_n or None)
        ]
        return to_json(form.write(Ranking(asked.model or served.name, job, ranks)))

    return Inference([Pair(asked.query, text) for text in texts], options, answer, MOST_INPUTS)


def _union(version: str, ranking: Ranking) -> dict[str, Any]:
    """Cohere's `id` and `meta`, Jina's `object` and `usage`, vLLM's `model` and `usage`."""
    units = math.ceil(len(ranking.job.inputs) / _DOCUMENTS_PER_SEARCH_UNIT)
    return {
        "id": named("rerank"),
        "object": "list",
        "model": ranking.model,
        "results": [_as_object(one) for one in ranking.ranks],
        "usage": usage(ranking.job),
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": units},
            "tokens": {"input_tokens": ranking.job.tokens},
        },
    }


def _vllm(ranking: Ranking) -> dict[str, Any]:
    return {
        "id": named("rerank"),
        "model": ranking.model,
        "usage": usage(ranking.job),
        "results": [_as_object(one) for one in ranking.ranks],
    }


def _infinity(ranking: Ranking) -> dict[str, Any]:
    return {
        "object": "rerank",
        "results": [
            {"relevance_score": one.score, "index": one.row, "document": _as_text(one.document)}
            for one in ranking.ranks
        ],
        "model": ranking.model,
        "usage": usage(ranking.job),
        "id": named("infinity"),
        "created": now(),
    }


def _as_object(one: Ranked) -> dict[str, Any]:
    told: dict[str, Any] = {"index": one.row, "relevance_score": one.score}
    if one.document is None:
        return told
    return told | {"document": {"text": one.document} if isinstance(one.document, str) else one.document}


def _as_text(document: Document | None) -> str | None:
    return document if document is None or isinstance(document, str) else str(document.get("text"))


COHERE_1 = Form(partial(_union, "1"), documents=False)
COHERE_2 = Form(partial(_union, "2"), documents=False)
JINA = Form(partial(_union, "1"), documents=True)
VLLM = Form(_vllm, documents=True)
INFINITY = Form(_infinity, documents=False)
