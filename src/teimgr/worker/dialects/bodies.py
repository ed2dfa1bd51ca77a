"""How the dialects other than TEI's read a body, and what of it they refuse."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from teimgr.wire.http_frames import Buffer, HttpReply, HttpRequest
from teimgr.worker.exchange import Exchange, Terms
from teimgr.worker.tei.fields import Body, BodyRefused, expect_json
from teimgr.worker.tei.inference import InferenceRequest
from teimgr.worker.tei.routes import LARGE_BODY_BYTES, Route, json_reply

BodyT = TypeVar("BodyT", bound=Body)


class Refused(Exception):
    """A body that is not what the route reads: an HTTP status, a sentence, and the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def simple(kind: type[InferenceRequest]) -> Route:
    """A route that asks for one inference, whose answer is the whole reply."""

    async def answer(exchange: Exchange, request: HttpRequest, terms: Terms) -> HttpReply:
        asked = await read(exchange, request, kind)
        [reply] = await exchange.infer([asked.inference], terms)
        return json_reply(reply.payload)

    return answer


async def read(exchange: Exchange, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """The request's body.

    Raises:
        Refused: 415 it is not said to be JSON, 400 it is none, or no `kind`.
    """
    check_content_type(request)
    if len(request.body) > LARGE_BODY_BYTES:
        return await exchange.desk.off_loop(_parse, kind, request.body)
    return _parse(kind, request.body)


def check_content_type(request: HttpRequest) -> None:
    """See that the body is said to be JSON.

    Raises:
        Refused: 415.
    """
    try:
        expect_json(request.headers.get("content-type", ""))
    except BodyRefused as error:
        raise Refused(error.status, error.text) from error


def validated(kind: type[BodyT], value: Any) -> BodyT:
    """A parsed body as a `kind`.

    Raises:
        Refused: 400, with the field that is wrong.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where or 'body'}: {first['msg']}", field) from error


def _parse(kind: type[BodyT], body: Buffer) -> BodyT:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The body is no JSON: {error}") from error
    return validated(kind, value)
