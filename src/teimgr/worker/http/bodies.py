"""What request bodies are made of: the unions of TEI's dialect, and how a body is read or refused.

Unions are tried from left to right and the first match wins, as TEI's own reader does: `[1, 2]` is one input of two
ids, `[]` is one of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, WithJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from teimgr.engine import job
from teimgr.http_server import is_json

JSON = "application/json"

_U32_MAX = 2**32 - 1
_I32_MAX = 2**31 - 1


class _FirstMatch:
    """A union whose members are tried from left to right; what fits none of them is refused in one sentence."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        union = handler(source)
        assert union["type"] == "union"
        refusal = {"custom_error_type": "no_match", "custom_error_message": "data did not match any of its forms"}
        return {**union, "mode": "left_to_right", **refusal}


_FIRST_MATCH = _FirstMatch()

U32 = Annotated[int, Field(ge=0, le=_U32_MAX)]
# A list that is none fails at its first element: the union's next member is tried without a report on thousands.
Ids = Annotated[list[U32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]

InputType = TypeAliasType("InputType", Annotated[str | Ids, _FIRST_MATCH])
Input = TypeAliasType("Input", Annotated[InputType | Annotated[list[InputType], Field(fail_fast=True)], _FIRST_MATCH])
InputIds = TypeAliasType("InputIds", Annotated[Ids | Annotated[list[Ids], Field(fail_fast=True)], _FIRST_MATCH])
TokenizeInput = TypeAliasType("TokenizeInput", Annotated[str | Texts, _FIRST_MATCH])
PredictInput = TypeAliasType(
    "PredictInput",
    Annotated[
        str | OneOrTwo | Annotated[list[OneOrTwo], Field(min_length=1, fail_fast=True)],
        _FIRST_MATCH,
    ],
)
TruncationDirection = TypeAliasType(
    "TruncationDirection",
    Annotated[Literal["Left", "left", "Right", "right"], WithJsonSchema({"type": "string", "enum": ["Left", "Right"]})],
)


class Body(BaseModel):
    """A JSON object of the dialect: types are strict, unknown fields ignored, null is taken where a field says so."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class BodyRefused(Exception):
    """A body that is not what the route reads: an HTTP status and a plain sentence, as TEI's framework answers."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


BodyT = TypeVar("BodyT", bound=Body)


def expect_json(content_type: str) -> None:
    """See that a body is said to be JSON.

    Raises:
        BodyRefused: 415, it is not.
    """
    if not is_json(content_type):
        raise BodyRefused(415, f"Expected request with `Content-Type: {JSON}`")


def parse(kind: type[BodyT], body: bytes | bytearray | memoryview) -> BodyT:
    """The request's body as a `kind`.

    Raises:
        BodyRefused: 400 not JSON, 422 JSON of another shape.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyRefused(400, f"Failed to parse the request body as JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        text = f"Failed to deserialize the JSON body into the target type: {first_fault(error)}"
        raise BodyRefused(422, text) from error


def first_fault(error: ValidationError) -> str:
    """Where a value has another shape than it should, and what is wrong there."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def engine_inputs(inputs: str | Sequence[Any]) -> list[job.Input]:
    """An `Input` as the engine takes it: a text or one list of ids is a single input, everything else a batch."""
    if isinstance(inputs, str) or not inputs or isinstance(inputs[0], int):
        return [_engine_input(inputs)]
    return [_engine_input(one) for one in inputs]


def text_lists(inputs: str | list[str] | list[list[str]]) -> tuple[list[list[str]], bool]:
    """A `PredictInput` as one or two texts per input, and whether it was sent as a batch."""
    if isinstance(inputs, str):
        return [[inputs]], False
    batch = [one for one in inputs if isinstance(one, list)]
    return (batch, True) if batch else ([[one for one in inputs if isinstance(one, str)]], False)


def id_lists(ids: list[int] | list[list[int]]) -> list[list[int]]:
    """An `InputIds` as a list of ids per text; an empty list is a text of none."""
    batch = [one for one in ids if isinstance(one, list)]
    return batch or [[one for one in ids if isinstance(one, int)]]


def _engine_input(one: str | Sequence[int]) -> job.Input:
    if isinstance(one, str):
        return one
    # No vocabulary reaches the upper half of what the dialect allows; the engine's ids are signed.
    return np.minimum(np.array(one, dtype=np.int64), _I32_MAX).astype(np.int32)
