"""vLLM's pooling routes: scores, classes, and whatever a model pools. https://docs.vllm.ai/en/latest/models/pooling_models

What is too long is refused unless `truncate_prompt_tokens` is given, as there: a number of tokens, or -1 for the most
that the model takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.engine.job import Input as EngineInput
from teimgr.errors import InvalidInput
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.dialects import infinity, openai, rerank
from teimgr.worker.dialects.relevance import relevance
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import Body, Input, Texts, engine_inputs
from teimgr.worker.http.common import MOST_INPUTS, Refused, base64_of, named, need_kind, need_texts, now, read, usage
from teimgr.worker.http.inference import CallOptions, HttpHandler, HttpInference, Inference, ServedModel, json_reply
from teimgr.worker.scores import RERANKER

_PAIR_TOKENS = 2  # the most special tokens that join two texts beyond those of one

Text = str | Texts
Task = Literal["embed", "classify", "token_embed", "token_classify"]


class Truncating(Body):
    """What every request of vLLM's may say of length."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, description="cut to so many tokens, -1: to what the model takes; absent: refuse")
    ] = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None

    @property
    def left(self) -> bool:
        """Whether the beginning is cut off."""
        return self.truncation_side == "left"

    def limit(self, served: ServedModel) -> int | None:
        """To how many tokens texts are to be cut before the model cuts them itself; None to none.

        Raises:
            Refused: to none at all.
        """
        tokens = self.truncate_prompt_tokens
        if tokens == 0:
            raise Refused(400, "truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")
        return None if tokens is None or not 0 < tokens < served.model.max_input_length else tokens

    def options(self, output: Output, **more: Any) -> InferOptions:
        """Options for `output`."""
        truncate = self.truncate_prompt_tokens is not None
        return InferOptions(frozenset({output}), truncate=truncate, truncation_left=self.left, **more)


class ScoreRequest(Truncating):
    """One text or as many as there are on the other side, and those they are compared with."""

    queries: Text | None = None
    documents: Text | None = None
    items: Text | None = None
    text_1: Text | None = None
    text_2: Text | None = None
    data_1: Text | None = None
    data_2: Text | None = None
    use_activation: Annotated[bool | None, Field(description="false: logits instead of scores")] = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Both sides, of equal length but where the first is one text.

        Raises:
            Refused: a side is missing, or they do not match.
        """
        first = self._first_of("queries", "text_1", "data_1")
        second = self._first_of("documents", "items", "text_2", "data_2")
        if len(first) not in (1, len(second)):
            raise Refused(400, f"Input lengths must be 1:1, 1:N or N:N, not {len(first)}:{len(second)}")
        return first, second

    def _first_of(self, *names: str) -> list[str]:
        for name in names:
            value: str | list[str] | None = getattr(self, name)
            if value is not None:
                texts = [value] if isinstance(value, str) else value
                need_texts(texts, name)
                return texts
        raise Refused(400, f"{names[0]}: Field required (or {', '.join(names[1:])})", names[0])


class ClassifyRequest(Truncating):
    """Texts or ids to classify. `raw_scores` is Infinity's field: who sends it is answered as Infinity does."""

    input: Input
    use_activation: Annotated[bool | None, Field(description="false: logits instead of probabilities")] = None
    raw_scores: Annotated[bool | None, Field(description="Infinity's: answered in its form")] = None


class PoolingRequest(Truncating):
    """Texts or ids to pool; what comes out is the task's, and where none is named the model's own."""

    input: Input
    task: Task | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool | None = None
    use_activation: bool | None = None


async def _score(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    asked = await read(exchange, request, ScoreRequest)
    queries, documents = asked.sides()
    limit = asked.limit(exchange.served)
    if limit is not None:
        documents = await exchange.dispatcher.off_loop(_fit_pairs, exchange, queries, documents, limit, asked.left)
    found = await relevance(
        exchange,
        queries,
        documents,
        terms,
        truncate=asked.truncate_prompt_tokens is not None,
        raw_scores=asked.use_activation is False,
    )
    data = [{"index": row, "object": "score", "score": score} for row, score in enumerate(found.scores)]
    tokens = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_reply(to_json(_list("score", asked.model or exchange.served.name, data, tokens)))


async def _classify(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    asked = await read(exchange, request, ClassifyRequest)
    if asked.raw_scores is not None:
        return await infinity.classify(exchange, request, terms)
    inputs = await _prepared(exchange, asked, engine_inputs(asked.input))
    [reply] = await exchange.infer([partial(_classification, asked, inputs)], terms)
    return json_reply(reply.payload)


async def _pooling(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    asked = await read(exchange, request, PoolingRequest)
    inputs = await _prepared(exchange, asked, engine_inputs(asked.input))
    [reply] = await exchange.infer([partial(_pooled, asked, inputs)], terms)
    return json_reply(reply.payload)


def _classification(asked: ClassifyRequest, inputs: Sequence[EngineInput], served: ServedModel) -> Inference:
    need_texts(inputs, "input")
    need_kind(served.model, ("classifier", RERANKER), "classification")
    labels = served.model.labels

    def answer(job: Job) -> bytes:
        data = [
            {"index": row, "label": labels[int(scores.argmax())], "probs": scores, "num_classes": len(labels)}
            for row, scores in enumerate(job.scores)
        ]
        return to_json(_list("classify", asked.model or served.name, data, usage(job)))

    options = asked.options(Output.SCORES, raw_scores=asked.use_activation is False)
    return Inference(inputs, options, answer, MOST_INPUTS)


def _pooled(asked: PoolingRequest, inputs: Sequence[EngineInput], served: ServedModel) -> Inference:
    need_texts(inputs, "input")
    output = _output(asked.task, served)
    encode = base64_of if asked.encoding_format == "base64" else _as_it_is

    def answer(job: Job) -> bytes:
        rows = {Output.DENSE: job.vectors, Output.SCORES: job.scores}.get(output)
        found: Any = (job.multi_vectors or job.tokens_of) if rows is None else rows
        data = [{"index": row, "object": "pooling", "data": encode(values)} for row, values in enumerate(found)]
        return to_json(_list("pool", asked.model or served.name, data, usage(job)))

    normalize = asked.normalize is not False and served.model.kind != "sparse"
    options = asked.options(output, normalize=normalize, raw_scores=asked.use_activation is False)
    return Inference(inputs, options, answer, MOST_INPUTS)


def _output(task: Task | None, served: ServedModel) -> Output:
    """What a task is to this model.

    Raises:
        InvalidInput: no model here does the task.
    """
    scoring = "scores" in served.model.outputs
    if task is None:
        task = "classify" if scoring else "token_embed" if served.model.kind == "multi-vector" else "embed"
    if task == "token_classify":
        raise InvalidInput("task: no model here classifies single tokens")
    if task == "token_embed":
        return Output.MULTI_VECTOR if served.model.kind == "multi-vector" else Output.TOKENS
    return Output.SCORES if task == "classify" else Output.DENSE


async def _prepared(exchange: HttpInference, asked: Truncating, inputs: list[EngineInput]) -> list[EngineInput]:
    """The inputs, cut to what the request says."""
    limit = asked.limit(exchange.served)
    if limit is None:
        return inputs
    return await exchange.dispatcher.off_loop(lambda: [_fit(exchange, one, limit, asked.left) for one in inputs])


def _fit(exchange: HttpInference, one: EngineInput, limit: int, left: bool) -> EngineInput:
    """An input that has at most `limit` tokens, special ones and the default prompt included."""
    if isinstance(one, np.ndarray):
        return one[-limit:] if left else one[:limit]
    if not isinstance(one, str) or not one:
        return one
    engine = exchange.dispatcher.engine
    text = engine.cut(one, limit, left=left)
    over = len(engine.tokenize(text, True, None)) - limit
    if over >= limit:
        raise Refused(400, f"truncate_prompt_tokens: {limit} leave no token of the text", "truncate_prompt_tokens")
    return engine.cut(text, limit - over, left=left) if over > 0 else text


def _fit_pairs(
    exchange: HttpInference, queries: Sequence[str], documents: Sequence[str], limit: int, left: bool
) -> list[str]:
    """Documents cut so that each has at most `limit` tokens together with its query."""
    engine = exchange.dispatcher.engine
    taken = [len(engine.tokenize(query, True, None)) + _PAIR_TOKENS for query in queries]
    rooms = [limit - taken[min(row, len(taken) - 1)] for row in range(len(documents))]
    if min(rooms) < 1:
        raise Refused(400, f"truncate_prompt_tokens: {limit} leave no token of a document", "truncate_prompt_tokens")
    return [engine.cut(text, room, left=left) for text, room in zip(documents, rooms, strict=True)]


def _list(prefix: str, model: str, data: list[dict[str, Any]], tokens: dict[str, int]) -> dict[str, Any]:
    return {
        "id": named(prefix),
        "object": "list",
        "created": now(),
        "model": model,
        "data": data,
        "usage": tokens | {"completion_tokens": 0},
    }


def _as_it_is(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values)


ROUTES: dict[tuple[str, str], HttpHandler] = {
    **openai.ROUTES,
    **{("POST", path): _score for path in ("/score", "/v1/score")},
    **{("POST", path): rerank.route(rerank.VLLM) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("POST", "/classify"): _classify,
    ("POST", "/pooling"): _pooling,
}
