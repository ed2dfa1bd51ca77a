"""What each request of REST passes first: metrics, logs and traces; authentication and rights; path checks; HEAD.

As ASGI middleware in this order, with CORS after the first. Requests of inference do not come here (`inference.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.api.gateway.model_cards import COHERE_CHECKS
from teimgr.api.gateway.routes import INFO, dialect_of
from teimgr.api.rest.access import READS, Access
from teimgr.api.rest.error_answers import VERBS, error_response
from teimgr.errors import Forbidden, InvalidInstanceName, TeimgrError, Unauthenticated, ValidationError
from teimgr.http.auth.policy import CALLER
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import (
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
    Attributes,
    RequestContext,
    Telemetry,
    ordered_by,
    use_context,
)
from teimgr.wire.error_bodies import COHERE, TEI, TEI_OPENAI, failure
from teimgr.wire.frames import HttpReply

log = logging.getLogger(__name__)
audit = logging.getLogger("teimgr.audit")
_PATH_CHARS = 256

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
        if error := path_fault(scope.get("raw_path") or b""):
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)


def path_fault(raw: bytes) -> TeimgrError | None:
    """Why a path as it was sent is not valid (`RejectEncodedSeparators`); None if it is."""
    if not raw.startswith(RejectEncodedSeparators.PREFIX) or b"%" not in raw:
        return None
    name = unquote(raw.removeprefix(RejectEncodedSeparators.PREFIX).partition(b"/")[0].decode("ascii", "replace"))
    lowered = raw.lower()
    if b"%2f" in lowered or b"%5c" in lowered:
        return InvalidInstanceName(name, "it cannot contain path separators")
    if "\ufffd" in name:
        return ValidationError("Invalid URL: the name of an instance is no UTF-8")
    return None


_DIALECTS = {INFO.path: INFO.dialect} | dict.fromkeys(COHERE_CHECKS, COHERE)


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
        if scope["method"] not in READS:
            return await self._audited(scope, receive, send)
        return await self._while_allowed(scope, receive, send)

    async def _audited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, with who has ordered the change; log one line of it with its outcome."""
        status, by = 500, self._access.who(scope, first_headers(scope))

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with ordered_by(by):
            try:
                await self._app(scope, receive, noting_status)
            finally:
                facts = {"method": scope["method"], "path": scope["path"][:_PATH_CHARS], "status": status, "by": by}
                audit.info("change", extra=facts)

    async def _while_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a read; followed events or logs end when a reload takes their caller's right."""
        if (running := asyncio.current_task()) is None:
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


def first_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of a request, the first of several of a name."""
    return dict(reversed(scope["headers"]))


def refused(dialect: str, error: TeimgrError) -> HttpReply:
    """A refusal in the form of a dialect."""
    if dialect in (TEI, TEI_OPENAI) and isinstance(error, Unauthenticated):
        return HttpReply(401, {}, b"")  # as TEI
    return failure(dialect, error)


def _rejection(error: Unauthenticated | Forbidden, template: str | None, path: str) -> Response:
    dialect = _DIALECTS.get(template or "") or dialect_of(path)
    if dialect is None:
        response = error_response(error)
        if isinstance(error, Unauthenticated):
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    reply = refused(dialect, error)
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
