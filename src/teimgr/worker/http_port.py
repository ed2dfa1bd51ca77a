"""The HTTP application of an instance port: TEI's routes, CORS, the API key, health, metrics and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.byte_budget import Charge
from teimgr.docs_page import HEADERS, page
from teimgr.errors import Code, Forbidden, TeimgrError, Unavailable
from teimgr.http_protocol import HeldResponse, SlowClient, foreign_page, read_body, unless_hung_up
from teimgr.observability.request_context import REQUEST_ID, RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.status import STATUS
from teimgr.worker.dialects import tei
from teimgr.worker.dialects.openapi import instance_document
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http_inference import BadRequest, HttpHandler, HttpInference, check_content_type, json_reply, to_json
from teimgr.worker.worker_metrics import TeiMetrics

_PUBLIC = {"/health", "/ping", "/metrics", "/docs"}
_PUBLIC_FOLDERS = ("/docs/", "/api-doc/")
_VARY = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
_ALLOW_ORIGIN = b"access-control-allow-origin"
_PREFLIGHT = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": "content-type"}


class PortMiddleware:
    """The request context with its id, CORS and the API key of an instance's port, in this order.

    CORS as TEI has it: pages of the allowed origins may read replies, or all pages where none is set or one is `*`; GET
    and POST, and `content-type` as the only header, so that a page cannot send a key. Preflight requests are answered
    before authentication. Without the key: 401 without a body; health, metrics and documents are public.
    """

    def __init__(self, app: ASGIApp, spec: WorkerSpec) -> None:
        self._app = app
        self._spec = spec
        self._origins = frozenset(spec.cors_allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Reversed: the first of several headers of one name counts.
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in reversed(scope["headers"])}
        context = RequestContext.from_headers(headers)
        added = [*self._cors(headers.get("origin")), (REQUEST_ID.encode(), context.request_id.encode())]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        app = self._app
        if scope["method"] == "OPTIONS":
            app = Response(headers=_PREFLIGHT)
        elif not _is_public(scope) and not self._spec.accepts(headers.get("authorization", "").encode("latin-1")):
            app = Response(status_code=401)
        elif page := self._foreign_page(scope["method"], headers):
            refused = Forbidden(f"a web page ({page}) may only read here: its origin is not in --cors-allow-origin")
            app = _response(failure(TEI_OPENAI if scope["path"] in tei.OPENAI_PATHS else TEI, refused))
        with use_context(context):
            await app(scope, receive, send_with_headers)

    def _foreign_page(self, method: str, headers: Mapping[str, str]) -> str | None:
        """A POST that needs no preflight would else run, although the page could not read its reply."""
        every_page_may = not self._origins or "*" in self._origins
        return None if every_page_may or method in ("GET", "HEAD") else foreign_page(headers, self._origins)

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        if not self._origins or "*" in self._origins:
            return [_VARY, (_ALLOW_ORIGIN, b"*")]
        if origin is not None and origin in self._origins:
            return [_VARY, (_ALLOW_ORIGIN, origin.encode("latin-1"))]
        return [_VARY]


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return scope["method"] in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)


_HEALTH_TIMEOUT_S = 5.0
_NOT_BUFFERED = "Failed to buffer the request body"
_TEXT = "text/plain; charset=utf-8"

Endpoint = Callable[[Request], Awaitable[Response]]


class InstancePort:
    """Endpoints of the instance port; `post` makes one of a route of TEI."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._inference = HttpInference(dispatcher)

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the engine's self-test has passed."""
        try:
            await asyncio.to_thread(self._dispatcher.engine.self_test, _HEALTH_TIMEOUT_S)
        except Unavailable:
            return _response(failure(TEI, Unavailable("unhealthy")))
        return Response()

    async def info(self, request: Request) -> Response:
        return _response(await tei.get_info(self._inference, HttpRequest(TEI, "GET", "/info")))

    async def metrics(self, request: Request) -> Response:
        return Response(self._dispatcher.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        return _response(json_reply(to_json(instance_document())))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(instance_document(), "/api-doc/openapi.json"), headers=HEADERS)

    def post(self, path: str, route: HttpHandler) -> Endpoint:
        dialect = TEI_OPENAI if path in tei.OPENAI_PATHS else TEI

        async def endpoint(request: Request) -> Response:
            budget = self._dispatcher.port_budget
            charge = Charge(budget)
            try:
                content_type = request.headers.get("content-type", "")
                check_content_type(content_type)
                body = await read_body(request, self._dispatcher.spec.payload_limit_bytes, charge)
                if body is None:
                    raise BadRequest(413, f"{_NOT_BUFFERED}: length limit exceeded")
                parsed = HttpRequest(TEI, request.method, path, headers={"content-type": content_type}, body=body)
                reply = await unless_hung_up(route(self._inference, parsed), request.receive)
                return HeldResponse(reply.body, reply.status, reply.headers, budget)
            except SlowClient:
                return _response(BadRequest(408, f"{_NOT_BUFFERED}: it did not come in time").reply(dialect))
            except TeimgrError as error:
                return _response(failure(dialect, error))
            except BadRequest as error:
                return _response(error.reply(dialect))
            except ClientDisconnect:  # while it sent its body; uvicorn discards the response
                return Response(status_code=STATUS[Code.CANCELLED].http)
            except Exception as error:
                return _response(failure(dialect, masked(error)))
            finally:
                charge.release()

        return endpoint


def create_app(dispatcher: Dispatcher) -> ASGIApp:
    """The application of the instance port; the dispatcher must have its engine."""
    port = InstancePort(dispatcher)
    app = Starlette(
        routes=[
            *(Route(path, port.health) for path in ("/", "/health", "/ping")),
            Route("/info", port.info),
            Route("/metrics", port.metrics),
            Route("/docs", port.docs),
            Route("/docs/", port.docs),
            Route("/api-doc/openapi.json", port.openapi),
            *(
                Route(path, port.post(path, route), methods=["POST"])
                for (method, path), route in tei.ROUTES.items()
                if method == "POST"
            ),
        ],
        exception_handlers={HTTPException: _without_a_body},
    )
    app.router.redirect_slashes = False
    return PortMiddleware(app, dispatcher.spec)


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return Starlette(routes=[Route("/{path:path}", answer)])


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)


def _response(reply: HttpReply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))
