"""Validates bodies of any size with pydantic: lists fail at their first fault, and long ones are validated in slices.

A call of pydantic holds the GIL until it returns or calls Python. `_large_validator` makes it call Python for each
list, which validates the list in slices, so other threads get the GIL in between.

Token ids in bodies are used as the model's, refused, or decoded to texts by tiktoken (`token_inputs`). Clients of
OpenAI may send ids of OpenAI's tokenizer. Ids do not show their tokenizer: every vocabulary has tokens with the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ValidationError, create_model
from pydantic_core import InitErrorDetails, PydanticCustomError, SchemaValidator, core_schema

from teimgr.engine.job import Input
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.spec import TOKEN_INPUTS, WorkerSpec

ModelT = TypeVar("ModelT", bound=BaseModel)
# Elements of a list validated in one call: some milliseconds if each is an object.
_SLICE = 512
# Keys of a schema that contain no schemas.
_OPAQUE = frozenset({"cls", "metadata", "serialization", "default", "function", "config"})


def fail_fast(schema: Any) -> None:
    """Change every list in a core schema, in place, to report its first fault only: clients see no other,
    and a million faults take minutes and gigabytes."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for key, value in schema.items():
            if key not in _OPAQUE:
                fail_fast(value)
    elif isinstance(schema, (list, tuple)):
        for one in schema:
            fail_fast(one)


def validated(kind: type[ModelT], value: Any) -> ModelT:
    """A large body, for a thread: like `kind.model_validate`, with the first error at the same place in the same words.

    Raises:
        ValidationError: it is not a `kind`.
    """
    found: ModelT = _large_validator(kind).validate_python(value)
    return found


@cache
def _large_validator(kind: type[BaseModel]) -> SchemaValidator:
    return SchemaValidator(_with_slices(kind.__pydantic_core_schema__))


def _with_slices(schema: Any) -> Any:
    """A copy of a core schema in which lists are validated by `_validated_list`."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_with_slices, schema))
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in _OPAQUE else _with_slices(value) for key, value in schema.items()}
    if copy.get("type") == "model":
        copy["cls"] = _unbuilt(copy["cls"])
    if copy.get("type") != "list":
        return copy
    ref = copy.pop("ref", None)
    validate = partial(_validated_list, copy.get("max_length"))
    return core_schema.no_info_wrap_validator_function(validate, cast(core_schema.CoreSchema, copy), ref=ref)


@cache
def _unbuilt(kind: type[BaseModel]) -> type[BaseModel]:
    """A subclass without a validator: pydantic would use that of `kind` instead of building the schema it is given."""
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __cls_kwargs__={"defer_build": True})


def _validated_list(max_length: int | None, value: Any, validate: Callable[[Any], Any]) -> Any:
    if type(value) is not list or len(value) <= _SLICE or (max_length is not None and len(value) > max_length):
        return validate(value)
    found: list[Any] = []
    for at in range(0, len(value), _SLICE):
        try:
            found += validate(value[at : at + _SLICE])
        except ValidationError as error:
            raise _moved(error, at) from None
    return found


def _moved(error: ValidationError, by: int) -> ValidationError:
    """The error of a slice that begins at element `by`, as one of the list."""
    lines = [
        InitErrorDetails(
            type=PydanticCustomError(line["type"], line["msg"]),
            loc=(cast(int, line["loc"][0]) + by, *line["loc"][1:]),
            input=line["input"],
        )
        for line in error.errors(include_url=False, include_context=False)
    ]
    return ValidationError.from_exception_data(error.title, lines)


ACCEPT, REFUSE, TIKTOKEN = TOKEN_INPUTS


def check_token_inputs(spec: WorkerSpec) -> None:
    """Load what `token_inputs` needs; may fetch the encoding from the network.

    Raises:
        InvalidConfig: tiktoken is not installed, or does not have the encoding.
    """
    if spec.token_inputs == TIKTOKEN:
        _encoding(spec.token_encoding)


def has_token_ids(inputs: Sequence[Input]) -> bool:
    return any(isinstance(one, np.ndarray) for one in inputs)


def read_token_ids(inputs: Sequence[Input], spec: WorkerSpec) -> list[Input]:
    """Return the inputs with ids (int32 [tokens]) decoded to texts; bytes cut at the edge of a chunk become U+FFFD.

    Blocks for as long as decoding takes.

    Raises:
        InvalidInput: the instance refuses ids, or the encoding lacks one of them; with the input's index.
    """
    found: list[Input] = []
    for place, one in enumerate(inputs):
        if isinstance(one, np.ndarray) and len(one):
            try:
                one = _text(one.view(np.uint32).tolist(), spec)
            except InvalidInput as error:
                if len(inputs) > 1:
                    error.name_input(place)
                raise
        found.append(one)
    return found


def _text(ids: list[int], spec: WorkerSpec) -> str:
    if spec.token_inputs == REFUSE:
        raise InvalidInput(
            f"Input validation error: token ids are refused here (token_inputs of instance '{spec.name}'): send texts"
        )
    try:
        text: str = _encoding(spec.token_encoding).decode(ids)
    except (KeyError, OverflowError) as error:
        raise InvalidInput(
            f"Input validation error: `inputs` has a token id that {spec.token_encoding} does not have: {error}"
        ) from error
    return text


@cache
def _encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise InvalidConfig('token_inputs = "tiktoken": install teimgr with the extra `tiktoken`') from error
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # of any type: from the registry, the network or the cache
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"token_encoding: tiktoken cannot load {name!r}: {reason}") from error
