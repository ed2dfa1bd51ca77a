"""HTTP bodies: field types, the strict base model, the one reader with its refusals, and parts of JSON answers.

Unions are tried from left to right and the first match wins, as TEI's own reader does: `[1, 2]` is one input of two
ids, `[]` is one of none.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, WithJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from teimgr.engine import job
from teimgr.http_server import is_json
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, refusal
from teimgr.wire.http_frames import Buffer, HttpReply

JSON = "application/json"

_U32_MAX = 2**32 - 1
_I32_MAX = 2**31 - 1


class _FirstMatch:
    """Annotation of a union: members are tried from left to right, and a mismatch is one error, not one per member."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        union = handler(source)
        assert union["type"] == "union"
        error = {"custom_error_type": "no_match", "custom_error_message": "data did not match any of its forms"}
        return {**union, "mode": "left_to_right", **error}


_FIRST_MATCH = _FirstMatch()

U32 = Annotated[int, Field(ge=0, le=_U32_MAX)]
# A list of another type fails at its first element: no report on thousands before the union's next member is tried.
Ids = Annotated[list[U32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]

InputType = TypeAliasType("InputType", Annotated[str | Ids, _FIRST_MATCH])
Input = TypeAliasType("Input", Annotated[InputType | Annotated[list[InputType], Field(fail_fast=True)], _FIRST_MATCH])
InputIds = TypeAliasType("InputIds", Annotated[Ids | Annotated[list[Ids], Field(fail_fast=True)], _FIRST_MATCH])
TokenizeInput = TypeAliasType("TokenizeInput", Annotated[str | Texts, _FIRST_MATCH])
PredictInput = TypeAliasType(
    "PredictInput",
    Annotated[str | OneOrTwo | Annotated[list[OneOrTwo], Field(min_length=1, fail_fast=True)], _FIRST_MATCH],
)
TruncationDirection = TypeAliasType(
    "TruncationDirection",
    Annotated[Literal["Left", "left", "Right", "right"], WithJsonSchema({"type": "string", "enum": ["Left", "Right"]})],
)
ModelName = Annotated[str | None, Field(description="an instance, a model id or an alias")]


class Body(BaseModel):
    """A JSON object: types are strict, unknown fields are ignored, null is accepted where a field declares it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


BodyT = TypeVar("BodyT", bound=Body)


class BadRequest(Exception):
    """A request whose body cannot be read: HTTP status, sentence, and the field at fault if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def reply(self, dialect: str) -> HttpReply:
        """The response in `dialect`; TEI's web framework answers in plain text."""
        if dialect in (TEI, TEI_OPENAI):
            return HttpReply(self.status, {"content-type": "text/plain; charset=utf-8"}, self.message.encode())
        return refusal(dialect, self.status, self.message, self.param)


class BodyFormat(NamedTuple):
    """How a body is decoded, and a dialect's sentences for one that cannot be decoded or has another shape.

    `{}` in `undecodable` is the decoder's error, in `misshapen` the place and error of the first wrong value; `root`
    names the place of the body itself.
    """

    decode: Callable[[Buffer], Any] = orjson.loads
    accepts: Callable[[str], bool] = is_json
    undecodable: str = "The body is no JSON: {}"
    misshapen: str = "{}"
    misshapen_status: int = 400
    root: str = "body"


JSON_BODY = BodyFormat()
TEI_BODY = BodyFormat(
    undecodable="Failed to parse the request body as JSON: {}",
    misshapen="Failed to deserialize the JSON body into the target type: {}",
    misshapen_status=422,
    root="",
)


def check_content_type(content_type: str, accepts: Callable[[str], bool] = is_json) -> None:
    """Raises BadRequest 415 for a Content-Type header that does not name JSON (or what `accepts`)."""
    if not accepts(content_type):
        raise BadRequest(415, f"Expected request with `Content-Type: {JSON}`")


def parse(kind: type[BodyT], body: Buffer, body_format: BodyFormat = JSON_BODY) -> BodyT:
    """Decode and validate a body.

    Raises:
        BadRequest: 400 it cannot be decoded; `misshapen_status` it is no `kind`, with the field at fault.
    """
    try:
        value = body_format.decode(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, body_format.undecodable.format(error)) from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        place = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"]
        message = body_format.misshapen.format(first_error(error, body_format.root))
        raise BadRequest(body_format.misshapen_status, message, str(place[0]) if place else None) from error


def first_error(error: ValidationError, root: str = "") -> str:
    """`place: message` of the first wrong value; `root` is the place of the value itself."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"])) or root
    return f"{place}: {first['msg']}" if place else first["msg"]


def engine_inputs(inputs: str | Sequence[Any]) -> list[job.Input]:
    """An `Input` as the engine takes it: a text or one list of ids is a single input, everything else a batch."""
    if isinstance(inputs, str) or not inputs or isinstance(inputs[0], int):
        return [_engine_input(inputs)]
    return [_engine_input(one) for one in inputs]


def text_of_parts(parts: list[Any]) -> str | None:
    """The text of a content given in parts; None where one of them is not text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "\n".join(whole) if len(whole) == len(parts) else None


def _engine_input(one: str | Sequence[int]) -> job.Input:
    if isinstance(one, str):
        return one
    # No vocabulary reaches the upper half of what TEI allows; the engine's ids are signed.
    return np.minimum(np.array(one, dtype=np.int64), _I32_MAX).astype(np.int32)


def to_json(value: object) -> bytes:
    """`value` as JSON, with numpy arrays and scalars; 32-bit floats in the fewest digits that give them again."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's usage object: every token that the model read, special ones and prompt included."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def new_id(prefix: str) -> str:
    """A random id of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def unix_time() -> int:
    """Seconds since 1970."""
    return int(time.time())


def encoded_vector(values: NDArray[Any], in_base64: bool) -> NDArray[Any] | str:
    """A vector or matrix for `to_json`: as numbers, or as base64 of its little-endian bytes."""
    if not in_base64:
        return np.ascontiguousarray(values)
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def best_first(scores: NDArray[np.float32], top_n: int | None = None) -> list[int]:
    """Rows by falling score (float32 [N]), equal ones in their order; the first `top_n` of them where it is given."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n]


def number_count(finished: job.Job) -> int:
    """How many numbers the results of a job have, a measure of the time to write them."""
    per_row = sum(0 if rows is None else rows.size for rows in (*finished.tokens_of, *finished.multi_vectors))
    entries = sum(0 if vector is None else vector.values.size for vector in finished.sparse)
    return int(finished.vectors.size + finished.scores.size + per_row + entries)
