"""TEI's routes without a transport: what each path does with a body, on an instance's own port and on the daemon's."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from teimgr.errors import TeimgrError
from teimgr.wire.error_bodies import JSON_TYPE
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.exchange import Exchange, Terms
from teimgr.worker.tei import requests, tokens, vertex
from teimgr.worker.tei.answers import to_json
from teimgr.worker.tei.fields import Body, BodyRefused, expect_json, parse
from teimgr.worker.tei.inference import InferenceRequest
from teimgr.worker.tei.info import info
from teimgr.worker.tei.openai import OpenAICompatRequest

BodyT = TypeVar("BodyT", bound=Body)
Route = Callable[[Exchange, HttpRequest, Terms], Coroutine[Any, Any, HttpReply]]

# A body beyond this size is parsed on a codec thread; the loop serves others meanwhile.
LARGE_BODY_BYTES = 128 * 1024

INFERENCE: Mapping[str, type[InferenceRequest]] = {
    "/embed": requests.EmbedRequest,
    "/embed_all": requests.EmbedAllRequest,
    "/embed_sparse": requests.EmbedSparseRequest,
    "/predict": requests.PredictRequest,
    "/rerank": requests.RerankRequest,
    "/similarity": requests.SimilarityRequest,
    "/v1/embeddings": OpenAICompatRequest,
    "/embeddings": OpenAICompatRequest,
}
TOKENIZER: Mapping[str, type[tokens.TokenizerRequest]] = {
    "/tokenize": tokens.TokenizeRequest,
    "/decode": tokens.DecodeRequest,
}
# Whose failures have OpenAI's fields.
OPENAI = ("/v1/embeddings", "/embeddings")
DEFAULT_TASK = ("/", "/invocations")


def json_reply(body: bytes, headers: Mapping[str, str] | None = None) -> HttpReply:
    """200 with a body of JSON."""
    return HttpReply(200, {**JSON_TYPE, **(headers or {})}, body)


def inference(kind: Callable[[Exchange], type[InferenceRequest]]) -> Route:
    """One inference, answered with its cost in the headers."""

    async def answer(exchange: Exchange, request: HttpRequest, terms: Terms) -> HttpReply:
        asked = await _read(exchange, request, kind(exchange))
        [reply] = await exchange.infer([asked.inference], terms)
        assert reply.timings is not None
        return json_reply(reply.payload, reply.timings.headers())

    return answer


def tokenizer(kind: type[tokens.TokenizerRequest]) -> Route:
    """What needs neither a permit nor the device."""

    async def answer(exchange: Exchange, request: HttpRequest, terms: Terms) -> HttpReply:
        asked = await _read(exchange, request, kind)
        desk = exchange.desk
        try:
            return json_reply(await desk.off_loop(asked.answer, desk.engine, desk.spec.max_client_batch_size))
        except TeimgrError as error:
            desk.metrics.failed(error)
            raise

    return answer


async def several(exchange: Exchange, request: HttpRequest, terms: Terms) -> HttpReply:
    """`/vertex`: any number of inferences, each with a permit of its own."""
    asked = await _read(exchange, request, vertex.VertexRequest)
    inferences = [one.inference for one in asked.requests(exchange.served.model)]
    replies = await exchange.infer(inferences, terms)
    return json_reply(vertex.predictions([reply.payload for reply in replies]))


async def facts(exchange: Exchange, request: HttpRequest, terms: Terms) -> HttpReply:
    """`/info`: the model and the limits."""
    return json_reply(to_json(info(exchange.served)))


def refused(error: BodyRefused) -> HttpReply:
    """What is told of a body that cannot be read: a sentence in plain text, as TEI's framework does."""
    return HttpReply(error.status, {"content-type": "text/plain; charset=utf-8"}, error.text.encode())


async def _read(exchange: Exchange, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """The request's body.

    Raises:
        BodyRefused: it is not said to be JSON, or is no `kind`.
    """
    expect_json(request.headers.get("content-type", ""))
    if len(request.body) > LARGE_BODY_BYTES:
        return await exchange.desk.off_loop(parse, kind, request.body)
    return parse(kind, request.body)


def _always(kind: type[InferenceRequest]) -> Callable[[Exchange], type[InferenceRequest]]:
    return lambda exchange: kind


def _default_task(exchange: Exchange) -> type[InferenceRequest]:
    """What a request asks for that names no task; the environment's `TASK` is how Hugging Face's endpoints say it."""
    kind = exchange.served.model.kind
    if kind == "embedding" and os.environ.get("TASK") == "sentence-similarity":
        return requests.SimilarityRequest
    return requests.REQUEST_OF_KIND[kind]


POST: Mapping[str, Route] = {
    **{path: inference(_always(kind)) for path, kind in INFERENCE.items()},
    **{path: tokenizer(kind) for path, kind in TOKENIZER.items()},
    **{path: inference(_default_task) for path in DEFAULT_TASK},
    "/vertex": several,
}
GET: Mapping[str, Route] = {"/info": facts}
