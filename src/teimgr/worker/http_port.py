"""The HTTP application of an instance port: TEI's routes, CORS, the API key, health, metrics and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial

import httptools
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.engine.job import Lane
from teimgr.errors import DeadlineExceeded, Forbidden, TeimgrError, Unavailable
from teimgr.http.bodies import (
    BoundedReplies,
    RequestTurns,
    SlowClient,
    compression_fault,
    foreign_page,
    has_room,
    read_whole,
    room_for_reply,
)
from teimgr.http.byte_budget import Charge
from teimgr.http.connection_gate import sender_of
from teimgr.http.direct import Answer, DirectReply, DirectRequest, answered_directly
from teimgr.http.docs_page import HEADERS, page
from teimgr.http.turns import TURNS_OF, Turns
from teimgr.observability.request_context import (
    CURRENT,
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
    RequestContext,
    use_context,
)
from teimgr.spec import LANE_KEY, WorkerSpec
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure
from teimgr.wire.frames import Flag, HttpReply, HttpRequest, in_lane
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.worker.dialects import tei
from teimgr.worker.dialects.openapi import instance_document
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http_inference import BadRequest, HttpInference, check_content_type, json_reply, to_json
from teimgr.worker.worker_metrics import TeiMetrics

_PUBLIC = {"/health", "/ping", "/metrics", "/docs"}
_PUBLIC_FOLDERS = ("/docs/", "/api-doc/")
_VARY = {"vary": "origin, access-control-request-method, access-control-request-headers"}
_ALLOW_ORIGIN = "access-control-allow-origin"
_PREFLIGHT = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": "content-type"}
_GET_PATHS = ("/", "/health", "/ping", "/info", "/metrics", "/docs", "/docs/", "/api-doc/openapi.json")
_POST_PATHS = tuple(path for method, path in tei.ROUTES if method == "POST")
_ALLOW: Mapping[str, str] = (
    dict.fromkeys(_GET_PATHS, "GET,HEAD") | dict.fromkeys(_POST_PATHS, "POST") | {"/": "POST,GET,HEAD"}
)


class PortAccess:
    """Access rules of an instance port: its API key, and an allowed origin for web pages.

    Without the key: 401 without a body; health, metrics and documents are public.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._origins = frozenset(spec.cors_allow_origin)
        self._every_page_may = not self._origins or "*" in self._origins
        self.refuses = spec.api_key is not None or not self._every_page_may
        """Whether `refusal` may refuse inference requests."""

    def cors(self, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """The CORS headers of the response to a request."""
        origin = headers.get(b"origin")
        return cors_headers(self._origins, None if origin is None else origin.decode("latin-1"))

    def refusal(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> HttpReply | None:
        """Return the reply that refuses a request, or None; `headers` has the first of several values."""
        if not _is_public(method, path) and not self._spec.accepts(headers.get(b"authorization", b"")):
            return HttpReply(401, {}, b"")
        if page := self._foreign_page(method, headers):
            refused = Forbidden(f"a web page ({page}) may only read here: its origin is not in --cors-allow-origin")
            return failure(_dialect(path), refused)
        return None

    def _foreign_page(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the page that sent a request and may not; a POST without a preflight would run otherwise."""
        return (
            None if self._every_page_may or method in ("GET", "HEAD") else foreign_page(_text(headers), self._origins)
        )


class PortMiddleware:
    """Sets the request context with its id, then CORS, then checks `access`. Inference requests bypass it.

    CORS is as in TEI: pages of the allowed origins may read replies, or all pages if no origin is set or one is `*`.
    They may use GET and POST, and only the header `content-type`, so a page cannot send a key. Preflight requests are
    answered before authentication.
    """

    def __init__(self, app: ASGIApp, access: PortAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # the first of several headers with the same name applies
        context = RequestContext.from_headers(_text(headers))
        named = self._access.cors(headers) | {REQUEST_ID: context.request_id}
        added = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if b"%" in scope["raw_path"]:  # TEI matches the path before decoding
            scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        app = self._app
        if scope["method"] == "OPTIONS":
            allow = _ALLOW.get(scope["path"])
            app = Response(headers=_PREFLIGHT if allow is None else _PREFLIGHT | {"allow": allow})
        elif refused := self._access.refusal(scope["method"], scope["path"], headers):
            app = _response(refused)
        with use_context(context):
            await app(scope, receive, send_with_headers)


def cors_headers(origins: Collection[str], origin: str | None) -> dict[str, str]:
    """Return CORS headers that let a page of `origin` read a response if `origins` has it, has `*`, or is empty."""
    if not origins or "*" in origins:
        return _VARY | {_ALLOW_ORIGIN: "*"}
    return _VARY | ({_ALLOW_ORIGIN: origin} if origin is not None and origin in origins else {})


def _text(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}


def _text_of(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """Return the value of a header; empty without it."""
    return headers.get(name, b"").decode("latin-1")


def _path(target: bytes) -> bytes:
    """Return the path of a target as sent; empty for an invalid target."""
    try:
        return httptools.parse_url(target).path or b""
    except httptools.HttpParserError:
        return b""


def _dialect(path: str) -> str:
    return TEI_OPENAI if path in tei.OPENAI_PATHS else TEI


def _is_public(method: str, path: str) -> bool:
    if path == "/":
        return method in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)


_HEALTH_TIMEOUT_S = 5.0
_ANSWERS_PER_TURN = 8
# Headers of the request context.
_CONTEXT = {name: name.encode() for name in (REQUEST_ID, TRACEPARENT, TRACESTATE)}
# Headers of inference requests.
_CONTENT_TYPE, _CONTENT_ENCODING = b"content-type", b"content-encoding"
_LANE, _EXPECTED = LANE_KEY.encode(), EXPECT_KEY.encode()
# The routes of inference by the target of a request.
_PATHS = {path.encode(): path for path in _POST_PATHS}
_NOT_BUFFERED = "Failed to buffer the request body"
_TEXT = "text/plain; charset=utf-8"


class InstancePort:
    """The instance port: `direct` answers inference, the other methods are endpoints of its application."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._inference = HttpInference(dispatcher)
        self._in_lane = {lane.value: HttpInference(dispatcher, lane) for lane in Lane}
        self._self_test: asyncio.Task[bool] | None = None  # shared by concurrent requests for health
        self._answering = Turns(_ANSWERS_PER_TURN)
        self.access = PortAccess(dispatcher.spec)
        self._cors = self.access.cors({})

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the engine's self-test has passed."""
        if self._self_test is None or self._self_test.done():
            self._self_test = asyncio.create_task(self._passes_self_test())
        passes = await asyncio.shield(self._self_test)
        await self._answering.begin(sender_of(request.scope))  # thousands of requests may have waited for the test
        return Response() if passes else _response(failure(TEI, Unavailable("unhealthy")))

    async def _passes_self_test(self) -> bool:
        try:
            await asyncio.to_thread(self._dispatcher.engine.self_test, _HEALTH_TIMEOUT_S)
        except (Unavailable, DeadlineExceeded):
            return False
        return True

    async def info(self, request: Request) -> Response:
        reply = await tei.get_info(self._inference, HttpRequest(TEI, "GET", "/info"))
        return _response(reply._replace(headers={**reply.headers, **self._dispatcher.space_headers}))

    async def metrics(self, request: Request) -> Response:
        return Response(self._dispatcher.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        return _response(json_reply(to_json(instance_document())))

    async def docs_folder(self, request: Request) -> Response:
        return Response(status_code=303, headers={"location": "/docs/"})

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(instance_document(), "/api-doc/openapi.json"), headers=HEADERS)

    def direct(self, method: bytes, target: bytes) -> Answer | None:
        """Return the answer function for POSTs to TEI's routes."""
        if method != b"POST":
            return None
        path = _PATHS.get(target) or _PATHS.get(_path(target))
        return None if path is None else partial(self._answer, path)

    async def _answer(self, path: str, request: DirectRequest) -> DirectReply:
        headers = request.headers
        given = {name: value.decode("latin-1") for name, key in _CONTEXT.items() if (value := headers.get(key))}
        context = RequestContext.from_headers(given)
        CURRENT.set(context)
        TURNS_OF.set(sender_of(request.scope))
        refused = self.access.refusal("POST", path, headers) if self.access.refuses else None
        reply = refused or await self._infer(path, request)
        cors = self.access.cors(headers) if b"origin" in headers else self._cors
        fields = {**reply.headers, **self._dispatcher.space_headers, **cors, REQUEST_ID: context.request_id}
        return DirectReply(reply.status, fields, reply.body, self._dispatcher.port_budget)

    async def _infer(self, path: str, request: DirectRequest) -> HttpReply:
        """Reply to a request whose caller has the key."""
        headers, charge = request.headers, Charge(self._dispatcher.port_budget)
        content_type = _text_of(headers, _CONTENT_TYPE)
        try:
            if not has_room(request.scope):
                await room_for_reply(request.scope)
            check_content_type(content_type)
            inference = self._inference_in(_text_of(headers, _LANE)) if _LANE in headers else self._inference
            if _EXPECTED in headers:
                self._dispatcher.check_space(_text_of(headers, _EXPECTED) or None)
            body = await read_whole(request, self._dispatcher.spec.payload_limit_bytes, charge)
            if body is None:
                raise BadRequest(413, f"{_NOT_BUFFERED}: length limit exceeded")
            parsed = HttpRequest(TEI, "POST", path, headers={"content-type": content_type}, body=body)
            return await tei.ROUTES["POST", path](inference, parsed)
        except SlowClient:
            return BadRequest(408, f"{_NOT_BUFFERED}: it did not come in time").reply(_dialect(path))
        except TeimgrError as error:
            return failure(_dialect(path), error)
        except BadRequest as error:
            # TEI ignores the header, so a plain body is served despite it.
            fault = compression_fault(_text_of(headers, _CONTENT_ENCODING)) if error.status == 400 else None
            return (error if fault is None else BadRequest(400, fault)).reply(_dialect(path))
        except Exception as error:
            return failure(_dialect(path), masked(error))
        finally:
            charge.release()

    def _inference_in(self, lane: str) -> HttpInference:
        """Make the inference in the lane that the caller chose; raises InvalidInput for a word that is not a lane."""
        if not lane:
            return self._inference
        in_lane(Flag.NONE, lane)
        return self._in_lane[lane]


def create_app(port: InstancePort) -> ASGIApp:
    """Create the application of the instance port, whose dispatcher must have its engine."""
    app = Starlette(
        routes=[
            *(Route(path, port.health) for path in ("/", "/health", "/ping")),
            Route("/info", port.info),
            Route("/metrics", port.metrics),
            Route("/docs", port.docs_folder),
            Route("/docs/", port.docs),
            Route("/api-doc/openapi.json", port.openapi),
            *(Route(path, answered_directly, methods=["POST"]) for path in _POST_PATHS),
        ],
        exception_handlers={HTTPException: _without_a_body},
    )
    app.router.redirect_slashes = False
    return RequestTurns(PortMiddleware(BoundedReplies(app, _refusal), port.access), _refusal)


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """Create the application of TEI's Prometheus port in its gRPC builds: metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return BoundedReplies(Starlette(routes=[Route("/{path:path}", answer)]), _refusal)


def _refusal(scope: Scope, error: TeimgrError) -> ASGIApp:
    return _response(failure(_dialect(scope["path"]), error))


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if "Allow" in headers:  # methods in TEI's order
        headers["Allow"] = _ALLOW[request.scope["path"]]
    return Response(status_code=error.status_code, headers=headers)


def _response(reply: HttpReply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))
