"""JSON over HTTP for REST: responses by orjson, one error shape, bodies as pydantic models, server-sent events.

Every failure is `{"error": sentence, "code": NAME, "timestamp": RFC 3339}`: a domain error, an invalid body, an unknown
route, an internal error. Only the last hides its text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, TypeVar

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match

from teimgr.config.schema import nearest, quoted
from teimgr.errors import Broken, Code, Internal, TeimgrError, TooLarge
from teimgr.http_server import is_json, read_limited
from teimgr.spec import now_rfc3339
from teimgr.wire.status import STATUS

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
BODY_LIMIT_BYTES = 2 * 2**20
_PROBLEMS_SHOWN = 5

_HTTP_CODES = {
    400: Code.VALIDATION_ERROR.name,
    401: Code.UNAUTHENTICATED.name,
    403: Code.FORBIDDEN.name,
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: Code.MESSAGE_TOO_LARGE.name,
    415: "UNSUPPORTED_MEDIA_TYPE",
    422: Code.VALIDATION_ERROR.name,
}

Body = TypeVar("Body", bound=BaseModel)


def answer(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_body(code: str, message: str) -> dict[str, str]:
    return {"error": message, "code": code, "timestamp": now_rfc3339()}


def error_response(error: TeimgrError) -> Response:
    """A domain error with its HTTP status; temporary ones with Retry-After."""
    status = STATUS[error.code].http
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return _error(status, error.code.name, error.message, headers)


def install(app: FastAPI) -> None:
    app.add_exception_handler(TeimgrError, _on_domain_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_defect)


async def read_json(request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES) -> Body:
    """The request's body, validated as `kind`.

    Raises:
        TooLarge: more than `limit_bytes`.
        HTTPException: 415 for another content type, 400 for invalid JSON, 422 for another shape.
    """
    content_type = request.headers.get("content-type", "")
    if not is_json(content_type):
        raise HTTPException(415, f"Expected request with `Content-Type: application/json` (got {quoted(content_type)})")
    text = await read_limited(request.stream(), limit_bytes)
    if text is None:
        raise TooLarge(f"Failed to buffer the request body: the limit is {limit_bytes} bytes")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"Failed to parse the request body as JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = "; ".join(_problem(item, kind) for item in error.errors()[:_PROBLEMS_SHOWN])
        raise HTTPException(422, f"Validation error: {problems}") from error


def has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def json_body(kind: type[BaseModel], *, required: bool) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `kind` itself."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    response = answer(error_body(code, message), status)
    response.headers.update(headers or {})
    return response


def _problem(item: ErrorDetails, kind: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown field {path!r}; {nearest(path, kind.model_fields)}"
    if item["type"] == "missing":
        return f"missing field `{path}`"
    return f"{path or 'body'}: {item['msg']} (got {quoted(item['input'])})"


async def _on_domain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TeimgrError)
    if isinstance(error, Broken):
        log.error("request failed", extra={"path": request.url.path, "code": error.code.name, "error": error.message})
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, message = dict(error.headers or {}), str(error.detail)
    if error.status_code == 404:
        message = f"No route {request.url.path}"
    elif error.status_code == 405:
        allowed = ", ".join(verb for verb in VERBS if _is_allowed(request, verb))
        headers, message = {"Allow": allowed}, f"{request.method} is not allowed here; allowed: {allowed}"
    return _error(error.status_code, _HTTP_CODES.get(error.status_code, "HTTP_ERROR"), message, headers)


def _is_allowed(request: Request, verb: str) -> bool:
    """Whether the request's path has a route for this verb; HEAD goes with GET."""
    scope: dict[str, Any] = dict(request.scope, method="GET" if verb == "HEAD" else verb)
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


async def _on_invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in error.errors())
    return _error(400, Code.VALIDATION_ERROR.name, f"Validation error: {problems}")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return _error(STATUS[Code.CANCELLED].http, Code.CANCELLED.name, "The caller went away")


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it with its traceback.
    return error_response(Internal("Internal error: the daemon's log has the details"))


EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 15.0
# In OpenAPI 3.1 the schema of a stream is that of each event.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_COMMENT = b": still here\n\n"


class Event(NamedTuple):
    """One event; `data` is any JSON value. A client that reconnects sends the last `id` as Last-Event-ID."""

    name: str
    data: object
    id: int | None = None

    def encode(self) -> bytes:
        """The event on the wire; orjson writes no line ends, so one `data` line suffices."""
        id = b"" if self.id is None else b"id: %d\n" % self.id
        return b"%bevent: %b\ndata: %b\n\n" % (id, self.name.encode(), orjson.dumps(self.data))


def wants_events(request: Request) -> bool:
    """Whether the caller prefers events to one answer."""
    return EVENT_STREAM in request.headers.get("accept", "")


def event_stream(events: AsyncGenerator[Event], keep_alive_s: float = KEEP_ALIVE_S) -> StreamingResponse:
    """A response that sends `events`, and a comment after each `keep_alive_s` without one.

    The comments keep proxies from closing an idle stream, and detect that the client is gone.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_encoded(events, keep_alive_s), media_type=EVENT_STREAM, headers=headers)


async def _encoded(events: AsyncGenerator[Event], keep_alive_s: float) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=keep_alive_s)
                if not done:
                    yield _COMMENT
                    continue
                event = coming.result()
                if event is None:
                    return
                yield event.encode()
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
