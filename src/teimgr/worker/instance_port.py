"""The instance's own HTTP port, speaking TEI: `/embed`, `/info`, `/health`, `/metrics`.

Bodies, statuses, headers and texts are those of Text Embeddings Inference 1.9.3.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from teimgr import __version__
from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.errors import Cancelled, Code, EmptyInput, InvalidInput, Overloaded, TeimgrError, Unavailable
from teimgr.wire.status import STATUS
from teimgr.worker.calls import Call, Reply
from teimgr.worker.desk import Desk
from teimgr.worker.metrics import TeiMetrics
from teimgr.worker.tei_body import BodyRefused, EmbedBody, read_body

# A call of more texts than this is bulk work, whoever waits for it.
_INTERACTIVE_TEXTS = 4
_HEALTH_TIMEOUT_S = 5.0


class HttpCall(Call):
    """A request of the instance port, answered through a future."""

    __slots__ = ("future",)

    def __init__(self, size_bytes: int, lane: Lane) -> None:
        super().__init__(size_bytes, lane)
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def reply(self, reply: Reply) -> None:
        """Let the handler go on."""
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: TeimgrError) -> None:
        """Let the handler raise."""
        if not self.future.done():
            self.future.set_exception(error)


def create_app(desk: Desk) -> FastAPI:
    """The routes of the instance port over one desk."""
    app = FastAPI(title=f"teimgr instance {desk.spec.name}", version=__version__, docs_url=None, redoc_url=None)
    routes = Routes(desk)
    for path in ("/", "/health", "/ping"):
        app.add_api_route(path, routes.health, methods=["GET", "HEAD"], response_class=Response)
    app.add_api_route("/info", routes.info, methods=["GET", "HEAD"], response_class=Response)
    app.add_api_route("/metrics", routes.metrics, methods=["GET", "HEAD"], response_class=Response)
    app.add_api_route("/embed", routes.embed, methods=["POST"], response_class=Response)
    app.add_exception_handler(TeimgrError, _tei_error)
    app.add_exception_handler(BodyRefused, _refused_body)
    app.add_exception_handler(HTTPException, _without_a_body)
    app.add_exception_handler(ClientDisconnect, _nobody_listens)
    return app


def metrics_app(metrics: TeiMetrics) -> FastAPI:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer(path: str) -> Response:
        text = "OK" if path == "health" else metrics.render()
        return Response(text, media_type="text/plain; charset=utf-8")

    app.add_api_route("/{path:path}", answer, methods=["GET", "HEAD"], response_class=Response)
    return app


class Routes:
    """One method per route."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def health(self) -> Response:
        """200 with an empty body once the known text went through the device."""
        try:
            await asyncio.to_thread(self._desk.engine.prove, _HEALTH_TIMEOUT_S)
        except Unavailable as error:
            raise Unavailable("unhealthy") from error
        return Response()

    async def info(self) -> Response:
        """What TEI's `/info` says, in its order, and teimgr's own facts after it."""
        spec, model = self._desk.spec, self._desk.engine.info
        return _json(
            {
                "model_id": model.model_id,
                "model_sha": model.model_sha,
                "model_dtype": model.dtype,
                "served_model_name": spec.served_model_name or model.model_id,
                "model_type": {"embedding": {"pooling": model.pooling}},
                "max_concurrent_requests": spec.max_concurrent_requests,
                "max_input_length": model.max_input_length,
                "max_batch_tokens": model.max_batch_tokens,
                "max_batch_requests": spec.max_batch_requests,
                "max_client_batch_size": spec.max_client_batch_size,
                "auto_truncate": spec.auto_truncate,
                "tokenization_workers": model.tokenization_workers,
                "version": __version__,
                "sha": None,
                "docker_label": None,
                "dimension": model.dimension,
                "device": model.device,
                "batching": model.batching,
                "prompts": list(model.prompts),
            }
        )

    async def metrics(self) -> Response:
        """The `te_*` metrics."""
        return Response(self._desk.metrics.render(), media_type="text/plain; charset=utf-8")

    async def embed(self, request: Request) -> Response:
        """Dense vectors, always a list of lists."""
        body = await read_body(request, EmbedBody, self._desk.spec.payload_limit_bytes)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        self._check_count(len(texts))
        options = InferOptions(
            truncate=self._desk.spec.auto_truncate if body.truncate is None else body.truncate,
            truncation_left=body.truncation_direction.lower() == "left",
            prompt_name=body.prompt_name,
            normalize=body.normalize,
            dimensions=body.dimensions,
        )
        lane = Lane.INTERACTIVE if len(texts) <= _INTERACTIVE_TEXTS else Lane.BULK
        call = HttpCall(sum(map(len, texts)), lane)
        self._desk.enter(call, lambda: self._desk.infer(call, texts, options, partial(_vectors, call)))
        reply = await self._answered(call, request)
        assert reply.timings is not None
        return Response(reply.payload, media_type="application/json", headers=reply.timings.headers())

    async def _answered(self, call: HttpCall, request: Request) -> Reply:
        """The reply to `call`; it is cancelled when its client hangs up.

        Raises:
            TeimgrError: what it was answered with; Cancelled when nobody will read the answer.
        """
        hung_up = asyncio.ensure_future(_hung_up(request))
        either: set[asyncio.Future[Any]] = {call.future, hung_up}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if call.future.done():
                return call.future.result()
            raise Cancelled("the client hung up")
        finally:
            hung_up.cancel()
            self._desk.cancel(call)

    def _check_count(self, texts: int) -> None:
        self._desk.metrics.received(texts)
        limit = self._desk.spec.max_client_batch_size
        if not texts:
            self._desk.metrics.failed(EmptyInput())
            raise EmptyInput
        if texts > limit:
            self._desk.metrics.batch_too_large()
            raise InvalidInput(f"batch size {texts} > maximum allowed batch size {limit}")


async def _hung_up(request: Request) -> None:
    """Return when the client of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _vectors(call: Call, job: Job) -> Reply:
    if job.errors:
        raise job.errors[min(job.errors)]
    return Reply(orjson.dumps(job.vectors, option=orjson.OPT_SERIALIZE_NUMPY), call.timings(job))


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


async def _tei_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TeimgrError)
    status = STATUS[error.code]
    body = orjson.dumps({"error": error.message, "error_type": status.tei})
    headers = {"Retry-After": "1"} if isinstance(error, Overloaded) else {}
    return Response(body, status.http, headers, "application/json")


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    """The client went away while it still sent its body; uvicorn throws the answer away."""
    return Response(status_code=STATUS[Code.CANCELLED].http)


async def _refused_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, BodyRefused)
    return Response(error.text, error.status, media_type="text/plain; charset=utf-8")
