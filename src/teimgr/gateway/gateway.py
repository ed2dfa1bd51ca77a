"""The inference gateway: each HTTP request is forwarded to a worker of the model it names, its reply passed back.

`paths()` lists the routes with their dialect; bodies are parsed and answers written by the workers
(`worker/dialects/`). Where several products share a path it answers in the form of the first dialect listed. The header
`CHOICE` selects another one, and so does a prefix in a client's base address: `/infinity/classify` is Infinity's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from teimgr.auth.callers import caller_of
from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.errors import Cancelled, Internal, ModelNotFound, TeimgrError
from teimgr.gateway.bodies import SCANNED_BYTES, SMALL_BYTES, Bodies, SlowClient, model_of
from teimgr.gateway.model_names import ModelNames
from teimgr.http_server import unless_hung_up
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.routing.links import LinkLimits
from teimgr.routing.router import Lease, Router, router_view
from teimgr.wire import error_bodies
from teimgr.wire.error_bodies import COHERE, INFINITY, JINA, JSON_TYPE, OPENAI, SIE, TEI, TEI_OPENAI, VLLM
from teimgr.wire.frames import Flag, Method
from teimgr.wire.http_frames import MAX_HEAD_BYTES, HeadTooLong, HttpReply, HttpRequest, read_reply, request_head

log = logging.getLogger(__name__)

CHOICE = "x-teimgr-dialect"
# The request headers that a dialect may read.
_HEADERS = ("content-type", "accept", CHOICE)
# Vectors as JSON are four times the size of what gRPC carries.
_MAX_REPLY_BYTES = 256 * 2**20


class DialectPath(NamedTuple):
    """A route: `path` is Starlette's template, `inner` the path that the worker knows.

    With `{model}` or `{name}` in the template the path names the model or the instance, else the body does. `others`
    are the dialects that may be chosen instead of `dialect`.
    """

    path: str
    dialect: str
    inner: str
    method: str = "POST"
    others: tuple[str, ...] = ()


_SHARED: dict[str, tuple[str, ...]] = {
    "/v1/embeddings": (OPENAI, VLLM),
    "/v1/embed": (COHERE,),
    "/v2/embed": (COHERE,),
    "/v1/rerank": (COHERE, JINA, VLLM),
    "/v2/rerank": (COHERE, VLLM),
    "/rerank": (INFINITY, VLLM),
    "/embeddings": (INFINITY,),
    "/classify": (VLLM, INFINITY),
    "/pooling": (VLLM,),
    "/score": (VLLM,),
    "/v1/score": (VLLM,),
}
_INSTANCE = "/instances/{name}"
_TEI = (
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/tokenize", "/decode"),
    *("/vertex", "/invocations", "/"),
)


def paths() -> Iterator[DialectPath]:
    """All routes of inference."""
    for path, (first, *others) in _SHARED.items():
        yield DialectPath(path, first, path, others=tuple(others))
        for dialect in (first, *others):
            if dialect in (JINA, VLLM, INFINITY):
                yield DialectPath(f"/{dialect}{path}", dialect, path)
    for inner in ("/v1/encode", "/v1/score"):
        yield DialectPath(inner + "/{model:path}", SIE, inner)
    for inner in _TEI:
        yield DialectPath(_INSTANCE + inner, TEI, inner)
    yield DialectPath(_INSTANCE, TEI, "/")
    yield DialectPath(_INSTANCE + "/info", TEI, "/info", "GET")
    for inner in ("/v1/embeddings", "/embeddings"):
        yield DialectPath(_INSTANCE + inner, TEI_OPENAI, inner)


class Gateway:
    """Forwards inference requests to workers. It follows `directory` from its construction to `close`."""

    def __init__(self, settings: Settings, directory: Directory, metrics: DaemonMetrics) -> None:
        self._metrics = metrics
        self._timeout_s = float(settings.inference_timeout_secs) or None
        limit_bytes = min(settings.inference_max_body_mb * 2**20, settings.grpc_max_message_bytes)
        self._bodies = Bodies(limit_bytes)
        self._router = Router(
            LinkLimits(max_message_bytes=limit_bytes + MAX_HEAD_BYTES, max_reply_bytes=_MAX_REPLY_BYTES)
        )
        self.aliases = settings.aliases  # replaced when the configuration is reloaded
        self._names = ModelNames(self._router, lambda: self.aliases)
        self._unsubscribe = directory.subscribe(self._router.update)
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """A route for each path of each dialect, and the list of models."""
        return [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._get_model),
            *(Route(one.path, partial(self._endpoint, one), methods=[one.method]) for one in paths()),
        ]

    async def close(self) -> None:
        """Close the links to the workers; calls in flight fail."""
        self._unsubscribe()
        await self._router.close()

    async def _endpoint(self, path: DialectPath, request: Request) -> Response:
        """The worker's reply, or a failure in the form of the dialect; counted by dialect, route and status."""
        dialect = request.headers.get(CHOICE, path.dialect)
        if dialect not in path.others:
            dialect = path.dialect
        began = time.perf_counter()
        try:
            reply = await self._forward(dialect, path, request)
        except TeimgrError as error:
            reply = error_bodies.failure(dialect, error)
        except HeadTooLong:
            reply = error_bodies.refusal(dialect, 431, "The query and the headers are too long")
        except SlowClient:
            reply = error_bodies.refusal(dialect, 408, "The request body did not come in time")
        except ClientDisconnect:
            reply = error_bodies.failure(dialect, Cancelled("the client hung up"))
        except Exception:
            log.exception("an inference request failed", extra={"path": path.path})
            reply = error_bodies.failure(dialect, Internal("Internal error: see the daemon's log"))
        seconds = time.perf_counter() - began
        self._metrics.observe(catalogue.INFERENCE, seconds, dialect, path.inner, str(reply.status))
        return Response(reply.body, reply.status, dict(reply.headers))

    async def _forward(self, dialect: str, path: DialectPath, request: Request) -> HttpReply:
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        head = request_head(HttpRequest(dialect, request.method, path.inner, request.url.query, headers))
        async with self._bodies.read(request, head) as payload:
            with await self._lease(request, payload, len(head)) as lease:
                flags = Flag.BULK if len(payload) > SMALL_BYTES else Flag.NONE
                call = lease.call(Method.HTTP, payload, flags=flags, timeout_s=self._timeout_s)
                reply = read_reply((await unless_hung_up(call, request.receive)).payload)
            self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "in", by=len(payload) - len(head))
            self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "out", by=len(reply.body))
            return reply

    async def _lease(self, request: Request, payload: bytearray, start: int) -> Lease:
        """A lease on a worker of what the path names, else of the body's `model`."""
        names = self._names_for(request)
        named: dict[str, str] = request.path_params
        if "name" in named:
            return names.lease_instance(named["name"])
        if "model" in named:
            return names.lease(named["model"])
        if len(payload) - start > SCANNED_BYTES:
            return names.lease(await asyncio.to_thread(model_of, payload, start))
        return names.lease(model_of(payload, start))

    def _names_for(self, request: Request) -> ModelNames:
        """The names that the caller of `request` may use."""
        return self._names.restricted(router_view(caller_of(request.scope), self._router))

    async def _list_models(self, request: Request) -> Response:
        names = self._names_for(request)
        cards = [names.card(name, self._since) for name in names.names()]
        return Response(orjson.dumps({"object": "list", "data": cards}), headers=dict(JSON_TYPE))

    async def _get_model(self, request: Request) -> Response:
        names, name = self._names_for(request), request.path_params["model"]
        try:
            names.check(name)
        except ModelNotFound as error:
            reply = error_bodies.failure(OPENAI, error)
            return Response(reply.body, reply.status, dict(reply.headers))
        return Response(orjson.dumps(names.card(name, self._since)), headers=dict(JSON_TYPE))
