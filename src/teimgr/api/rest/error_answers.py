"""Errors of REST as JSON: every failure is `{"error": sentence, "code": NAME, "timestamp": RFC 3339}`.

The header `Link` refers to the causes and remedies of the code (`error_help`). Only internal errors hide their text.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from functools import cache

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match

from teimgr.api.gateway.routes import dialect_of
from teimgr.api.rest.schemas import answer
from teimgr.config.schema import quoted
from teimgr.errors import Broken, Code, Internal, TeimgrError, ValidationError
from teimgr.http.docs_page import HEADERS, html_document, prose
from teimgr.observability.shown_text import in_own_words
from teimgr.observability.troubleshooting import ADVICE, meaning, repetition
from teimgr.spec import now_rfc3339
from teimgr.wire.error_bodies import OPENAI, failure, refusal
from teimgr.wire.status import STATUS, TRY_AGAIN, retry_after_s

log = logging.getLogger(__name__)

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_HTTP_CODES = {
    400: Code.VALIDATION_ERROR.name,
    401: Code.UNAUTHENTICATED.name,
    403: Code.FORBIDDEN.name,
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    408: Code.TIMEOUT.name,
    413: Code.MESSAGE_TOO_LARGE.name,
    415: "UNSUPPORTED_MEDIA_TYPE",
    422: Code.VALIDATION_ERROR.name,
}


def error_body(code: str, message: str) -> dict[str, str]:
    return {"error": message, "code": code, "timestamp": now_rfc3339()}


def error_response(error: TeimgrError) -> Response:
    """A domain error with its HTTP status; temporary ones with Retry-After where it is known how long they last."""
    status = STATUS[error.code].http
    seconds = retry_after_s(error) if status in TRY_AGAIN and error.retry_after_s is not None else None
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return _error(status, error.code.name, error.message, headers)


def install(app: FastAPI) -> None:
    app.add_exception_handler(TeimgrError, _on_domain_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_defect)


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    response = answer(error_body(code, message), status)
    response.headers.update(help_link(code) | dict(headers or {}))
    return response


async def _on_domain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TeimgrError)
    if isinstance(error, Broken):
        log.error("request failed", extra={"path": request.url.path, "code": error.code.name, "error": error.message})
    return in_dialect(request.url.path, error)


def in_dialect(path: str, error: TeimgrError) -> Response:
    """The error in the shape that clients of the path expect."""
    dialect = dialect_of(path)
    if dialect is None:
        return error_response(error)
    reply = failure(dialect, error)
    return Response(bytes(reply.body), reply.status, help_link(error.code.name) | dict(reply.headers))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, message = dict(error.headers or {}), str(error.detail)
    if error.status_code == 404:
        message = f"No route {request.url.path}{_hint(request)}"
    elif error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        if request.method == "OPTIONS":  # preflights are answered earlier
            return Response(headers={"Allow": allowed})
        headers, message = {"Allow": allowed}, f"{request.method} is not allowed here; allowed: {allowed}"
    dialect = dialect_of(request.url.path)
    if dialect is not None and dialect != OPENAI:
        reply = refusal(dialect, error.status_code, message)
        return Response(bytes(reply.body), reply.status, dict(reply.headers) | headers)
    if dialect is not None:
        code = "unknown_url" if error.status_code == 404 else None
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        response = answer(body, error.status_code)
        response.headers.update(headers)
        return response
    return _error(error.status_code, _HTTP_CODES.get(error.status_code, "HTTP_ERROR"), message, headers)


_NEAR = 0.75  # minimum similarity of each path segment, 0 to 1
_MAX_HINTED_CHARS = 80  # longer paths are not typing errors and slow to compare
_FOREIGN_PREFIXES = ("/api", "/api/v1", "/v1", "/v2")
_GENERATION = ("/completions", "/responses", "/generate", "/chat", "/messages")


def _hint(request: Request) -> str:
    """Return routes that the caller of an unknown one may have meant; empty if none is similar."""
    path = request.url.path.rstrip("/")
    if path.endswith(_GENERATION):
        return ": teimgr generates no texts; it embeds, reranks and classifies them"
    if len(path) > _MAX_HINTED_CHARS:
        return ""
    near = max(_near_routes(request, path), default=(0.0, ""))[1]
    return f"; did you mean {near}?" if near else ""


def _near_routes(request: Request, path: str) -> Iterator[tuple[float, str]]:
    """Routes that are like the path part by part, or like it without a prefix of other products, and how near."""
    given = path.split("/")
    for template in {str(getattr(route, "path", "")) for route in request.app.routes}:
        if path.removesuffix(template) in _FOREIGN_PREFIXES:
            yield 1.0, template
        parts = template.split("/")
        if len(parts) != len(given):
            continue
        meant = [mine if part.startswith("{") else part for mine, part in zip(given, parts, strict=True)]
        ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(given, meant, strict=True)]
        if min(ratios) >= _NEAR and meant != given:
            yield sum(ratios) / len(ratios), "/".join(meant)


def _allowed(request: Request) -> list[str]:
    """The verbs for which the request's path has a route; HEAD goes with GET."""
    found: set[str] = set()
    for route in request.app.routes:
        methods: set[str] = getattr(route, "methods", None) or set()
        if not methods <= found and route.matches(request.scope)[0] is not Match.NONE:
            found |= methods | ({"HEAD"} if "GET" in methods else set())
    return [verb for verb in VERBS if verb in found]


async def _on_invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(
        f"{problem['loc'][1]}: {in_own_words(problem['msg'])} (got {quoted(problem['input'])})"
        for problem in error.errors()
    )
    return in_dialect(request.url.path, ValidationError(problems))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return _error(STATUS[Code.CANCELLED].http, Code.CANCELLED.name, "The caller disconnected")


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this reply, and uvicorn logs its traceback.
    return error_response(Internal("Internal error: see the daemon's log"))


PATH = "/docs/errors"
router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def error_help() -> HTMLResponse:
    return HTMLResponse(_page(), headers=HEADERS)


def help_link(code: str) -> dict[str, str]:
    """The header `Link` of a reply with this code; none for a code that the page does not have."""
    return {"Link": f'<{PATH}#{code.lower()}>; rel="help"'} if code in Code.__members__ else {}


@cache
def _page() -> str:
    body = "<h1>Errors</h1>" + "".join(_section(code) for code in sorted(Code, key=lambda each: each.name))
    return html_document("Errors", body)


def _section(code: Code) -> str:
    advice = ADVICE[code]
    lists = "".join(
        f"<p>{title}</p><ul>{''.join(f'<li>{prose(sentence)}</li>' for sentence in sentences)}</ul>"
        for title, sentences in (("Causes", advice.causes), ("Remedies", advice.remedies))
    )
    text = f"<p>{prose(meaning(code))} {prose(repetition(code))}</p>"
    return f'<section id="{code.name.lower()}"><h2>{code.name}</h2>{text}{lists}</section>'
