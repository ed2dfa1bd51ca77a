"""Reranking for the dialects of Cohere, Jina, Voyage, vLLM and Infinity, and relevance scores for vLLM and SIE.

Three dialects have `/v1/rerank`, so its answer is the union of theirs; a request with Voyage's `top_k` is answered in
Voyage's form. Infinity and vLLM have `/rerank`: a request with fields that only vLLM has is answered in vLLM's form,
any other in Infinity's. The default of `return_documents` is true for Jina and vLLM, false for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from teimgr.engine.job import Content, ContentPair, InferOptions, Input, Job, Output, Pair, Picture, SparseRow
from teimgr.errors import EmptyInput, InputTooLong
from teimgr.spec import Kind
from teimgr.wire import error_bodies, json_pieces
from teimgr.wire.error_bodies import failure
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks
from teimgr.worker.dialects.openai import MediaOptions, text_of_object
from teimgr.worker.dialects.tokens import Side, Tokens, fitted_documents

_DOCUMENTS_PER_SEARCH_UNIT = 100
_MAX_FIELD_WEIGHT = 10_000

Document = str | dict[str, Any]


def _text_of_query(given: Any) -> Any:
    if images.has_image(given):
        raise images.HasImages
    return text_of_object(given, "query") if isinstance(given, dict) else given


def _listed(given: Any) -> Any:
    """vLLM's one document, a text or an object with `content`, as a list of one."""
    return [given] if isinstance(given, str) or (isinstance(given, dict) and "content" in given) else given


class RerankRequest(MediaOptions):
    """A query, and the documents to rank by relevance to it."""

    model: http.ModelName = None
    query: Annotated[str, BeforeValidator(_text_of_query), Field(description="a text, or an object with `text`")]
    documents: Annotated[
        list[Document],
        BeforeValidator(_listed),
        Field(description="texts, or objects with `text` or the fields in `rank_fields`; or one, as in vLLM"),
    ]
    top_n: Annotated[http.U32 | None, Field(description="number of results; absent or 0: all")] = None
    return_documents: bool | None = None
    rank_fields: Annotated[
        list[str] | None, Field(max_length=100, description="fields of a document to join into its text")
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, Field(ge=1, description="documents are truncated to this many tokens")
    ] = None
    raw_scores: Annotated[bool | None, Field(description="logits instead of scores")] = None
    use_activation: Annotated[bool | None, Field(description="vLLM's: false for logits")] = None
    truncation: Annotated[bool | None, Field(description="false refuses texts that are too long")] = None
    top_k: Annotated[http.U32 | None, Field(description="Voyage's `top_n`: the answer has its form")] = None
    truncate_prompt_tokens: Tokens = None
    truncation_side: Side = None
    priority: Annotated[int | None, Field(description="not used")] = None
    instruction: Annotated[str | None, Field(description="only for models that read texts and images in one input")] = (
        None
    )
    max_tokens_per_query: Annotated[int | None, Field(description="not supported")] = None

    @property
    def wants_logits(self) -> bool:
        return bool(self.raw_scores) or self.use_activation is False

    def form_among(self, form: RerankForm) -> RerankForm:
        """Whose form the answer has: that of the client whose fields the request has, else `form`.

        Raises:
            BadRequest: a field that is not supported.
        """
        if self.max_tokens_per_query:
            raise http.BadRequest(400, "max_tokens_per_query: is not supported", "max_tokens_per_query")
        if "top_k" in self.model_fields_set:
            return VOYAGE
        has_parts = any(isinstance(one, dict) and "content" in one for one in self.documents)
        return VLLM if form is INFINITY and (has_parts or self.model_fields_set & _OF_VLLM) else form

    def returns_documents(self, form: RerankForm) -> bool:
        return form.documents if self.return_documents is None else self.return_documents

    def texts(self) -> list[str]:
        """The text of each document; raises BadRequest where one has none."""
        return [self._text(place, document) for place, document in enumerate(self.documents)]

    def _text(self, place: int, document: Document) -> str:
        if isinstance(document, str):
            return document
        if self.rank_fields:
            fields = [field for field in self.rank_fields if document.get(field) is not None]
            return "\n".join(_text_of_field(place, field, document[field]) for field in fields)
        found = document.get("text", document.get("content"))
        if isinstance(found, list):
            found = input_checks.text_of_parts(found)
        if not isinstance(found, str):
            if "content" not in document:
                return text_of_object(document, f"documents.{place}")
            raise http.BadRequest(400, f"documents.{place}: has no text; only texts can be ranked here", "documents")
        return found


class RerankItemsRequest(RerankRequest):
    """A request whose query has images."""

    query: Any


def _text_of_field(place: int, field: str, value: Any) -> str:
    """A field's text; what is not a text is written as Python writes it, in one call that holds the GIL."""
    if not isinstance(value, str) and json_pieces.weight_of(value) > _MAX_FIELD_WEIGHT:
        raise http.BadRequest(
            400,
            f"documents.{place}.{field}: is not a text and has more than {_MAX_FIELD_WEIGHT} values",
            "documents",
        )
    return str(value)


class Ranking(NamedTuple):
    """The contents of an answer: `rows` best first, and `documents` by row if they are returned."""

    model: str
    scores: NDArray[np.float32]  # [documents]
    tokens: int
    rows: list[int]
    documents: list[Document] | None


class RerankForm(NamedTuple):
    """A dialect's answer. `documents`: whether they are returned by default. `refuses`: whether texts that are too long
    are refused by default."""

    write: Callable[[Ranking], dict[str, Any]]
    documents: bool
    refuses: bool = False


async def _texts(inference: http.HttpInference, body: RerankRequest) -> list[str]:
    fields = body.rank_fields
    if not fields:
        return body.texts()
    if len(set(fields)) < len(fields):  # repetitions would make the texts longer than the body
        raise http.BadRequest(400, "rank_fields: a field is named twice", "rank_fields")
    return await inference.dispatcher.off_loop(body.texts)


def handler(form: RerankForm) -> http.HttpHandler:
    async def handle(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
        try:
            body = await inference.read(request, RerankRequest)
        except images.HasImages:
            body = await inference.read(request, RerankItemsRequest)
        inference.check_count(len(body.documents))
        answers = body.form_among(form)
        input_checks.need_no_instruction(inference.served.model, body.instruction)
        if body.instruction or any(map(images.has_image, (body.query, *body.documents))):
            return await _rank_items(inference, body, answers)
        texts = await inference.truncated(await _texts(inference, body), body.max_tokens_per_doc)
        left = body.truncation_side == "left"
        texts = await fitted_documents(inference, [body.query], texts, body.truncate_prompt_tokens, left=left)
        if texts and input_checks.ranks_images(inference.served.model):  # the same way, even without images
            return await _rank(inference, body, answers, body.query, texts)
        try:
            return await inference.respond(lambda served: _job(body, texts, answers, served))
        except InputTooLong as error:
            if answers is not VLLM:
                raise
            return failure(error_bodies.VLLM, error)

    return handle


async def _rank_items(inference: http.HttpInference, body: RerankRequest, form: RerankForm) -> HttpReply:
    """Texts and images: scored by a reranker that reads both, or by the vectors of a model that embeds both, their
    cosines or best matches.
    """
    if body.truncate_prompt_tokens is not None or body.max_tokens_per_doc is not None:
        raise http.BadRequest(400, "truncate_prompt_tokens, max_tokens_per_doc: are not for requests with images")
    body.refuse_beside_images()
    items = await images.built(inference, body.documents, "documents", _item)
    query, *inputs = await images.read_all(inference, [_item(body.query, "query"), *items], first=-1)
    if not inputs:
        raise EmptyInput("`documents` cannot be empty")
    return await _rank(inference, body, form, query, inputs)


async def _rank(
    inference: http.HttpInference, body: RerankRequest, form: RerankForm, query: Input, inputs: Sequence[Input]
) -> HttpReply:
    served = inference.served
    by_default = served.spec.auto_truncate and not (form.refuses and served.model.kind == Kind.RERANKER)
    truncate = by_default if body.truncation is None else body.truncation
    found = await relevance(
        inference,
        [query],
        inputs,
        truncate=truncate,
        raw_scores=body.wants_logits,
        with_prompts=True,
        instruction=body.instruction,
    )
    rows = http.best_first(found.scores, body.top_n or body.top_k or None)
    documents = body.documents if body.returns_documents(form) else None
    ranking = Ranking(body.model or served.name, found.scores, found.tokens, rows, documents)
    return http.json_reply(await inference.dispatcher.off_loop(lambda: http.to_json(form.write(ranking))))


def _item(given: Document, place: str) -> images.SentItem:
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise http.BadRequest(400, f"{place}: must be a text or an object", place.partition(".")[0])
    return images.item_of_parts(given["content"], place) if "content" in given else images.item_of_object(given, place)


def _job(body: RerankRequest, texts: list[str], form: RerankForm, served: http.ServedModel) -> http.JobSpec:
    if not texts:
        raise EmptyInput("`documents` cannot be empty")
    input_checks.need_kind(served.model, (Kind.RERANKER,), "reranking")
    by_default = served.spec.auto_truncate and not form.refuses
    truncate = by_default if body.truncation is None else body.truncation
    truncate |= body.truncate_prompt_tokens is not None
    options = InferOptions(frozenset({Output.SCORES}), truncate=truncate, raw_scores=body.wants_logits, listed=True)
    documents = body.documents if body.returns_documents(form) else None

    def encode(job: Job) -> bytes:
        rows = http.best_first(job.scores[:, 0], body.top_n or body.top_k or None)
        return http.to_json(
            form.write(Ranking(body.model or served.name, job.scores[:, 0], job.tokens, rows, documents))
        )

    return http.JobSpec([Pair(body.query, text) for text in texts], options, encode)


def _union(version: str, ranking: Ranking) -> dict[str, Any]:
    """Cohere's `id` and `meta`, Jina's `object` and `usage`, vLLM's `model` and `usage`."""
    units = math.ceil(len(ranking.scores) / _DOCUMENTS_PER_SEARCH_UNIT)
    return {
        "id": http.new_id("rerank"),
        "object": "list",
        "model": ranking.model,
        "results": _results(ranking),
        "usage": http.usage(ranking.tokens),
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": units},
            "tokens": {"input_tokens": ranking.tokens},
        },
    }


def _vllm(ranking: Ranking) -> dict[str, Any]:
    """vLLM's form, in which the parts of a content are `multi_modal`."""
    results = _results(ranking)
    for result in results:
        if isinstance(parts := result.get("document", {}).get("content"), list):
            result["document"] = {"text": None, "multi_modal": parts}
    return {
        "id": http.new_id("rerank"),
        "model": ranking.model,
        "usage": http.usage(ranking.tokens),
        "results": results,
    }


def _infinity(ranking: Ranking) -> dict[str, Any]:
    """Infinity's form, but for `document`, a text: it is left out unless asked for, and of a document without a text,
    as clients fail at a null there.
    """
    results: list[dict[str, Any]] = []
    for row in ranking.rows:
        result: dict[str, Any] = {"relevance_score": ranking.scores[row], "index": row}
        if ranking.documents is not None:
            document = ranking.documents[row]
            text = document if isinstance(document, str) else document.get("text")
            if isinstance(text, str):
                result["document"] = text
        results.append(result)
    return {
        "object": "rerank",
        "results": results,
        "model": ranking.model,
        "usage": http.usage(ranking.tokens),
        "id": http.new_id("infinity"),
        "created": http.unix_time(),
    }


def _voyage(ranking: Ranking) -> dict[str, Any]:
    """Voyage's `data`, with documents as they were sent."""
    results = _results(ranking)
    for result, row in zip(results, ranking.rows, strict=True):
        if ranking.documents is not None:
            result["document"] = ranking.documents[row]
    return {"object": "list", "data": results, "model": ranking.model, "usage": http.usage(ranking.tokens)}


def _results(ranking: Ranking) -> list[dict[str, Any]]:
    """The results of all but Infinity: a document sent as a text is returned as an object."""
    results: list[dict[str, Any]] = []
    for row in ranking.rows:
        result: dict[str, Any] = {"index": row, "relevance_score": ranking.scores[row]}
        if ranking.documents is not None:
            document = ranking.documents[row]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    return results


COHERE_1 = RerankForm(partial(_union, "1"), documents=False)
COHERE_2 = RerankForm(partial(_union, "2"), documents=False)
JINA = RerankForm(partial(_union, "1"), documents=True)
VLLM = RerankForm(_vllm, documents=True, refuses=True)
VOYAGE = RerankForm(_voyage, documents=False)
# Fields on `/rerank` that only vLLM has.
_OF_VLLM = frozenset({"truncate_prompt_tokens", "truncation_side", "priority", "max_tokens_per_doc", "use_activation"})
INFINITY = RerankForm(_infinity, documents=False)


# The output by which texts are compared, by kind of model. Dense and sparse vectors by their dot product (the cosine if
# vectors have length 1), vectors per token by the sum over the query's tokens of the best match in the document.
_OUTPUT_OF_KIND: dict[str, Output] = {
    Kind.EMBEDDING: Output.DENSE,
    Kind.SPARSE: Output.SPARSE,
    Kind.MULTI_VECTOR: Output.MULTI_VECTOR,
}


class Relevance(NamedTuple):
    """`scores` is float32 [N]; `tokens` counts those of all inputs."""

    scores: NDArray[np.float32]
    tokens: int


async def relevance(
    inference: http.HttpInference,
    queries: Sequence[Input],
    documents: Sequence[Input],
    *,
    truncate: bool,
    raw_scores: bool = False,
    with_prompts: bool = False,
    instruction: str | None = None,
) -> Relevance:
    """A score per document, for one query or for one query each. `instruction` is for models that read texts and images
    in one input.

    `with_prompts` puts the model's own prompts for queries and for documents before the texts of embedding models;
    models whose queries go another way than documents always have them.

    Raises:
        WrongModelKind: a classifier has no such score.
        TeimgrError: as `HttpInference.jobs`.
    """
    model = inference.served.model
    input_checks.need_kind(model, (Kind.RERANKER, *_OUTPUT_OF_KIND), "scoring")
    if model.kind == Kind.RERANKER:
        last = len(queries) - 1
        pairs = [_pair(queries[min(row, last)], one, instruction) for row, one in enumerate(documents)]
        options = InferOptions(frozenset({Output.SCORES}), truncate=truncate, raw_scores=raw_scores, listed=True)
        [scored] = await inference.jobs([lambda served: http.JobSpec(pairs, options)])
        return Relevance(scored.scores[:, 0], scored.tokens)

    def side(role: str, prompts: Sequence[str]) -> InferOptions:
        by_role = with_prompts or model.has_routes
        name = role if model.kind == Kind.MULTI_VECTOR else http.prompt_among(model, prompts if by_role else ())
        own = instruction if role == "query" else None
        return InferOptions(frozenset({_OUTPUT_OF_KIND[model.kind]}), truncate=truncate, prompt_name=name, prompt=own)

    of_queries, of_documents = await inference.jobs(
        [
            lambda served: http.JobSpec(queries, side("query", http.QUERY_PROMPTS)),
            lambda served: http.JobSpec(documents, side("document", http.DOCUMENT_PROMPTS)),
        ]
    )
    scores = await inference.dispatcher.off_loop(_compared, model.kind, of_queries, of_documents)
    return Relevance(scores, of_queries.tokens + of_documents.tokens)


def _pair(query: Input, document: Input, instruction: str | None) -> Input:
    """A pair of texts, or one with images or an instruction."""
    if isinstance(query, str) and isinstance(document, str) and not instruction:
        return Pair(query, document)
    first = _content(query)
    return ContentPair(first if not instruction else replace(first, instruction=instruction), _content(document))


def _content(item: Input) -> Content:
    if isinstance(item, Content):
        return item
    return Content("", (item,)) if isinstance(item, Picture) else Content(cast(str, item))


def _compared(kind: str, queries: Job, documents: Job) -> NDArray[np.float32]:
    last = len(queries.inputs) - 1
    if kind == Kind.EMBEDDING:
        left = queries.vectors if last else np.broadcast_to(queries.vectors, documents.vectors.shape)
        return np.asarray(np.einsum("nd,nd->n", left, documents.vectors), np.float32)
    rows = range(len(documents.inputs))
    if kind == Kind.SPARSE:
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
