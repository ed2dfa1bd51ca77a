"""ASGI middleware of REST: metrics, logging and traces; HEAD; path checks; authentication and authorisation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from urllib.parse import unquote

from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.auth.callers import CALLER, authenticate_request
from teimgr.auth.policy import PolicyInForce
from teimgr.errors import Forbidden, InvalidInstanceName, TeimgrError, Unauthenticated, ValidationError
from teimgr.observability import telemetry
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import REQUEST_ID, TRACEPARENT, TRACESTATE, use_context
from teimgr.observability.telemetry import Telemetry
from teimgr.rest.json_http import VERBS, error_response
from teimgr.rest.permissions import RoutePermissions, dialect_of
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure

log = logging.getLogger(__name__)

READS = ("GET", "HEAD", "OPTIONS")
_CONTEXT_HEADERS = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})


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
        tracer = self._no_telemetry if method in READS else self._telemetry
        headers = {
            name: value.decode("latin-1")
            for key, value in scope["headers"]
            if (name := key.decode("latin-1")) in _CONTEXT_HEADERS
        }
        context = tracer.begin(method, headers, {"http.request.method": method})

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
                route = getattr(scope.get("route"), "path", "unmatched")
                seconds = time.perf_counter() - began
                self._metrics.rest_request(method, route, status, seconds)
                if self._telemetry.is_on:
                    attributes: telemetry.Attributes = {"http.route": route, "http.response.status_code": status}
                    error = f"status {status}" if status >= 500 else None
                    telemetry.end(context, attributes, error, f"{method} {route}")
                fields = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 3)}
                log.debug("request answered", extra=fields)


class HeadAsGet:
    """Routes HEAD as GET; the server, which knows the true method, drops the body."""

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
    """Rejects an encoded path separator in an instance's name, and a name that is not UTF-8.

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


class Authentication:
    """Authenticates the caller and checks the right that the route requires; puts the caller into the scope."""

    def __init__(self, app: ASGIApp, policy: PolicyInForce, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._policy = policy
        self._permissions = RoutePermissions(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = self._policy.now
        if scope["type"] != "http" or policy.is_open:
            return await self._app(scope, receive, send)
        route = self._permissions.of(scope["method"], scope["path"], policy)
        if not route.permission.is_public:
            try:
                scope[CALLER] = caller = authenticate_request(policy, scope)
                route.check(caller)
            except (Unauthenticated, Forbidden) as error:
                return await _rejection(error, route.template)(scope, receive, send)
        return await self._app(scope, receive, send)


def _rejection(error: TeimgrError, template: str | None) -> Response:
    dialect = dialect_of(template)
    if dialect is None:
        response = error_response(error)
        if isinstance(error, Unauthenticated):
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    if dialect in (TEI, TEI_OPENAI) and isinstance(error, Unauthenticated):
        return Response(status_code=401)  # without a body, as TEI
    reply = failure(dialect, error)
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
