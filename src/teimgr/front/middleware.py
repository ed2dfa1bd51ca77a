"""What happens around every REST request, as plain ASGI."""

from __future__ import annotations

import logging
import time
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr import telemetry
from teimgr.errors import InvalidInstanceName, TeimgrError, ValidationError
from teimgr.front.answers import VERBS, error_response
from teimgr.metrics import Metrics
from teimgr.origin import REQUEST_ID, TRACEPARENT, TRACESTATE, Origin, working_for
from teimgr.telemetry import Telemetry

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
        origin = tracer.begin(method, _said(scope), {"http.request.method": method})

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                echoed = (REQUEST_ID.encode(), origin.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), echoed]}
            await send(message)

        with working_for(origin):
            try:
                await self._app(scope, receive, noting)
            finally:
                # A template, or a label of its own: a caller must not be able to make new series.
                route = getattr(scope.get("route"), "path", "unmatched")
                seconds = time.perf_counter() - began
                self._metrics.rest_request(method, route, status, seconds)
                self._end(origin, method, route, status)
                facts = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 3)}
                log.debug("request answered", extra=facts)

    def _end(self, origin: Origin, method: str, route: str, status: int) -> None:
        if self._telemetry.is_on:
            facts: telemetry.Attributes = {"http.route": route, "http.response.status_code": status}
            telemetry.end(origin, facts, f"status {status}" if status >= 500 else None, f"{method} {route}")


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
