"""A request's JSON body as a pydantic model, refused in the order size, type, syntax, shape."""

from __future__ import annotations

from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request

from teimgr.errors import TooLarge
from teimgr.requests import is_json, read_limited
from teimgr.typed import nearest, said

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
