"""The routes of an instance's port: the tables say which, the methods how each shape of them is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from teimgr.docs_page import HEADERS, page
from teimgr.errors import Code, TeimgrError, Unavailable
from teimgr.wire.status import STATUS
from teimgr.worker.desk import Desk, masked
from teimgr.worker.instance_port.exchange import Exchange
from teimgr.worker.tei import requests, tokens, vertex
from teimgr.worker.tei.answers import to_json
from teimgr.worker.tei.errors import error_body
from teimgr.worker.tei.fields import JSON, BodyRefused
from teimgr.worker.tei.inference import InferenceRequest
from teimgr.worker.tei.info import info
from teimgr.worker.tei.openapi import document

INFERENCE: dict[str, type[InferenceRequest]] = {
    "/embed": requests.EmbedRequest,
    "/embed_all": requests.EmbedAllRequest,
    "/embed_sparse": requests.EmbedSparseRequest,
    "/predict": requests.PredictRequest,
    "/rerank": requests.RerankRequest,
    "/similarity": requests.SimilarityRequest,
}
TOKENIZER: dict[str, type[tokens.TokenizerRequest]] = {
    "/tokenize": tokens.TokenizeRequest,
    "/decode": tokens.DecodeRequest,
}
OPENAI = ("/v1/embeddings", "/embeddings")

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[TeimgrError], bytes]

_HEALTH_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_TRY_AGAIN = (429, 503)


class Routes:
    """What each route answers; the methods that take a class of bodies make an endpoint for it."""

    def __init__(self, desk: Desk, exchange: Exchange) -> None:
        self._desk = desk
        self._exchange = exchange

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the known text went through the device."""
        try:
            await asyncio.to_thread(self._desk.engine.prove, _HEALTH_TIMEOUT_S)
        except Unavailable:
            return _failure(Unavailable("unhealthy"), error_body)
        return Response()

    async def info(self, request: Request) -> Response:
        """The model and the limits."""
        return _json(to_json(info(self._exchange.served)))

    async def metrics(self, request: Request) -> Response:
        """The `te_*` metrics."""
        return Response(self._desk.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return _json(to_json(document()))

    async def docs(self, request: Request) -> Response:
        """The same for readers."""
        return HTMLResponse(page(document(), "/api-doc/openapi.json"), headers=HEADERS)

    def inference(self, kind: type[InferenceRequest], say: ErrorBody = error_body) -> Endpoint:
        """One inference, answered with its cost in the headers."""

        async def answer(request: Request) -> Response:
            asked = await self._exchange.read(request, kind)
            [reply] = await self._exchange.infer([asked], request)
            assert reply.timings is not None
            return _json(reply.payload, reply.timings.headers())

        return _answered(answer, say)

    def vertex(self) -> Endpoint:
        """Any number of inferences, each with a permit of its own."""

        async def answer(request: Request) -> Response:
            asked = await self._exchange.read(request, vertex.VertexRequest)
            replies = await self._exchange.infer(asked.requests(self._exchange.served.model), request)
            return _json(vertex.predictions([reply.payload for reply in replies]))

        return _answered(answer, error_body)

    def tokenizer(self, kind: type[tokens.TokenizerRequest]) -> Endpoint:
        """What needs neither a permit nor the device."""

        async def answer(request: Request) -> Response:
            asked = await self._exchange.read(request, kind)
            limit = self._desk.spec.max_client_batch_size
            try:
                return _json(await self._desk.off_loop(asked.answer, self._desk.engine, limit))
            except TeimgrError as error:
                self._desk.metrics.failed(error)
                raise

        return _answered(answer, error_body)


def _answered(answer: Endpoint, say: ErrorBody) -> Endpoint:
    """`answer`, and for each way in which it may fail the response that says so."""

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except TeimgrError as error:
            return _failure(error, say)
        except BodyRefused as refused:
            return Response(refused.text, refused.status, media_type=_TEXT)
        except ClientDisconnect:  # it still sent its body; uvicorn throws the answer away
            return Response(status_code=STATUS[Code.CANCELLED].http)
        except Exception as error:
            return _failure(masked(error), say)

    return endpoint


def _failure(error: TeimgrError, say: ErrorBody) -> Response:
    status = STATUS[error.code].http
    return _json(say(error), {"Retry-After": "1"} if status in _TRY_AGAIN else None, status)


def _json(body: bytes, headers: dict[str, Any] | None = None, status: int = 200) -> Response:
    return Response(body, status, headers, JSON)
