"""The HTTP application of an instance port: TEI's routes, CORS, the API key, health, metrics and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.docs_page import HEADERS, page
from teimgr.errors import Code, TeimgrError, Unavailable
from teimgr.http_server import read_limited, unless_hung_up
from teimgr.observability.request_context import REQUEST_ID, RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.wire.status import STATUS
from teimgr.worker.dialects import tei
from teimgr.worker.dialects.openapi import instance_document
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http.bodies import BadRequest, check_content_type, to_json
from teimgr.worker.http.inference import HttpHandler, HttpInference, json_reply
from teimgr.worker.worker_metrics import TeiMetrics


class RequestContextMiddleware:
    """Set the request context of each HTTP request and echo its request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext.from_headers(
            {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        )

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                echoed = (REQUEST_ID.encode(), context.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), echoed]}
            await send(message)

        with use_context(context):
            await self._app(scope, receive, echoing)


_PUBLIC = {"/health", "/ping", "/metrics", "/docs"}
_PUBLIC_FOLDERS = ("/docs/", "/api-doc/")
_VARY = "origin, access-control-request-method, access-control-request-headers"


class CorsMiddleware:
    """CORS as TEI has it: replies are readable by pages of `origins`, or of all where there is none or a `*`.

    GET and POST, and `content-type` as the only header, so that a page cannot send a key. Preflight requests are
    answered here, before authentication.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._any = not origins or "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(Headers(scope=scope).get("origin"))

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowed)
            await send(message)

        if scope["method"] == "OPTIONS":
            methods = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": "content-type"}
            await Response(headers=methods)(scope, receive, send_with_origin)
        else:
            await self._app(scope, receive, send_with_origin)

    def _allowed(self, origin: str | None) -> dict[str, str]:
        if self._any:
            return {"vary": _VARY, "access-control-allow-origin": "*"}
        if origin in self._origins:
            assert origin is not None
            return {"vary": _VARY, "access-control-allow-origin": origin}
        return {"vary": _VARY}


class ApiKeyMiddleware:
    """Require `Authorization: Bearer KEY`, else 401 without a body. Health, metrics and documents are public."""

    def __init__(self, app: ASGIApp, spec: WorkerSpec) -> None:
        self._app = app
        self._spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_public(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await Response(status_code=401)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._spec.accepts(given)


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return scope["method"] in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)


_HEALTH_TIMEOUT_S = 5.0
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
        """The endpoint of `route`, with a response for each way in which it may fail."""
        dialect = TEI_OPENAI if path in tei.OPENAI_PATHS else TEI

        async def endpoint(request: Request) -> Response:
            try:
                content_type = request.headers.get("content-type", "")
                check_content_type(content_type)
                body = await read_limited(request.stream(), self._dispatcher.spec.payload_limit_bytes)
                if body is None:
                    raise BadRequest(413, "Failed to buffer the request body: length limit exceeded")
                parsed = HttpRequest(TEI, request.method, path, headers={"content-type": content_type}, body=body)
                return _response(await unless_hung_up(route(self._inference, parsed), request.receive))
            except TeimgrError as error:
                return _response(failure(dialect, error))
            except BadRequest as error:
                return _response(error.reply(dialect))
            except ClientDisconnect:  # while it sent its body; uvicorn discards the response
                return Response(status_code=STATUS[Code.CANCELLED].http)
            except Exception as error:
                return _response(failure(dialect, masked(error)))

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
    guarded = app if dispatcher.spec.api_key is None else ApiKeyMiddleware(app, dispatcher.spec)
    return RequestContextMiddleware(CorsMiddleware(guarded, dispatcher.spec.cors_allow_origin))


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
