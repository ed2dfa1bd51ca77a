"""ASGI middleware of REST: proxies' headers, metrics, logs, traces, authentication, URLs, HEAD.

`app.py` has the order. Inference requests bypass it (`app.Inference`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from teimgr.api.gateway.model_cards import COHERE_CHECKS
from teimgr.api.gateway.routes import INFO, dialect_of
from teimgr.api.rest.access import MAX_PATH_BYTES, READS, Access
from teimgr.api.rest.error_answers import VERBS, error_response, in_dialect
from teimgr.config.settings import Settings
from teimgr.errors import (
    Forbidden,
    InvalidConfig,
    InvalidInstanceName,
    Replaced,
    TeimgrError,
    Unauthenticated,
    ValidationError,
)
from teimgr.http.auth.policy import CALLER
from teimgr.http.bodies import PATH_PREFIX
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
from teimgr.spec import path_prefix
from teimgr.wire.error_bodies import COHERE, TEI, TEI_OPENAI, failure
from teimgr.wire.frames import HttpReply

# A request's target has room for 30,000 parameters, and parsing takes about 5 µs each.
MAX_PARAMETERS = 1000


def has_too_many(query: bytes) -> bool:
    """True if a query has more than `MAX_PARAMETERS` parameters."""
    return query.count(b"&") >= MAX_PARAMETERS


class LimitQuery:
    """Refuses requests whose query has more than `MAX_PARAMETERS` parameters, before anything parses it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and has_too_many(scope["query_string"]):
            error = ValidationError(f"Invalid URL: its query has more than {MAX_PARAMETERS} parameters")
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)


log = logging.getLogger(__name__)
audit = logging.getLogger("teimgr.audit")
_PATH_CHARS = 256

_CONTEXT_HEADERS = [(name.encode(), name) for name in (REQUEST_ID, TRACEPARENT, TRACESTATE)]

PageRefusal = Callable[[Scope, str | None, TeimgrError], Awaitable[Response | None]]
"""Returns the page's reply to a refused request (scope, route template, error), or None for the REST error body."""


class Observe:
    """Counts, logs and traces each request and returns its request id. Metrics are by route template and status.

    Reads have no span, since frequent scrapes and probes would fill the traces.
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
                # Never the path, so that callers cannot create new series.
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
    """Routes HEAD as GET; uvicorn drops the body."""

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
    """Rejects paths longer than `MAX_PATH_BYTES`, encoded path separators below /instances/, and names of instances
    that are not UTF-8.

    Routing uses the decoded path, where `a%2Flogs` would be the log of `a`, and each invalid byte is U+FFFD.
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
    if len(raw) > MAX_PATH_BYTES:
        return ValidationError(f"Invalid URL: its path has {len(raw)} bytes, more than {MAX_PATH_BYTES}")
    if not raw.startswith(RejectEncodedSeparators.PREFIX) or b"%" not in raw:
        return None
    name = unquote(raw.removeprefix(RejectEncodedSeparators.PREFIX).partition(b"/")[0].decode("ascii", "replace"))
    lowered = raw.lower()
    if b"%2f" in lowered or b"%5c" in lowered:
        return InvalidInstanceName(name, "it cannot contain path separators")
    if "\ufffd" in name:
        return ValidationError("Invalid URL: the name of an instance is not UTF-8")
    return None


_DIALECTS = {INFO.path: INFO.dialect} | dict.fromkeys(COHERE_CHECKS, COHERE)


class Authentication:
    """Authenticates each request with `access` and puts the caller into the scope.

    `refusal` makes the page's reply to a refused request.
    """

    def __init__(self, app: ASGIApp, access: Access, refusal: PageRefusal | None = None) -> None:
        self._app = app
        self._access = access
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            caller = scope[CALLER] = self._access.check(scope, first_headers(scope))
            self._access.remember(scope, caller)
        except (Unauthenticated, Forbidden) as error:
            return await (await self._refuse(error, scope))(scope, receive, send)
        if scope["method"] not in READS:
            return await self._audited(scope, receive, send)
        return await self._while_allowed(scope, receive, send)

    async def _audited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application in the name of the caller who ordered the change; log one line with the outcome."""
        status, by = 500, self._access.who(scope, first_headers(scope))

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def checked_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":  # the daemon may have been replaced while the body arrived
                self._access.check_command(scope)
            return message

        with ordered_by(by):
            try:
                self._access.check_command(scope)
                await self._app(scope, checked_receive, noting_status)
            except Replaced as error:
                await in_dialect(scope["path"], error)(scope, receive, noting_status)
            finally:
                facts = {"method": scope["method"], "path": scope["path"][:_PATH_CHARS], "status": status, "by": by}
                audit.info("change", extra=facts)

    async def _while_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a read; followed events or logs end if a reload revokes their caller's right."""
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
                await (await self._refuse(lost, scope))(scope, receive, send)
        finally:
            unsubscribe()

    async def _refuse(self, error: Unauthenticated | Forbidden, scope: Scope) -> Response:
        template = self._access.route(scope["method"], scope["path"]).template
        shown = await self._refusal(scope, template, error) if self._refusal else None
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


_HEADER = b"x-forwarded-prefix"
# A cookie depends on the prefix, which may be configured.
_OF_CALLERS = frozenset((b"x-forwarded-for", b"x-forwarded-proto", _HEADER, b"cookie"))
_UNIX = "unix"
_LINKS = (b"location", b"link")


class TrustedProxies:
    """Applies `X-Forwarded-For`, `-Proto` and `-Prefix` from `trusted_proxies`; ignores them from others."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._trust(settings().trusted_proxies)

    def _trust(self, proxies: Sequence[str]) -> None:
        self._proxies = proxies
        self._addresses = ProxyHeadersMiddleware(_nothing, _with_mapped(proxies))

    def concerns(self, headers: Mapping[bytes, bytes]) -> bool:
        """True if `read` may change the client, the scheme or the path prefix of a request with these headers."""
        return not _OF_CALLERS.isdisjoint(headers)

    async def read(self, scope: MutableMapping[str, Any]) -> str:
        """Put the client, the scheme and the path prefix (`path_prefix_of`) into the scope; the result is the prefix.

        The prefix is that of a proxy, else `root_path`. Proxies in a row append theirs: `/ai, /teimgr` is `/ai/teimgr`.

        Raises:
            ValidationError: the prefix is not valid.
        """
        settings = self._settings()
        if settings.trusted_proxies != self._proxies:
            self._trust(settings.trusted_proxies)
        if scope.get("client") is None and (scope.get("server") or ("", 0))[1] is None:
            scope["client"] = (_UNIX, 0)
        prefix = settings.root_path
        given = [value for name, value in scope["headers"] if name == _HEADER]
        if given and self._is_trusted(scope):
            parts = b",".join(given).decode("latin-1").split(",")
            prefix = "".join(part.strip().removesuffix("/") for part in parts)
        try:
            scope[PATH_PREFIX] = prefix = path_prefix(prefix)
        except InvalidConfig as error:
            raise ValidationError(f"X-Forwarded-Prefix: {error.message}") from None
        await self._addresses(scope, _nothing, _nothing)  # type: ignore[arg-type]
        return prefix

    def _is_trusted(self, scope: MutableMapping[str, Any]) -> bool:
        client = scope.get("client")
        return (client[0] if client else None) in self._addresses.trusted_hosts


async def _nothing(*_: Any) -> None:
    pass


class ProxyHeaders:
    """Middleware that applies `proxies` to the scope and adds the prefix to paths in headers of replies."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            prefix = await self._proxies.read(scope)
        except ValidationError as error:
            return await error_response(error)(scope, receive, send)

        async def send_with_prefix(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [_prefixed(name, value, prefix.encode()) for name, value in message.get("headers", ())]
                message = {**message, "headers": headers}
            await send(message)

        return await self._app(scope, receive, send_with_prefix if prefix else send)


def _prefixed(name: bytes, value: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """A header of a reply, whose URL begins with `prefix` if it is a path of this server."""
    if name.lower() not in _LINKS:
        return name, value
    start = value.startswith(b"<")  # Link has <URL>, Location the bare URL
    is_path = value[start : start + 1] == b"/" and value[start + 1 : start + 2] != b"/"
    return name, value[:start] + prefix + value[start:] if is_path else value


def _with_mapped(proxies: Sequence[str]) -> list[str] | str:
    """In uvicorn's form; IPv4 also as IPv6 sockets show it, `::ffff:10.0.0.1`."""
    if "*" in proxies:
        return "*"
    networks = [ipaddress.ip_network(entry) for entry in proxies if entry != _UNIX]
    mapped = (f"::ffff:{each.network_address}/{96 + each.prefixlen}" for each in networks if each.version == 4)
    return [*proxies, *mapped]
