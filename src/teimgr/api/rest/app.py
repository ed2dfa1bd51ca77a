"""Composition of the REST application (routers, error handlers, middleware), TLS of its listener, and `Inference`.

The TLS handshake verifies a client certificate's chain. The allow-lists are applied per request
(`middleware.Authentication`), so that a rejected client gets a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools
from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Scope

from teimgr import __version__
from teimgr.api.batches import Batches
from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.ollama import OllamaPort
from teimgr.api.gateway.routes import InferenceCall, describe, paths
from teimgr.api.rest import batches as batch_routes
from teimgr.api.rest import (
    daemon,
    error_answers,
    events,
    files,
    fleet,
    hosts,
    instances,
    logs,
    models,
    probes,
    recommendations,
)
from teimgr.api.rest.access import INFERENCE, Access, MatchedRoute
from teimgr.api.rest.daemon import Restarter
from teimgr.api.rest.hosts import GpuReport, HostEnrolment
from teimgr.api.rest.middleware import (
    Authentication,
    HeadAsGet,
    LimitQuery,
    Observe,
    PageRefusal,
    ProxyHeaders,
    RejectEncodedSeparators,
    TrustedProxies,
    has_too_many,
    path_fault,
    refused,
)
from teimgr.api.rest.probes import Alarms
from teimgr.config.auth import policy_of
from teimgr.config.settings import Settings
from teimgr.control.capacity.advisor import Advisor
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.registry.registry import Registry
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.reload import Reloader
from teimgr.control.supervision.worker_run import FleetProber
from teimgr.errors import Code, Forbidden, Overloaded, Unauthenticated, ValidationError
from teimgr.http.auth.policy import CERTIFICATE, PolicyInForce, certificate_from_tls
from teimgr.http.auth.sessions import Sessions
from teimgr.http.auth.tls_files import TlsFiles, TlsWatch
from teimgr.http.bodies import BoundedReplies, RequestTurns, path_prefix_of
from teimgr.http.connection_gate import sender_of
from teimgr.http.direct import Answer, Direct, DirectReply, DirectRequest
from teimgr.http.docs_page import HEADERS, page, reference
from teimgr.http.http1 import HttpProtocol
from teimgr.http.http2.requests import protocol as http2_protocol
from teimgr.http.server import AsgiApp, Listener, serving
from teimgr.http.turns import TURNS_OF
from teimgr.http.unix_listener import UnixListener
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page as MetricsPage
from teimgr.observability.exposition import Sample
from teimgr.observability.log_source import FleetLogs, LocalLogs
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import CURRENT, REQUEST_ID, Telemetry
from teimgr.wire.status import STATUS

docs = APIRouter(include_in_schema=False)
_OPENAPI = "/openapi.json"
_BY_PREFIX = {"Vary": "X-Forwarded-Prefix"}


class PageRoutes(NamedTuple):
    """The web page's part of the application: routes, sessions, and its reply to a refused request.

    `shell` wraps the HTML of /docs in the page's layout.
    """

    routes: Sequence[BaseRoute]
    sessions: Sessions
    refusal: PageRefusal
    shell: Callable[[Request, str], Awaitable[Response]]


# FastAPI's own route would make the document on the event loop, which takes half a second.
@docs.get(_OPENAPI)
async def openapi(request: Request) -> Response:
    document = await asyncio.to_thread(_document, request.app)
    if prefix := path_prefix_of(request.scope):
        servers = json.dumps([{"url": prefix}]).encode()
        document = b'{"servers":' + servers + b"," + document.removeprefix(b"{")
    return Response(document, media_type="application/json", headers=_BY_PREFIX)


@docs.get("/docs")
async def docs_page(request: Request) -> Response:
    address, shell = path_prefix_of(request.scope) + _OPENAPI, request.app.state.docs_shell
    text = await asyncio.to_thread(_document_page, request.app, address, reference if shell else page)
    response: Response = await shell(request, text) if shell else HTMLResponse(text, headers=HEADERS)
    response.headers["Vary"] = ", ".join(filter(None, (response.headers.get("Vary"), _BY_PREFIX["Vary"])))
    return response


def _document(app: FastAPI) -> bytes:
    """The OpenAPI document, made once."""
    with app.state.document_lock:
        if app.state.document is None:
            app.state.document = json.dumps(app.openapi(), separators=(",", ":")).encode()
        document: bytes = app.state.document
        return document


def _document_page(app: FastAPI, address: str, made: Callable[[dict[str, Any], str], str]) -> str:
    return made(json.loads(_document(app)), address)


def create_app(
    manager: Manager,
    settings: Settings,
    metrics: DaemonMetrics,
    alarms: Alarms = tuple,
    booted: Callable[[], bool] = lambda: True,
    *,
    registry: Registry | None = None,
    gateway: Gateway | None = None,
    gpu_report: GpuReport | None = None,
    tenants: TenantRegistry | None = None,
    autoscaler: Autoscaler | None = None,
    advisor: Advisor | None = None,
    policy: PolicyInForce | None = None,
    event_log: EventLog | None = None,
    live_probe: FleetProber | None = None,
    reloader: Reloader | None = None,
    telemetry: Telemetry | None = None,
    batches: Batches | None = None,
    page: PageRoutes | None = None,
    enrolment: HostEnrolment | None = None,
    log_sources: FleetLogs | None = None,
    restarter: Restarter | None = None,
) -> FastAPI:
    """The REST application over `manager`; a part that is None has no routes (see `_routers`).

    `settings` has the authentication too if `policy` is None. `metrics` counts requests and is the page of /metrics.
    `alarms` are those of everything but the state file. Until `booted`, /ready and /health/ready are 503. `live_probe`
    makes self-tests on demand, for /health/all and /instances/{name}/health; `telemetry` traces requests that change
    something. Without `enrolment` the routes of joining refuse; without `log_sources` logs are those in `log_dir`.
    """
    about = "A fleet of embedding models behind one daemon."
    no_url: Any = dict.fromkeys(("openapi_url", "docs_url", "redoc_url"))
    app = FastAPI(title="teimgr", version=__version__, description=about, redirect_slashes=False, **no_url)
    app.state.manager, app.state.settings, app.state.metrics = manager, settings, metrics
    app.state.alarms, app.state.booted, app.state.routing = alarms, booted, probes.RoutingState()
    app.state.tenants, app.state.autoscaler, app.state.advisor = tenants, autoscaler, advisor
    app.state.registry, app.state.gpus, app.state.enrolment = registry, gpu_report, enrolment
    app.state.batches, app.state.direct, app.state.docs_shell = batches, None, page and page.shell
    app.state.document, app.state.document_lock = None, threading.Lock()
    app.state.promised_workers = instances.PromisedWorkers()
    app.state.logs = log_sources or FleetLogs(LocalLogs(settings.log_dir))
    app.state.restarter = restarter
    app.state.events, app.state.live_probe, app.state.reloader = event_log, live_probe, reloader
    for router in _routers(app.state):
        # Not `include_router`, which rebuilds every route at the first request (0.2 s).
        app.router.routes.extend(router.routes)
    if gateway is not None:
        app.router.routes.extend(gateway.routes())
        describe(app)
    if page is not None:
        app.router.routes.extend(page.routes)
    error_answers.install(app)
    app.state.policy = policy or PolicyInForce(policy_of(settings.auth))
    access = Access(
        app.state.policy,
        lambda: app.state.settings,
        app.router.routes,
        page and page.sessions,
        lambda: restarter is not None and restarter.is_taking_over,
    )
    proxies = TrustedProxies(lambda: app.state.settings)
    _add_middleware(app, access, proxies, page, telemetry)
    if gateway is not None:
        app.state.direct = Inference(gateway, Observe(app, metrics, telemetry), access, proxies)
    return app


def _routers(parts: State) -> Iterator[APIRouter]:
    """Those of the parts that are there."""
    yield from (instances.router, fleet.router, logs.router, probes.router)
    yield from (docs, error_answers.router)
    for part, routers in (
        (parts.events, (events.router,)),
        (parts.reloader, (daemon.config_router,)),
        (parts.restarter, (daemon.router,)),
        (parts.registry, (models.router,)),
        (parts.gpus, (hosts.gpu_router,)),
        (parts.tenants, (fleet.usage_router,)),
        (parts.autoscaler, (recommendations.scaling_router,)),
        (parts.advisor, (recommendations.router,)),
    ):
        yield from routers if part is not None else ()
    yield hosts.router
    if parts.batches is not None:
        yield from (files.router, batch_routes.router)


def _add_middleware(
    app: FastAPI, access: Access, proxies: TrustedProxies, page: PageRoutes | None, telemetry: Telemetry | None
) -> None:
    """The innermost first."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(LimitQuery)
    app.add_middleware(RejectEncodedSeparators)
    app.add_middleware(Authentication, access=access, refusal=page and page.refusal)
    app.add_middleware(BoundedReplies, refuse=_refusal)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )
    app.add_middleware(RequestTurns, refuse=_refusal, whose=access.whose)
    if app.state.settings.ollama_port is not None:
        app.add_middleware(OllamaPort, port=app.state.settings.ollama_port)
    app.add_middleware(Observe, metrics=app.state.metrics, telemetry=telemetry)
    app.add_middleware(ProxyHeaders, proxies=proxies)


def _refusal(scope: Scope, error: Overloaded) -> ASGIApp:
    return error_answers.in_dialect(scope["path"], error)


def reconfigure(app: FastAPI, settings: Settings) -> None:
    """Have later requests read these settings, after a reload."""
    app.state.settings = settings


class TlsHttpProtocol(HttpProtocol):
    """HTTP/1.1 over TLS; puts the client certificate's names into each scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._certificate = certificate_from_tls(transport.get_extra_info("peercert") or {})

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]


def uvicorn_options(context: ssl.SSLContext | None) -> dict[str, Any]:
    """Keyword arguments of `uvicorn.Config` for a listener of REST, with this context or without TLS."""
    if context is None:
        return _OPTIONS
    return _OPTIONS | {"http": TlsHttpProtocol, "ssl_context_factory": lambda config, default: context}


_OPTIONS: dict[str, Any] = {"proxy_headers": False}  # `ProxyHeaders` reads them


def certificate_scope(transport: asyncio.Transport) -> dict[str, Any]:
    """The scope of HTTP/2 requests: the client certificate's names, where the connection is of TLS."""
    peer = transport.get_extra_info("peercert")
    return {} if peer is None else {CERTIFICATE: certificate_from_tls(peer)}


class RestTls:
    """TLS of the REST listener, reloaded when its files change; off without files.

    Raises:
        InvalidConfig: the files cannot be used.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self._context = _context(files) if files else None
        self._files = files
        self._watch: TlsWatch | None = None

    def alarms(self) -> list[str]:
        """One alarm while changed files are unusable."""
        return [self._watch.alarm] if self._watch and self._watch.alarm else []

    async def page(self) -> MetricsPage:
        """The metric of the certificate's end; nothing without one."""
        ends = await asyncio.to_thread(self._files.ends) if self._files else None
        named = {"file": str(self._files.cert)} if self._files else {}
        return {} if ends is None else {catalogue.CERTIFICATE_ENDS: [Sample("", named, ends)]}

    @contextlib.asynccontextmanager
    async def serving(
        self,
        app: AsgiApp,
        sock: socket.socket,
        direct: Direct | None = None,
        unix: UnixListener | None = None,
        more: Sequence[socket.socket] = (),
    ) -> AsyncIterator[Listener]:
        """Like `http_server.serving`, with these certificates."""
        h2 = partial(http2_protocol, peer_scope=certificate_scope)
        async with serving(app, sock, h2, direct, unix, more=more, **uvicorn_options(self._context)) as listener:
            if self._files is None:
                yield listener
                return

            async def renew(files: TlsFiles) -> None:
                await listener.secure(_context(files))

            self._watch = TlsWatch(self._files, renew)
            watching = asyncio.create_task(self._watch.run())
            try:
                yield listener
            finally:
                watching.cancel()


def _context(files: TlsFiles) -> ssl.SSLContext:
    """The context of the files, which offers HTTP/2 to clients that know it (ALPN)."""
    context = files.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


_BY_TEMPLATE = {path.path: path for path in paths()}
_POST = "POST"
# For replies to web pages, as in the application.
_CORS = {"access-control-allow-origin": "*", "access-control-expose-headers": "*", "vary": "Origin"}


class Inference:
    """Handles all inference requests, over HTTP/1.1 and HTTP/2, without the ASGI application.

    The connection's protocol passes the head of each request to this object, which answers inference requests.
    `access` authorises them, and `gateway` forwards them to workers.
    """

    def __init__(self, gateway: Gateway, observe: Observe, access: Access, proxies: TrustedProxies) -> None:
        self._gateway = gateway
        self._observe = observe
        self._access = access
        self._proxies = proxies
        route = MatchedRoute(INFERENCE)
        self._known: dict[bytes, Answer] = {
            path.path.encode(): partial(self._answer, InferenceCall(path), route)
            for path in paths()
            if "{" not in path.path
        }

    def __call__(self, method: bytes, target: bytes) -> Answer | None:
        if method != b"POST":
            return None
        return self._known.get(target) or self._parsed(target)

    def _parsed(self, target: bytes) -> Answer | None:
        """Like `__call__`, for a target that names an instance or a model, or has a query; None for an invalid one."""
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserError:
            return None
        raw, query = url.path or b"", url.query or b""
        if path_fault(raw) is not None or has_too_many(query):
            return None
        route = self._access.route(_POST, unquote(raw.decode("ascii")))
        path = _BY_TEMPLATE.get(route.template or "")
        if path is None:
            return None
        return partial(self._answer, InferenceCall(path, route.named, query.decode("latin-1")), route)

    async def _answer(self, call: InferenceCall, route: MatchedRoute, request: DirectRequest) -> DirectReply:
        status, began = 500, time.perf_counter()
        context = self._observe.begin(_POST, request.headers)
        CURRENT.set(context)
        try:
            try:
                if self._proxies.concerns(request.headers):
                    await self._proxies.read(request.scope)
                caller = self._access.check(request.scope, request.headers, route)
            except (Unauthenticated, Forbidden, ValidationError) as error:
                reply = refused(call.path.dialect, error)
            else:
                context.belongs_to(caller.tenant)
                TURNS_OF.set(caller.name or sender_of(request.scope))
                reply = await self._gateway.answer(call, request, caller)
            status = reply.status
        except asyncio.CancelledError:
            status = STATUS[Code.CANCELLED].http
            raise
        finally:
            self._observe.end(context, _POST, call.path.path, status, began)
        headers = {**reply.headers, REQUEST_ID: context.request_id}
        if b"origin" in request.headers:
            headers |= _CORS
        return DirectReply(status, headers, reply.body, self._gateway.reply_budget)
