"""How REST says yes and no: JSON by orjson, and one shape for every failure.

A failure is `{"error": sentence, "code": NAME, "timestamp": RFC 3339}` whatever went wrong: a domain error, a body that
is no JSON, an unknown route, a defect of ours. Only the last hides its text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from teimgr.clock import now_rfc3339
from teimgr.config.schema import nearest, said
from teimgr.errors import Broken, Code, Internal, TeimgrError, TooLarge
from teimgr.http_server import is_json, read_limited
from teimgr.wire.status import STATUS

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

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


def answer(value: object, status: int = 200) -> Response:
    """`value` as a JSON response."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The one shape of a failure."""
    response = answer({"error": message, "code": code, "timestamp": now_rfc3339()}, status)
    response.headers.update(headers or {})
    return response


def error_response(error: TeimgrError) -> Response:
    """A domain error as its row of the status table says; those of the moment say when to come back."""
    status = STATUS[error.code].http
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return refusal(status, error.code.name, error.message, headers)


def install(app: FastAPI) -> None:
    """Give `app` one handler per family of failures."""
    app.add_exception_handler(TeimgrError, _domain)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _parameters)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _defect)


async def _domain(request: Request, error: Exception) -> Response:
    if not isinstance(error, TeimgrError):
        raise error
    if isinstance(error, Broken):
        log.error("request failed", extra={"path": request.url.path, "code": error.code.name, "error": error.message})
    return error_response(error)


async def _http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers, message = dict(error.headers or {}), str(error.detail)
    if error.status_code == 404:
        message = f"No route {request.url.path}"
    elif error.status_code == 405:
        allowed = ", ".join(_verbs_of(request))
        headers, message = {"Allow": allowed}, f"{request.method} is not allowed here; allowed: {allowed}"
    return refusal(error.status_code, _HTTP_CODES.get(error.status_code, "HTTP_ERROR"), message, headers)


async def _parameters(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    problems = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in error.errors())
    return refusal(400, Code.VALIDATION_ERROR.name, f"Validation error: {problems}")


async def _gone(request: Request, error: Exception) -> Response:
    return refusal(STATUS[Code.CANCELLED].http, Code.CANCELLED.name, "The caller went away")


async def _defect(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it with its traceback.
    return error_response(Internal("Internal error: the log of the daemon says more"))


def _verbs_of(request: Request) -> list[str]:
    """The verbs that this path does answer; HEAD goes with GET."""

    def answers(verb: str) -> bool:
        scope: dict[str, Any] = dict(request.scope, method="GET" if verb == "HEAD" else verb)
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [verb for verb in VERBS if answers(verb)]


BODY_LIMIT_BYTES = 2 * 2**20
PROBLEMS_SAID = 5

Body = TypeVar("Body", bound=BaseModel)


async def read_json(request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES) -> Body:
    """The body as `kind`.

    Raises:
        TooLarge: more than `limit_bytes`.
        HTTPException: 415 for another content type, 400 for what is no JSON, 422 for another shape.
    """
    _check_content_type(request)
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
        problems = "; ".join(_problem(item, kind) for item in error.errors()[:PROBLEMS_SAID])
        raise HTTPException(422, f"Validation error: {problems}") from error


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if not is_json(given):
        raise HTTPException(415, f"Expected request with `Content-Type: application/json` (got {said(given)})")


def _problem(item: ErrorDetails, kind: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown field {path!r}; {nearest(path, kind.model_fields)}"
    if item["type"] == "missing":
        return f"missing field `{path}`"
    return f"{path or 'body'}: {item['msg']} (got {said(item['input'])})"
