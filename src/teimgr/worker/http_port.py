"""The routes of an instance's port: the tables say which, the methods how each shape of them is answered."""

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
from teimgr.worker.metrics import TeiMetrics


async def read(request: Request, limit_bytes: int) -> HttpRequest:
    """The request with its whole body.

    Raises:
        BadRequest: it is not said to be JSON, or is over the limit (413).
        ClientDisconnect: the client went away while it sent.
    """
    content_type = request.headers.get("content-type", "")
    check_content_type(content_type)
    body = await read_limited(request.stream(), limit_bytes)
    if body is None:
        raise BadRequest(413, "Failed to buffer the request body: length limit exceeded")
    headers = {"content-type": content_type}
    return HttpRequest(TEI, request.method, request.url.path, headers=headers, body=body)


def response(reply: HttpReply) -> Response:
    """A reply as Starlette sends it."""
    return Response(reply.body, reply.status, dict(reply.headers))


class RequestContextMiddleware:
    """Set the request context of each HTTP request and echo its request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
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


class Cors:
    """Tells browsers which pages may read the answers: those of `origins`, or of all where there is none or a `*`.

    GET and POST, and `content-type` as the only header, so that a page cannot send a key. A preflight is answered
    here, before any key is asked for.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._any = not origins or "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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


class ApiKey:
    """Lets a request through that says `Authorization: Bearer` and the key; 401 without a body otherwise.

    What tells of the server and not of its model is public.
    """

    def __init__(self, app: ASGIApp, spec: WorkerSpec) -> None:
        self._app = app
        self._spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or _is_public(scope) or self._is_right(scope):
            await self._app(scope, receive, send)
        else:
            await Response(status_code=401)(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._spec.accepts(given)


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return scope["method"] in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)


Endpoint = Callable[[Request], Awaitable[Response]]

_HEALTH_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"


class Routes:
    """What each route answers; `post` makes an endpoint of one of TEI's."""

    def __init__(self, dispatcher: Dispatcher, exchange: HttpInference) -> None:
        self._dispatcher = dispatcher
        self._exchange = exchange

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the known text went through the device."""
        try:
            await asyncio.to_thread(self._dispatcher.engine.self_test, _HEALTH_TIMEOUT_S)
        except Unavailable:
            return response(failure(TEI, Unavailable("unhealthy")))
        return Response()

    async def info(self, request: Request) -> Response:
        """The model and the limits."""
        return response(await tei.get_info(self._exchange, HttpRequest(TEI, "GET", "/info")))

    async def metrics(self, request: Request) -> Response:
        """The `te_*` metrics."""
        return Response(self._dispatcher.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return response(json_reply(to_json(instance_document())))

    async def docs(self, request: Request) -> Response:
        """The same for readers."""
        return HTMLResponse(page(instance_document(), "/api-doc/openapi.json"), headers=HEADERS)

    def post(self, path: str, route: HttpHandler) -> Endpoint:
        """`route`, and for each way in which it may fail the response that says so."""
        dialect = TEI_OPENAI if path in tei.OPENAI_PATHS else TEI

        async def endpoint(request: Request) -> Response:
            try:
                asked = await read(request, self._dispatcher.spec.payload_limit_bytes)
                return response(await unless_hung_up(route(self._exchange, asked), request.receive))
            except TeimgrError as error:
                return response(failure(dialect, error))
            except BadRequest as error:
                return response(error.reply(dialect))
            except ClientDisconnect:  # it still sent its body; uvicorn throws the answer away
                return Response(status_code=STATUS[Code.CANCELLED].http)
            except Exception as error:
                return response(failure(dialect, masked(error)))

        return endpoint


def create_app(dispatcher: Dispatcher) -> ASGIApp:
    """The instance port of a dispatcher that has its engine."""
    routes = Routes(dispatcher, HttpInference(dispatcher))
    app = Starlette(
        routes=[
            *(Route(path, routes.health) for path in ("/", "/health", "/ping")),
            Route("/info", routes.info),
            Route("/metrics", routes.metrics),
            Route("/docs", routes.docs),
            Route("/docs/", routes.docs),
            Route("/api-doc/openapi.json", routes.openapi),
            *(
                Route(path, routes.post(path, route), methods=["POST"])
                for (method, path), route in tei.ROUTES.items()
                if method == "POST"
            ),
        ],
        exception_handlers={HTTPException: _without_a_body},
    )
    app.router.redirect_slashes = False
    guarded = app if dispatcher.spec.api_key is None else ApiKey(app, dispatcher.spec)
    return RequestContextMiddleware(Cors(guarded, dispatcher.spec.cors_allow_origin))


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return Starlette(routes=[Route("/{path:path}", answer)])


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)
