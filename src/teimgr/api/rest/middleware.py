"""What each request of REST passes first: metrics, logs and traces; authentication and rights; path checks; HEAD.

As ASGI middleware in this order, with CORS after the first, and as `DirectInference` for small requests of inference,
which does it in one step without ASGI. Who may make which request is decided in `access.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.model_cards import COHERE_CHECKS
from teimgr.api.gateway.routes import DialectPath, dialect_of, paths
from teimgr.api.rest.access import INFERENCE, READS, Access, MatchedRoute
from teimgr.api.rest.error_answers import VERBS, error_response
from teimgr.errors import Forbidden, InvalidInstanceName, TeimgrError, Unauthenticated, ValidationError
from teimgr.http.auth.policy import CALLER, Caller
from teimgr.http.direct import Answer, DirectReply, DirectRequest
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import (
    CURRENT,
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
    Attributes,
    RequestContext,
    Telemetry,
    use_context,
)
from teimgr.wire.error_bodies import COHERE, TEI, TEI_OPENAI, failure

log = logging.getLogger(__name__)

_CONTEXT_HEADERS = [(name.encode(), name) for name in (REQUEST_ID, TRACEPARENT, TRACESTATE)]

PageRefusal = Callable[[Scope, str | None, TeimgrError], Response | None]
"""The answer of the page to a request that was refused, by scope, template of the route and error; None: as REST."""


class Observe:
    """Counts each request by route template and status, with its duration; logs it, traces it, returns its request id.

    Reads have no span: frequent scrapes and probes would fill the traces.
    """

    def __init__(self, app: ASGIApp, metrics: DaemonMetrics, telemetry: Telemetry | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._telemetry = telemetry or Telemetry()
        self._no_telemetry = Telemetry()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = 500, time.perf_counter()
        method = scope["method"] if scope["method"] in (*VERBS, "OPTIONS") else "other"
        context = self.begin(method, dict(reversed(scope["headers"])))

        async def send_with_request_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = (REQUEST_ID.encode(), context.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), request_id]}
            await send(message)

        with use_context(context):
            try:
                await self._app(scope, receive, send_with_request_id)
            finally:
                # The route's template or one fixed label: callers must not be able to create new series.
                self.end(context, method, getattr(scope.get("route"), "path", "unmatched"), status, began)

    def begin(self, method: str, headers: Mapping[bytes, bytes]) -> RequestContext:
        """The context of a request; `end` must follow."""
        given = {name: value.decode("latin-1") for key, name in _CONTEXT_HEADERS if (value := headers.get(key))}
        tracer = self._no_telemetry if method in READS else self._telemetry
        return tracer.begin(method, given, {"http.request.method": method})

    def end(self, context: RequestContext, method: str, route: str, status: int, began: float) -> None:
        """Count, trace and log an answered request; `began` is of `time.perf_counter`."""
        seconds = time.perf_counter() - began
        self._metrics.observe(catalogue.REST_REQUESTS, seconds, method, route, str(status))
        if self._telemetry.is_on:
            attributes: Attributes = {"http.route": route, "http.response.status_code": status}
            error = f"status {status}" if status >= 500 else None
            context.end(attributes, error, f"{method} {route}")
        if log.isEnabledFor(logging.DEBUG):
            fields = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 3)}
            log.debug("request answered", extra=fields)


class HeadAsGet:
    """Routes HEAD as GET; uvicorn, which has the true method, drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)
        as_get = dict(scope, method="GET")
        try:
            await self._app(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")


class RejectEncodedSeparators:
    """Rejects an encoded path separator anywhere below /instances/, and an instance's name that is not UTF-8.

    Routing works on the decoded path, where `a%2Flogs` would be the log of `a`, and every invalid byte is U+FFFD.
    """

    PREFIX = b"/instances/"

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if not raw.startswith(self.PREFIX) or b"%" not in raw:
            return await self._app(scope, receive, send)
        name = unquote(raw.removeprefix(self.PREFIX).partition(b"/")[0].decode("ascii", "replace"))
        error: TeimgrError
        lowered = raw.lower()
        if b"%2f" in lowered or b"%5c" in lowered:
            error = InvalidInstanceName(name, "it cannot contain path separators")
        elif "\ufffd" in name:
            error = ValidationError("Invalid URL: the name of an instance is no UTF-8")
        else:
            return await self._app(scope, receive, send)
        return await error_response(error)(scope, receive, send)


# The routes of inference without parameters, by the target of a request.
_DIRECT = {path.path.encode(): path for path in paths() if path.method == "POST" and "{" not in path.path}

_INFERENCE = MatchedRoute(INFERENCE)

_DIALECTS = {path.path: path.dialect for path in paths()} | dict.fromkeys(COHERE_CHECKS, COHERE)


class Authentication:
    """Has `access` decide about each request, and puts the caller into the scope.

    `refusal` is the page's own answer to a refused request, if it has one.
    """

    def __init__(self, app: ASGIApp, access: Access, refusal: PageRefusal | None = None) -> None:
        self._app = app
        self._access = access
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            scope[CALLER] = self._access.check(scope, first_headers(scope))
        except (Unauthenticated, Forbidden) as error:
            return await self._refuse(error, scope)(scope, receive, send)
        return await self._while_allowed(scope, receive, send)

    async def _while_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; a read, such as followed events or logs, ends when a reload takes its caller's right."""
        if scope["method"] not in READS or (running := asyncio.current_task()) is None:
            return await self._app(scope, receive, send)
        has_started, lost = False, None

        async def noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        def on_reload() -> None:
            nonlocal lost
            try:
                self._access.check(scope, first_headers(scope))
            except (Unauthenticated, Forbidden) as error:
                if lost is None:
                    lost = error
                    running.cancel()

        unsubscribe = self._access.policy.subscribe(on_reload)
        try:
            await self._app(scope, receive, noting_start)
        except asyncio.CancelledError:
            if lost is None or running.uncancel() > 0:
                raise
            if has_started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await self._refuse(lost, scope)(scope, receive, send)
        finally:
            unsubscribe()

    def _refuse(self, error: Unauthenticated | Forbidden, scope: Scope) -> Response:
        template = self._access.route(scope["method"], scope["path"]).template
        shown = self._refusal(scope, template, error) if self._refusal else None
        return shown or _rejection(error, template, scope["path"])


class DirectInference:
    """Answers requests to a route of inference that no web page sent, of callers who have its right.

    All other requests go on to the application. This refuses nothing itself.
    """

    def __init__(self, gateway: Gateway, observe: Observe, access: Access) -> None:
        self._gateway = gateway
        self._observe = observe
        self._access = access

    def __call__(self, request: DirectRequest) -> Answer | None:
        path = _DIRECT.get(request.target)
        if path is None or request.is_of_page:
            return None
        try:
            caller = self._access.check(request.scope, request.headers, _INFERENCE)
        except (Unauthenticated, Forbidden):
            return None
        return partial(self._answer, path, request, caller)

    async def _answer(self, path: DialectPath, request: DirectRequest, caller: Caller) -> DirectReply:
        status, began = 500, time.perf_counter()
        context = self._observe.begin(path.method, request.headers)
        CURRENT.set(context)
        try:
            reply = await self._gateway.answer(path, request.headers, request.body, caller)
            status = reply.status
        finally:
            self._observe.end(context, path.method, path.path, status, began)
        return DirectReply(status, {**reply.headers, REQUEST_ID: context.request_id}, reply.body)


def first_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of a request, the first of several of a name."""
    return dict(reversed(scope["headers"]))


def _rejection(error: TeimgrError, template: str | None, path: str) -> Response:
    dialect = _DIALECTS.get(template or "") or dialect_of(path)
    if dialect is None:
        response = error_response(error)
        if isinstance(error, Unauthenticated):
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    if dialect in (TEI, TEI_OPENAI) and isinstance(error, Unauthenticated):
        return Response(status_code=401)  # without a body, as TEI
    reply = failure(dialect, error)
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
