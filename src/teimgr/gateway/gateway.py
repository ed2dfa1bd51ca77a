"""The way of an inference request through the daemon: read, named, sent to a worker, its answer passed on."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from teimgr.auth.callers import caller_of
from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.errors import Cancelled, Internal, TeimgrError
from teimgr.gateway.bodies import SMALL_BYTES, Bodies, SlowClient, text_of
from teimgr.gateway.model_names import ModelList, Naming
from teimgr.gateway.paths import CHOICE, DialectPath, paths
from teimgr.http_server import unless_hung_up
from teimgr.observability import catalogue
from teimgr.observability.metrics import Metrics
from teimgr.routing.links import LinkLimits
from teimgr.routing.router import Lease, Router, router_view
from teimgr.wire.error_bodies import failure, refusal
from teimgr.wire.frames import Flag, Method
from teimgr.wire.http_frames import MAX_HEAD_BYTES, HeadTooLong, HttpReply, HttpRequest, read_reply, request_head


class GatewayMetrics:
    """Counts answers by dialect, the worker's route and HTTP status; every label is of a small fixed set."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answered(self, dialect: str, route: str, status: int, seconds: float) -> None:
        """A request got its answer, or the answer that there is none."""
        self._metrics.observe(catalogue.INFERENCE, seconds, dialect, route, str(status))

    def carried(self, dialect: str, request_bytes: int, reply_bytes: int) -> None:
        """Bodies of a request and of its answer went through."""
        self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "in", by=request_bytes)
        self._metrics.count(catalogue.INFERENCE_BYTES, dialect, "out", by=reply_bytes)


log = logging.getLogger(__name__)

# The headers that a dialect may look at.
_HEADERS = ("content-type", "accept", CHOICE)
# Looking for the model in a body beyond this size takes long enough for a thread.
_LONG_LOOK_BYTES = 256 * 1024
# Vectors as JSON are four times the size of what gRPC carries.
_MAX_REPLY_BYTES = 256 * 2**20


class Gateway:
    """Where HTTP clients' inference enters. Follows `directory` by itself; `close` it at the end."""

    def __init__(self, settings: Settings, directory: Directory, metrics: Metrics) -> None:
        self._figures = GatewayMetrics(metrics)
        self._timeout_s = float(settings.inference_timeout_secs) or None
        limit_bytes = min(settings.inference_max_body_mb * 2**20, settings.grpc_max_message_bytes)
        self._bodies = Bodies(limit_bytes)
        self._router = Router(
            LinkLimits(max_message_bytes=limit_bytes + MAX_HEAD_BYTES, max_reply_bytes=_MAX_REPLY_BYTES)
        )
        self.aliases = settings.aliases  # a reload of the configuration changes them
        self.naming = Naming(self._router, lambda: self.aliases)
        self._unsubscribe = directory.subscribe(self._router.update)

    def routes(self) -> list[Route]:
        """A route for each path of each dialect."""
        forwarded = [Route(one.path, partial(self.answer, one), methods=[one.method]) for one in paths()]
        return [*ModelList(self._naming_of).routes(), *forwarded]

    async def answer(self, path: DialectPath, request: Request) -> Response:
        """The worker's answer, or why there is none, in the words of the dialect."""
        path = path.chosen(request.headers.get(CHOICE))
        began = time.perf_counter()
        reply = await self._told(path, request)
        self._figures.answered(path.dialect, path.inner, reply.status, time.perf_counter() - began)
        return Response(reply.body, reply.status, dict(reply.headers))

    async def close(self) -> None:
        """Close the links to the workers; what is in flight fails."""
        self._unsubscribe()
        await self._router.close()

    async def _told(self, path: DialectPath, request: Request) -> HttpReply:
        try:
            return await self._forwarded(path, request)
        except TeimgrError as error:
            return failure(path.dialect, error)
        except HeadTooLong:
            return refusal(path.dialect, 431, "The query and the headers are too long")
        except SlowClient:
            return refusal(path.dialect, 408, "The request body did not come in time")
        except ClientDisconnect:
            return failure(path.dialect, Cancelled("the client hung up"))
        except Exception:
            log.exception("an inference request failed", extra={"path": path.path})
            return failure(path.dialect, Internal("Internal error: the log of the daemon says more"))

    async def _forwarded(self, path: DialectPath, request: Request) -> HttpReply:
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        head = request_head(HttpRequest(path.dialect, request.method, path.inner, request.url.query, headers))
        async with self._bodies.read(request, head) as payload:
            with await self._lease(path, request, payload, len(head)) as lease:
                reply = await unless_hung_up(self._call(lease, payload), request.receive)
            self._figures.carried(path.dialect, len(payload) - len(head), len(reply.body))
            return reply

    async def _lease(self, path: DialectPath, request: Request, payload: bytearray, start: int) -> Lease:
        naming = self._naming_of(request)
        named: dict[str, str] = request.path_params
        if "name" in named:
            return naming.instance(named["name"])
        if "model" in named:
            return naming.lease(named["model"])
        look = partial(text_of, "model", payload, start)
        return naming.lease(await asyncio.to_thread(look) if len(payload) > _LONG_LOOK_BYTES else look())

    def _naming_of(self, request: Request) -> Naming:
        """The names that the caller of `request` may use."""
        return self.naming.of(router_view(caller_of(request.scope), self._router))

    async def _call(self, lease: Lease, payload: bytearray) -> HttpReply:
        flags = Flag.BULK if len(payload) > SMALL_BYTES else Flag.NONE
        reply = await lease.call(Method.HTTP, payload, flags=flags, timeout_s=self._timeout_s)
        return read_reply(reply.payload)
