"""vLLM's pooling routes: scores, classes, and pooled outputs. https://docs.vllm.ai/en/latest/models/pooling_models

As in vLLM, inputs that are too long are refused unless `truncate_prompt_tokens` is given: a number of tokens, or -1 for
the model's limit.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.engine.job import Input as EngineInput
from teimgr.errors import InvalidInput
from teimgr.spec import Kind
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks
from teimgr.worker.dialects import infinity, openai, rerank, tokens
from teimgr.worker.dialects.openai import BINARY_FORMATS, AnyEncoding, EmbedDtype, Endianness, binary_reply
from teimgr.worker.dialects.rerank import relevance
from teimgr.worker.dialects.tokens import Side, Tokens, fitted, fitted_documents
from teimgr.worker.scores import probabilities

Text = str | http.Texts
Task = Literal["embed", "classify", "token_embed", "token_classify"]


class VllmRequest(http.LenientBody):
    """The fields that all requests share: the model and the truncation."""

    model: http.ModelName = None
    truncate_prompt_tokens: Tokens = None
    truncation_side: Side = None
    user: str | None = None
    use_activation: Annotated[bool | None, Field(description="false: logits, or vectors without normalisation")] = None
    activation: Annotated[bool | None, Field(description="older name of use_activation")] = None
    softmax: Annotated[bool | None, Field(description="older name of use_activation")] = None
    add_special_tokens: Annotated[bool | None, Field(description="false only for token ids")] = None

    @property
    def raw(self) -> bool:
        return False in (self.use_activation, self.activation, self.softmax)

    @property
    def left(self) -> bool:
        return self.truncation_side == "left"

    def options(self, output: Output, **more: Any) -> InferOptions:
        truncate = self.truncate_prompt_tokens is not None
        return InferOptions(
            frozenset({output}),
            truncate=truncate,
            truncation_left=self.left,
            names_side=self.truncation_side is not None,
            **more,
        )


class VllmScoreRequest(VllmRequest):
    """Texts to compare: one with one, one with several, or pairs in order."""

    queries: Text | None = None
    documents: Text | None = None
    items: Text | None = None
    text_1: Text | None = None
    text_2: Text | None = None
    data_1: Text | None = None
    data_2: Text | None = None
    instruction: Annotated[str | None, Field(description="only for models that read texts and images in one input")] = (
        None
    )

    _QUERIES: ClassVar = ("queries", "text_1", "data_1")
    _DOCUMENTS: ClassVar = ("documents", "items", "text_2", "data_2")

    def sides(self) -> tuple[list[str], list[str]]:
        """Both sides: of equal length, or one text and several.

        Raises:
            BadRequest: a side is missing, or they do not match.
        """
        first, second = self._first_of(*self._QUERIES), self._first_of(*self._DOCUMENTS)
        if len(first) not in (1, len(second)):
            raise http.BadRequest(400, f"Input lengths must be 1:1, 1:N or N:N, not {len(first)}:{len(second)}")
        return first, second

    def _first_of(self, *names: str) -> list[str]:
        for name in names:
            value: str | list[str] | None = getattr(self, name)
            if value is not None:
                texts = [value] if isinstance(value, str) else value
                input_checks.need_texts(texts, name)
                return texts
        raise http.BadRequest(400, f"{names[0]}: is missing (or {', '.join(names[1:])})", names[0])


class VllmScoreItemsRequest(openai.MediaOptions, VllmScoreRequest):
    """Contents of texts and images in place of texts."""

    queries: Any = None
    documents: Any = None
    items: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None

    async def contents(self, inference: http.HttpInference) -> tuple[list[images.SentItem], list[images.SentItem]]:
        """Both sides, as `sides`; raises TooManyInputs also."""
        first, second = self.sides()
        sides = (self._QUERIES, first), (self._DOCUMENTS, second)
        for _, given in sides:
            inference.check_count(len(given))
        queries, documents = [await images.built(inference, given, self._given(*of), _item) for of, given in sides]
        return queries, documents

    def _given(self, *names: str) -> str:
        """The name of these that is given; the first without one."""
        return next((name for name in names if getattr(self, name) is not None), names[0])

    def _first_of(self, *names: str) -> list[Any]:
        value = getattr(self, self._given(*names))
        if value is None:
            return super()._first_of(*names)
        return value if isinstance(value, list) else [value]


def _item(given: Any, place: str) -> images.SentItem:
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or "content" not in given:
        raise http.BadRequest(400, f"{place}: must be a text or an object with `content`", place.partition(".")[0])
    return images.item_of_parts(given["content"], f"{place}.content")


class VllmClassifyRequest(VllmRequest):
    """Texts or ids to classify. `raw_scores` is Infinity's field: with it the answer has Infinity's form."""

    input: http.Input
    raw_scores: Annotated[bool | None, Field(description="Infinity's; the answer has its form")] = None


class VllmPoolingRequest(VllmRequest):
    """Texts or ids to pool; without a task the output is the model's own."""

    input: http.Input
    task: Task | None = None
    encoding_format: AnyEncoding = "float"
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    normalize: bool | None = None
    dimensions: Annotated[http.U32 | None, Field(description="leading dimensions to keep")] = None
    pool_factor: http.PoolFactor = 1.0
    padding: openai.Padding = None
    messages: Annotated[
        Any,
        Field(description="as in /v1/embeddings, in place of `input`, for embed and token_embed"),
    ] = None


class VllmPoolingChatRequest(openai.ChatRequest, VllmPoolingRequest):
    """A conversation, or several, of texts and images to pool."""

    input: Any = None


async def _score(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    try:
        body = await inference.read(request, VllmScoreRequest)
    except http.BadRequest:
        if await inference.mentions(request, b'"content"'):
            return await _score_items(inference, request)
        raise
    if body.instruction:
        return await _score_items(inference, request)
    queries, documents = body.sides()
    inference.check_count(max(len(queries), len(documents)))
    documents = await fitted_documents(inference, queries, documents, body.truncate_prompt_tokens, left=body.left)
    truncate, raw_scores = body.truncate_prompt_tokens is not None, body.raw
    found = await relevance(inference, queries, documents, truncate=truncate, raw_scores=raw_scores)
    return _scores(inference, body, found)


async def _score_items(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    """Texts and images."""
    body = await inference.read(request, VllmScoreItemsRequest)
    input_checks.need_no_instruction(inference.served.model, body.instruction)
    if body.truncate_prompt_tokens is not None:
        raise http.BadRequest(400, "truncate_prompt_tokens: is not for requests with images", "truncate_prompt_tokens")
    body.refuse_beside_images()
    queries, documents = await body.contents(inference)
    read = await images.read_all(inference, [*queries, *documents])
    first, second = read[: len(queries)], read[len(queries) :]
    raw_scores, instruction = body.raw, body.instruction
    found = await relevance(inference, first, second, truncate=False, raw_scores=raw_scores, instruction=instruction)
    return _scores(inference, body, found)


def _scores(inference: http.HttpInference, body: VllmScoreRequest, found: rerank.Relevance) -> HttpReply:
    data = [{"index": row, "object": "score", "score": score} for row, score in enumerate(found.scores)]
    return http.json_reply(_list("score", body.model or inference.served.name, data, found.tokens))


async def _classify(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    body = await inference.read(request, VllmClassifyRequest)
    if body.raw_scores is not None:
        return await infinity.classify(inference, request)
    inputs = await fitted(inference, inference.inputs(body.input), body.truncate_prompt_tokens, left=body.left)

    def job(served: http.ServedModel) -> http.JobSpec:
        input_checks.need_texts(inputs, "input")
        input_checks.need_special_tokens(inputs, body.add_special_tokens)
        input_checks.need_kind(served.model, (Kind.CLASSIFIER, Kind.RERANKER), "classification")
        labels = served.model.labels

        def encode(job: Job) -> bytes:
            data = [
                {"index": row, "label": labels[int(scores.argmax())], "probs": scores, "num_classes": len(labels)}
                for row, scores in enumerate(job.scores)
            ]
            return _list("classify", body.model or served.name, data, job.tokens)

        return http.JobSpec(inputs, body.options(Output.SCORES, raw_scores=body.raw), encode)

    return await inference.respond(job)


async def _pooling(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    try:
        body = await inference.read(request, VllmPoolingRequest)
    except http.BadRequest:
        if not await inference.mentions(request, b'"messages"'):
            raise
        chats = await inference.read(request, VllmPoolingChatRequest)
        return await _pool(inference, chats, await _inputs_of_chats(inference, chats))
    if body.messages:
        raise http.BadRequest(400, "messages: contradict `input`; send one of the two", "messages")
    openai.check_padding(inference, body.padding)
    inputs = await fitted(inference, inference.inputs(body.input), body.truncate_prompt_tokens, left=body.left)
    return await _pool(inference, body, inputs)


async def _inputs_of_chats(inference: http.HttpInference, body: VllmPoolingChatRequest) -> list[EngineInput]:
    if body.messages is None:
        raise http.BadRequest(400, "input: is missing (or messages)", "input")
    if body.truncate_prompt_tokens is not None:
        raise http.BadRequest(400, "truncate_prompt_tokens: is not for requests with images", "truncate_prompt_tokens")
    kinds = (Kind.EMBEDDING, Kind.MULTI_VECTOR)
    input_checks.need_kind(inference.served.model, kinds, "pooling of `messages`: send `input`")
    return await images.read_all(inference, await body.chats(inference, body.input, http.MAX_INPUTS))


async def _pool(inference: http.HttpInference, body: VllmPoolingRequest, inputs: list[EngineInput]) -> HttpReply:
    if body.encoding_format not in BINARY_FORMATS:
        return await inference.respond(partial(_pooling_job, body, inputs))
    [job] = await inference.jobs([partial(_pooling_job, body, inputs)])
    head = {"id": http.new_id("pool"), "created": http.unix_time(), "model": body.model or inference.served.name}
    head["usage"] = http.usage(job.tokens)
    how = (body.encoding_format, body.embed_dtype, body.endianness)
    rows = list(_rows(job, job.options, inference.served))
    return await inference.dispatcher.off_loop(binary_reply, rows, head, *how)


def _pooling_job(body: VllmPoolingRequest, inputs: list[EngineInput], served: http.ServedModel) -> http.JobSpec:
    input_checks.need_texts(inputs, "input")
    if body.input is not None or not served.model.fused:  # a chat has its own special tokens
        input_checks.need_special_tokens(inputs, body.add_special_tokens)
    output = _output(body.task, served)
    if body.dimensions is not None and output is not Output.DENSE:
        raise http.BadRequest(400, "dimensions: is only for task embed", "dimensions")
    normalize = body.normalize is not False and not body.raw and served.model.kind != Kind.SPARSE
    how: dict[str, Any] = {"raw_scores": body.raw, "pool_factor": body.pool_factor, "dimensions": body.dimensions}
    options = body.options(output, normalize=normalize, **how)

    def encode(job: Job) -> bytes:
        in_base64, big = body.encoding_format == "base64", body.endianness == "big"

        def encoded(values: NDArray[np.float32]) -> Any:
            if not in_base64:
                return http.encoded_vector(values, False)
            typed = converted(values, Precision(body.embed_dtype))
            return http.encoded_vector(typed.byteswap() if big else typed, True)

        data = [
            {"index": row, "object": "pooling", "data": encoded(values)}
            for row, values in enumerate(_rows(job, options, served))
        ]
        return _list("pool", body.model or served.name, data, job.tokens)

    return http.JobSpec(inputs, options, encode)


def _rows(job: Job, options: InferOptions, served: http.ServedModel) -> Any:
    """The pooled output of each input, float32: [width], [labels], [tokens, width] or [tokens, labels]."""
    if served.model.kind == Kind.TOKEN_CLASSIFIER and not options.raw_scores:
        return [probabilities(logits) for logits in job.tokens_of if logits is not None]
    if Output.DENSE in options.outputs:
        return job.vectors
    return job.scores if Output.SCORES in options.outputs else job.multi_vectors or job.tokens_of


def _output(task: Task | None, served: http.ServedModel) -> Output:
    """The output of a task, or of the model where no task is given; raises InvalidInput: the task is not supported."""
    scoring = "scores" in served.model.outputs
    if served.model.kind == Kind.TOKEN_CLASSIFIER:
        if task not in (None, "token_classify"):
            raise InvalidInput(f"task: {task} is not supported by a token classifier")
        return Output.TOKENS
    if task is None:
        task = "classify" if scoring else "token_embed" if served.model.kind == Kind.MULTI_VECTOR else "embed"
    if task == "token_classify":
        raise InvalidInput("task: token classification is not supported by this model")
    if task == "token_embed":
        return Output.MULTI_VECTOR if served.model.kind == Kind.MULTI_VECTOR else Output.TOKENS
    return Output.SCORES if task == "classify" else Output.DENSE


def _list(prefix: str, model: str, data: list[dict[str, Any]], tokens: int) -> bytes:
    return http.to_json(
        {
            "id": http.new_id(prefix),
            "object": "list",
            "created": http.unix_time(),
            "model": model,
            "data": data,
            "usage": http.usage(tokens) | {"completion_tokens": 0},
        }
    )


ROUTES: http.RouteTable = {
    **openai.ROUTES,
    **tokens.VLLM_ROUTES,
    **{("POST", path): _score for path in ("/score", "/v1/score")},
    **{("POST", path): rerank.handler(rerank.VLLM) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("POST", "/classify"): _classify,
    ("POST", "/pooling"): _pooling,
}
