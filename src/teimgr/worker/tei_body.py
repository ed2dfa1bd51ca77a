"""Request bodies of the TEI routes. What cannot be read is refused in plain text, as TEI's framework does."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from teimgr.listening import read_limited

JSON = "application/json"


class BodyRefused(Exception):
    """A body that is not what the route reads: an HTTP status and a plain sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class EmbedBody(BaseModel):
    """`POST /embed`. Unknown fields are ignored; only the fields marked so take null."""

    model_config = ConfigDict(strict=True, extra="ignore")

    inputs: str | list[str]
    truncate: bool | None = None
    truncation_direction: Literal["left", "Left", "right", "Right"] = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: Annotated[int, Field(ge=0, lt=2**32)] | None = None


BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(request: Request, kind: type[BodyT], limit_bytes: int) -> BodyT:
    """The request's body as a `kind`.

    Raises:
        BodyRefused: 415 wrong content type, 413 over `limit_bytes`, 400 not JSON, 422 JSON of another shape.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != JSON and not (media_type.startswith("application/") and media_type.endswith("+json")):
        raise BodyRefused(415, f"Expected request with `Content-Type: {JSON}`")
    body = await read_limited(request.stream(), limit_bytes)
    if body is None:
        raise BodyRefused(413, "Failed to buffer the request body: length limit exceeded")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyRefused(400, f"Failed to parse the request body as JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"Failed to deserialize the JSON body into the target type: {where}: {first['msg']}"
        raise BodyRefused(422, text) from error
