"""What each request of REST passes first: metrics, logs and traces; authentication and rights; path checks; HEAD.

As ASGI middleware in this order, with CORS after the first, and as `DirectInference` for small requests of inference,
which does it in one step without ASGI.

A route that is missing in `PERMISSIONS` requires the right to administer, so an omission is safe; a test compares the
table with the application's routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.model_cards import (
    COHERE_CHECKS,
    INFINITY_HEALTH,
    VLLM_HEALTH,
    VLLM_VERSION,
    WEAVIATE_META,
    WEAVIATE_PROBES,
)
from teimgr.api.gateway.routes import MODEL_CARDS, MODEL_LISTS, DialectPath, dialect_of, paths
from teimgr.api.rest.error_answers import VERBS, error_response
from teimgr.config.settings import Settings
from teimgr.errors import Forbidden, InvalidInstanceName, TeimgrError, Unauthenticated, ValidationError
from teimgr.http.auth.policy import (
    ANONYMOUS,
    CALLER,
    CERTIFICATE,
    NO_CERTIFICATE,
    Caller,
    Policy,
    PolicyInForce,
    Right,
    authenticate_request,
)
from teimgr.http.auth.sessions import Sessions, is_same_origin
from teimgr.http.bodies import foreign_page
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

READS = ("GET", "HEAD", "OPTIONS")
# Longer paths are not cached, so that callers cannot fill the memory with them.
_CACHED_PATHS, _CACHED_CHARS = 4096, 256
_CONTEXT_HEADERS = [(name.encode(), name) for name in (REQUEST_ID, TRACEPARENT, TRACESTATE)]
_KEY_HEADERS = {b"authorization", b"x-api-key"}
_HOST_NAME = socket.gethostname()

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


class Permission(NamedTuple):
    """What a route requires of its caller.

    Attributes:
        rights: One of these; empty requires a known caller and no right.
        is_public: No authentication.
        is_fleet_wide: The route concerns more than one instance, so keys for some instances only are rejected. Where it
            is False and the path has no `{name}`, the route itself checks the instances of the caller's key.
    """

    rights: frozenset[Right] = frozenset()
    is_public: bool = False
    is_fleet_wide: bool = False


class MatchedRoute(NamedTuple):
    """What a request requires: the permission of its route, the instance in its path, and the route's template."""

    permission: Permission
    instance: str | None = None
    template: str | None = None

    def check(self, caller: Caller) -> None:
        """Authorise a caller.

        Raises:
            Forbidden: the key lacks the right, or is not for this instance.
        """
        caller.require(self.permission.rights)
        if self.instance is not None:
            caller.require_instance(self.instance)
        elif self.permission.is_fleet_wide and caller.is_restricted:
            raise Forbidden(f"The key '{caller.name}' is for some instances only, and this is about all")


PUBLIC = Permission(is_public=True)
KNOWN = Permission()
READ = Permission(frozenset({Right.READ}))
READ_ALL = READ._replace(is_fleet_wide=True)
ADMIN = Permission(frozenset({Right.ADMIN}))
ADMIN_ALL = ADMIN._replace(is_fleet_wide=True)
INFERENCE = Permission(frozenset({Right.INFERENCE}))
# What clients of inference look up before they send a request.
EITHER = Permission(frozenset({Right.INFERENCE, Right.READ}))

PERMISSIONS: dict[str, Permission] = {
    "GET /health": PUBLIC,
    "GET /health/ready": PUBLIC,
    "GET /ready": READ_ALL,
    "GET /metrics": READ_ALL,
    "GET /docs": KNOWN,
    "GET /docs/errors": PUBLIC,  # explains a refused key too
    "GET /openapi.json": KNOWN,
    "GET /instances": READ,
    "POST /instances": ADMIN,
    "GET /instances/{name}": READ,
    "PATCH /instances/{name}": ADMIN,
    "DELETE /instances/{name}": ADMIN,
    "POST /instances/{name}/start": ADMIN,
    "POST /instances/{name}/stop": ADMIN,
    "POST /instances/{name}/restart": ADMIN,
    "GET /instances/{name}/logs": READ,
    "GET /instances/{name}/events": READ,
    "GET /instances/{name}/health": EITHER,
    "POST /instances/actions": ADMIN_ALL,
    "GET /health/all": READ_ALL,
    "GET /templates": READ_ALL,
    "GET /events": READ_ALL,
    "GET /config": ADMIN_ALL,
    "POST /config/reload": ADMIN_ALL,
    "GET /gpus": READ_ALL,
    "GET /hosts": READ_ALL,
    "POST /hosts/tokens": ADMIN_ALL,
    "DELETE /hosts/{name}": ADMIN_ALL,
    "GET /models": READ_ALL,
    "POST /models": ADMIN_ALL,
    "GET /models/{model_id:path}": READ_ALL,
    "DELETE /models/{model_id:path}": ADMIN_ALL,
    "GET /models/{model_id:path}/download/events": READ_ALL,
    "POST /models/{model_id:path}/download": ADMIN_ALL,
    "POST /models/{model_id:path}/load": ADMIN_ALL,
    **{f"GET {path}": EITHER for path in (*MODEL_LISTS, *MODEL_CARDS, VLLM_VERSION, *WEAVIATE_META)},
    **{f"GET {path}": EITHER if "{" in path else PUBLIC for path in WEAVIATE_PROBES},
    **{f"GET {path}": PUBLIC for path in (*INFINITY_HEALTH, *VLLM_HEALTH)},
    **{f"POST {path}": EITHER for path in COHERE_CHECKS},
    # Files and batches are those of the caller's key; a batch may use what the key may use while it runs.
    "POST /v1/files": INFERENCE,
    "GET /v1/files": INFERENCE,
    "GET /v1/files/{id}": INFERENCE,
    "GET /v1/files/{id}/content": INFERENCE,
    "DELETE /v1/files/{id}": INFERENCE,
    "POST /v1/batches": INFERENCE,
    "GET /v1/batches": INFERENCE,
    "GET /v1/batches/{id}": INFERENCE,
    "POST /v1/batches/{id}/cancel": INFERENCE,
    # The page. It changes nothing itself: its scripts call the routes above.
    "GET /": KNOWN,  # the first view that the caller's rights allow
    "GET /ui/static/{digest}/{name}": PUBLIC,
    "GET /ui/sign-in": PUBLIC,
    "POST /ui/sign-in": PUBLIC,
    "POST /ui/sign-out": KNOWN,
    "GET /ui/create": ADMIN,
    "GET /ui/fleet": READ,
    "GET /ui/fleet/live": READ,
    "GET /ui/instances/{name}": READ,
    "GET /ui/instances/{name}/live": READ,
    "GET /ui/alarms": READ,
    "GET /ui/models": READ_ALL,
    "GET /ui/devices": READ_ALL,
    "GET /ui/playground": INFERENCE,
} | {f"{path.method} {path.path}": INFERENCE if path.method == "POST" else EITHER for path in paths()}

# The routes of inference without parameters, by the target of a request.
_DIRECT = {path.path.encode(): path for path in paths() if path.method == "POST" and "{" not in path.path}

_DIALECTS = {path.path: path.dialect for path in paths()} | dict.fromkeys(COHERE_CHECKS, COHERE)


class RoutePermissions:
    """Finds the permission of a request by matching it against the application's routes."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        self._cached = lru_cache(_CACHED_PATHS)(self._match)

    def of(self, method: str, path: str, policy: Policy) -> MatchedRoute:
        """What this request requires under `policy`."""
        match = self._cached if len(path) <= _CACHED_CHARS else self._match
        found = match("GET" if method == "HEAD" else method, path)
        if found.template == "/metrics" and policy.is_certified:
            # Prometheus has presented a certificate of the authority, which is enough for tei-manager too.
            return MatchedRoute(PUBLIC)
        return found

    def _match(self, method: str, path: str) -> MatchedRoute:
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        for route in flat(self._routes):
            match, inner = route.matches(scope)
            if match is Match.FULL:
                template = str(getattr(route, "path", ""))
                permission = PERMISSIONS.get(f"{method} {template}", ADMIN_ALL)
                return MatchedRoute(permission, inner.get("path_params", {}).get("name"), template)
        return MatchedRoute(KNOWN)


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """The routes, with included routers replaced by their routes; no router has a prefix."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from flat(included.routes)


class Authentication:
    """Authenticates the caller and checks the right that the route requires; puts the caller into the scope.

    Where no API key is required, web pages of other origins get nothing but the public routes: a browser sends its
    user's certificate, or uses its user's place in the network, for every page, and what is not public holds data of
    callers or operators. A key is sent by none but a page that has it. A session cookie (`sessions`) stands for a key
    in requests of our own page alone. `refusal` is the page's own answer to a refused request, if it has one.
    """

    def __init__(
        self,
        app: ASGIApp,
        policy: PolicyInForce,
        routes: Sequence[BaseRoute],
        sessions: Sessions | None = None,
        refusal: PageRefusal | None = None,
    ) -> None:
        self._app = app
        self._policy = policy
        self._permissions = RoutePermissions(routes)
        self._sessions = sessions
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = self._policy.now
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if policy.keys is None and (page := self._foreign_page(scope, policy)):
            refused = Forbidden(f"a web page ({page}) gets no answer here: its origin is not in allowed_origins")
            return await self._refuse(refused, scope, policy)(scope, receive, send)
        if policy.is_open:
            return await self._while_allowed(scope, receive, send)
        route = self._permissions.of(scope["method"], scope["path"], policy)
        if not route.permission.is_public:
            try:
                scope[CALLER] = caller = self._authenticate(policy, scope)
                route.check(caller)
            except (Unauthenticated, Forbidden) as error:
                return await self._refuse(error, scope, policy)(scope, receive, send)
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
                self._check_again(scope)
            except (Unauthenticated, Forbidden) as error:
                if lost is None:
                    lost = error
                    running.cancel()

        unsubscribe = self._policy.subscribe(on_reload)
        try:
            await self._app(scope, receive, noting_start)
        except asyncio.CancelledError:
            if lost is None or running.uncancel() > 0:
                raise
            if has_started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await self._refuse(lost, scope, self._policy.now)(scope, receive, send)
        finally:
            unsubscribe()

    def _check_again(self, scope: Scope) -> None:
        """Raises Unauthenticated, Forbidden: the policy in force does not allow this request any more."""
        policy = self._policy.now
        route = self._permissions.of(scope["method"], scope["path"], policy)
        if not policy.is_open and not route.permission.is_public:
            route.check(self._authenticate(policy, scope))

    def _refuse(self, error: Unauthenticated | Forbidden, scope: Scope, policy: Policy) -> Response:
        template = self._permissions.of(scope["method"], scope["path"], policy).template
        shown = self._refusal(scope, template, error) if self._refusal else None
        return shown or _rejection(error, template, scope["path"])

    def _authenticate(self, policy: Policy, scope: Scope) -> Caller:
        """The caller by the key in the headers, else by the session of our page."""
        names = {name for name, _ in scope["headers"]}
        token = self._sessions.token_in(scope) if self._sessions and not names & _KEY_HEADERS else None
        if self._sessions is None or token is None or policy.keys is None:
            return authenticate_request(policy, scope)
        if not is_same_origin(scope["method"] in READS, _headers(scope)):
            raise Forbidden("a session is for the pages of this server alone: send an API key")
        return policy.authenticate_digest(scope.get(CERTIFICATE, NO_CERTIFICATE), self._sessions.key_of(token))

    def _foreign_page(self, scope: Scope, policy: Policy) -> str | None:
        settings: Settings = scope["app"].state.settings
        reads = scope["method"] in READS
        page = foreign_page(_headers(scope), settings.allowed_origins, own_names(settings), reads=reads)
        is_public = reads and page and self._permissions.of(scope["method"], scope["path"], policy).permission.is_public
        return None if is_public else page


class DirectInference:
    """Answers requests to a route of inference that no web page sent, of callers who have its right.

    All other requests go on to the application. This refuses nothing itself, but what it answers does not pass the
    middleware: every check of `Authentication` must be repeated here.
    """

    def __init__(self, gateway: Gateway, observe: Observe, policy: PolicyInForce) -> None:
        self._gateway = gateway
        self._observe = observe
        self._policy = policy

    def __call__(self, request: DirectRequest) -> Answer | None:
        path, policy = _DIRECT.get(request.target), self._policy.now
        if path is None or request.is_of_page:
            return None
        caller = ANONYMOUS
        if not policy.is_open:
            try:
                caller = authenticate_request(policy, request.scope)
                caller.require(INFERENCE.rights)
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


def own_names(settings: Settings) -> tuple[str, ...]:
    """The names under which this server's own web pages are reached, beside addresses and localhost."""
    return (_HOST_NAME, settings.api_host, *settings.allowed_hosts)


def _headers(scope: Scope) -> Mapping[str, str]:
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}


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
