"""What happens around every REST request, as plain ASGI."""

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
from teimgr.observability.metrics import Metrics
from teimgr.observability.request_context import REQUEST_ID, TRACEPARENT, TRACESTATE, RequestContext, use_context
from teimgr.observability.telemetry import Telemetry
from teimgr.rest.json_http import VERBS, error_response
from teimgr.rest.permissions import Rights, dialect_of
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure

log = logging.getLogger(__name__)

READS = ("GET", "HEAD", "OPTIONS")
_ORIGINS = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})


class Observe:
    """Count each request by route template and status, with its duration; log it, trace it, echo its request id.

    Reading has no span: who scrapes and probes every few seconds would fill the traces.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, telemetry: Telemetry | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._telemetry = telemetry or Telemetry()
        self._silent = Telemetry()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note what came of it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = 500, time.perf_counter()
        method = scope["method"] if scope["method"] in (*VERBS, "OPTIONS") else "other"
        reads = method in READS
        tracer = self._silent if reads else self._telemetry
        context = tracer.begin(method, _said(scope), {"http.request.method": method})

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                echoed = (REQUEST_ID.encode(), context.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), echoed]}
            await send(message)

        with use_context(context):
            try:
                await self._app(scope, receive, noting)
            finally:
                # A template, or a label of its own: a caller must not be able to make new series.
                route = getattr(scope.get("route"), "path", "unmatched")
                seconds = time.perf_counter() - began
                self._metrics.rest_request(method, route, status, seconds)
                self._end(context, method, route, status)
                facts = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 3)}
                log.debug("request answered", extra=facts)

    def _end(self, context: RequestContext, method: str, route: str, status: int) -> None:
        if self._telemetry.is_on:
            facts: telemetry.Attributes = {"http.route": route, "http.response.status_code": status}
            telemetry.end(context, facts, f"status {status}" if status >= 500 else None, f"{method} {route}")


def _said(scope: Scope) -> dict[str, str]:
    """What the headers say of where the request comes from."""
    return {
        name: value.decode("latin-1") for key, value in scope["headers"] if (name := key.decode("latin-1")) in _ORIGINS
    }


class HeadAsGet:
    """Route HEAD as GET; the server keeps the body back, for it knows the true method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)
        as_get = dict(scope, method="GET")
        try:
            await self._app(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")


class WholeNames:
    """Refuse an encoded path separator in an instance's name, and a name that is no UTF-8.

    Routing sees the decoded path, where `a%2Flogs` would be the log of `a`, and any wrong byte the same sign.
    """

    PREFIX = b"/instances/"

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        raw: bytes = scope.get("raw_path") or b""
        if not raw.startswith(self.PREFIX) or b"%" not in raw:
            return await self._app(scope, receive, send)
        name = unquote(raw.removeprefix(self.PREFIX).partition(b"/")[0].decode("ascii", "replace"))
        refused: TeimgrError
        lowered = raw.lower()
        if b"%2f" in lowered or b"%5c" in lowered:
            refused = InvalidInstanceName(name, "it cannot contain path separators")
        elif "\ufffd" in name:
            refused = ValidationError("Invalid URL: the name of an instance is no UTF-8")
        else:
            return await self._app(scope, receive, send)
        return await error_response(refused)(scope, receive, send)


_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Gate:
    """Lets a request in whose caller the policy knows and who has the right that its route asks for."""

    def __init__(self, app: ASGIApp, policy: PolicyInForce, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._policy = policy
        self._rights = Rights(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller in the scope, or refuse it."""
        policy = self._policy.now
        if scope["type"] != "http" or policy.is_open:
            return await self._app(scope, receive, send)
        found = self._rights.of(scope["method"], scope["path"], policy)
        if not found.need.is_public:
            try:
                scope[CALLER] = caller = authenticate_request(policy, scope)
                found.check(caller)
            except (Unauthenticated, Forbidden) as error:
                return await _refused(error, found.template)(scope, receive, send)
        return await self._app(scope, receive, send)


def _refused(error: TeimgrError, template: str | None) -> Response:
    dialect = dialect_of(template)
    if dialect is None:
        response = error_response(error)
        if isinstance(error, Unauthenticated):
            response.headers.update(_CHALLENGE)
        return response
    if dialect in (TEI, TEI_OPENAI) and isinstance(error, Unauthenticated):
        return Response(status_code=401)  # TEI has no body for it
    reply = failure(dialect, error)
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
