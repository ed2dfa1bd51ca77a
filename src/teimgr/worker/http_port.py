"""The HTTP application of an instance port: TEI's routes, CORS, the API key, health, metrics and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.engine.job import Lane
from teimgr.errors import Code, DeadlineExceeded, Forbidden, TeimgrError, Unavailable
from teimgr.http.bodies import (
    HeldResponse,
    SlowClient,
    charge_body,
    compression_fault,
    foreign_page,
    read_body,
    unless_hung_up,
)
from teimgr.http.byte_budget import Charge
from teimgr.http.direct import Answer, DirectReply, DirectRequest
from teimgr.http.docs_page import HEADERS, page
from teimgr.http.replies import BoundedReplies
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
from teimgr.wire.frames import Buffer, Flag, HttpReply, HttpRequest, in_lane
from teimgr.wire.status import STATUS
from teimgr.worker.dialects import tei
from teimgr.worker.dialects.openapi import instance_document
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http_inference import BadRequest, HttpHandler, HttpInference, check_content_type, json_reply, to_json
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
        named = cors_headers(self._origins, headers.get("origin")) | {REQUEST_ID: context.request_id}
        added = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if b"%" in scope["raw_path"]:  # TEI matches a path as it was sent
            scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        app = self._app
        if scope["method"] == "OPTIONS":
            allow = _ALLOW.get(scope["path"])
            app = Response(headers=_PREFLIGHT if allow is None else _PREFLIGHT | {"allow": allow})
        elif not _is_public(scope) and not self._spec.accepts(headers.get("authorization", "").encode("latin-1")):
            app = Response(status_code=401)
        elif page := self._foreign_page(scope["method"], headers):
            refused = Forbidden(f"a web page ({page}) may only read here: its origin is not in --cors-allow-origin")
            app = _refusal(scope, refused)
        with use_context(context):
            await app(scope, receive, send_with_headers)

    def _foreign_page(self, method: str, headers: Mapping[str, str]) -> str | None:
        """A POST that needs no preflight would else run, although the page could not read its reply."""
        every_page_may = not self._origins or "*" in self._origins
        return None if every_page_may or method in ("GET", "HEAD") else foreign_page(headers, self._origins)


def cors_headers(origins: Collection[str], origin: str | None) -> dict[str, str]:
    """The CORS headers of a response to a page of `origin`, where those of `origins` may read it, or all."""
    if not origins or "*" in origins:
        return _VARY | {_ALLOW_ORIGIN: "*"}
    return _VARY | ({_ALLOW_ORIGIN: origin} if origin is not None and origin in origins else {})


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return scope["method"] in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)


_HEALTH_TIMEOUT_S = 5.0
# Of these a request context is made.
_CONTEXT = (REQUEST_ID, TRACEPARENT, TRACESTATE)
# The headers that inference reads.
_CONTENT_TYPE, _CONTENT_ENCODING = "content-type", "content-encoding"
_READ = {name: name.encode() for name in (_CONTENT_TYPE, _CONTENT_ENCODING, LANE_KEY)}
# The routes of inference by the target of a request.
_PATHS = {path.encode(): path for path in _POST_PATHS}
_NOT_BUFFERED = "Failed to buffer the request body"
_TEXT = "text/plain; charset=utf-8"

Endpoint = Callable[[Request], Awaitable[Response]]


class InstancePort:
    """Endpoints of the instance port; `post` makes one of a route of TEI, `direct` answers most of their requests."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._inference = HttpInference(dispatcher)
        self._in_lane = {lane.value: HttpInference(dispatcher, lane) for lane in Lane}
        self._self_test: asyncio.Task[bool] | None = None  # of the last that asked for health
        self._cors = cors_headers(dispatcher.spec.cors_allow_origin, None)

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the engine's self-test has passed."""
        if self._self_test is None or self._self_test.done():
            self._self_test = asyncio.create_task(self._passes_self_test())
        passes = await asyncio.shield(self._self_test)  # one for all that ask at a time: each holds a thread
        return Response() if passes else _response(failure(TEI, Unavailable("unhealthy")))

    async def _passes_self_test(self) -> bool:
        try:
            await asyncio.to_thread(self._dispatcher.engine.self_test, _HEALTH_TIMEOUT_S)
        except (Unavailable, DeadlineExceeded):
            return False
        return True

    async def info(self, request: Request) -> Response:
        return _response(await tei.get_info(self._inference, HttpRequest(TEI, "GET", "/info")))

    async def metrics(self, request: Request) -> Response:
        return Response(self._dispatcher.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        return _response(json_reply(to_json(instance_document())))

    async def docs_folder(self, request: Request) -> Response:
        return Response(status_code=303, headers={"location": "/docs/"})

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(instance_document(), "/api-doc/openapi.json"), headers=HEADERS)

    def post(self, path: str, route: HttpHandler) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            headers = {name: request.headers.get(name, "") for name in _READ}

            async def read(charge: Charge) -> Buffer | None:
                return await read_body(request, self._dispatcher.spec.payload_limit_bytes, charge)

            async def inferred(inference: HttpInference, parsed: HttpRequest) -> HttpReply:
                return await unless_hung_up(route(inference, parsed), request.receive)

            reply = await self._answer(path, headers, read, inferred)
            return HeldResponse(reply.body, reply.status, reply.headers, self._dispatcher.port_budget)

        return endpoint

    def direct(self, request: DirectRequest) -> Answer | None:
        """Answers a POST to a route of TEI that came whole and with the right key, by no web page."""
        path = _PATHS.get(request.target)
        if path is None or request.is_of_page:
            return None
        if not self._dispatcher.spec.accepts(request.headers.get(b"authorization", b"")):
            return None
        return partial(self._answer_whole, path, request)

    async def _answer_whole(self, path: str, request: DirectRequest) -> DirectReply:
        given = {name: value.decode("latin-1") for name in _CONTEXT if (value := request.headers.get(name.encode()))}
        context = RequestContext.from_headers(given)
        CURRENT.set(context)

        async def read(charge: Charge) -> Buffer | None:
            if len(request.body) > self._dispatcher.spec.payload_limit_bytes:
                return None
            await charge_body(charge, len(request.body))
            return request.body

        headers = {name: request.headers.get(key, b"").decode("latin-1") for name, key in _READ.items()}
        reply = await self._answer(path, headers, read, tei.ROUTES["POST", path])
        return DirectReply(reply.status, {**reply.headers, **self._cors, REQUEST_ID: context.request_id}, reply.body)

    def _inference_in(self, lane: str) -> HttpInference:
        """Inference in the lane that the caller chose; raises InvalidInput for a word that is not a lane."""
        if not lane:
            return self._inference
        in_lane(Flag.NONE, lane)
        return self._in_lane[lane]

    async def _answer(
        self,
        path: str,
        headers: Mapping[str, str],
        read: Callable[[Charge], Awaitable[Buffer | None]],
        infer: Callable[[HttpInference, HttpRequest], Awaitable[HttpReply]],
    ) -> HttpReply:
        """The reply to a request with the `headers` of `_READ`, whose body is what `read` gives, or None if that is
        too long."""
        dialect = TEI_OPENAI if path in tei.OPENAI_PATHS else TEI
        charge = Charge(self._dispatcher.port_budget)
        try:
            check_content_type(headers[_CONTENT_TYPE])
            inference = self._inference_in(headers[LANE_KEY])
            body = await read(charge)
            if body is None:
                raise BadRequest(413, f"{_NOT_BUFFERED}: length limit exceeded")
            return await infer(inference, HttpRequest(TEI, "POST", path, headers=headers, body=body))
        except SlowClient:
            return BadRequest(408, f"{_NOT_BUFFERED}: it did not come in time").reply(dialect)
        except TeimgrError as error:
            return failure(dialect, error)
        except BadRequest as error:
            # TEI ignores the header, so a body that is plain despite it is served.
            fault = compression_fault(headers[_CONTENT_ENCODING]) if error.status == 400 else None
            return (error if fault is None else BadRequest(400, fault)).reply(dialect)
        except ClientDisconnect:  # while it sent its body; uvicorn discards the response
            return HttpReply(STATUS[Code.CANCELLED].http, {}, b"")
        except Exception as error:
            return failure(dialect, masked(error))
        finally:
            charge.release()


def create_app(port: InstancePort, spec: WorkerSpec) -> ASGIApp:
    """The application of the instance port, whose dispatcher must have its engine."""
    app = Starlette(
        routes=[
            *(Route(path, port.health) for path in ("/", "/health", "/ping")),
            Route("/info", port.info),
            Route("/metrics", port.metrics),
            Route("/docs", port.docs_folder),
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
    return PortMiddleware(BoundedReplies(app, _refusal), spec)


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return BoundedReplies(Starlette(routes=[Route("/{path:path}", answer)]), _refusal)


def _refusal(scope: Scope, error: TeimgrError) -> ASGIApp:
    return _response(failure(TEI_OPENAI if scope["path"] in tei.OPENAI_PATHS else TEI, error))


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if "Allow" in headers:  # in TEI's order
        headers["Allow"] = _ALLOW[request.scope["path"]]
    return Response(status_code=error.status_code, headers=headers)


def _response(reply: HttpReply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))
