"""Validation of arguments before a request is sent; every refusal is a `ValidationError`.

Each function takes the argument's name for the message, `texts[3]` for the fourth of several.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from numbers import Integral, Real
from typing import Any, get_type_hints

from teimgr.config.schema import ConfigFaults, convert, quoted, unknown
from teimgr.errors import ValidationError
from teimgr.spec import FIXED, KEYS, InstanceSpec

_MAX = 2**32 - 1  # protobuf's uint32
_HINTS = get_type_hints(InstanceSpec)
_types_of = cache(get_type_hints)


def check_options(given: Mapping[str, object], kind: type) -> None:
    """Check keyword arguments against the TypedDict `kind`; strings and numbers may be None.

    Raises:
        ValidationError: A key is unknown, and the message offers the nearest one; or a value has another type.
    """
    known = _types_of(kind)
    for name, value in given.items():
        if name not in known:
            raise ValidationError(unknown(name, value, known))
        if value is not None or known[name] is bool:
            _BY_TYPE[known[name]](name, value)


def checked_keys(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Check keys of an instance by their declaration, and return them ready for JSON; None passes.

    Raises:
        ValidationError: A key is fixed, cannot have this value, or is not in `known`; then the message offers the
            nearest.
    """
    for name in given.keys() - known:
        if name in KEYS and KEYS[name].in_rest:
            raise ValidationError(f"{name}: {FIXED}")
        raise ValidationError(unknown(name, given[name], known))
    return {name: None if value is None else _checked(name, value) for name, value in given.items()}


def _checked(name: str, value: Any) -> Any:
    key = KEYS.get(name)
    if key and key.auto and value == "auto":
        return value
    try:
        value = convert(value, _HINTS.get(name, str), name, key)
    except ConfigFaults as error:
        raise ValidationError(error.message) from error
    if key and (problem := key.not_a_word(value)):
        raise ValidationError(f"{name}: {problem}")
    return value


def check_text(name: str, value: object) -> None:
    """Require a string that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise _not(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"its character {error.start} is half of a surrogate pair"
        raise ValidationError(f"{name} is not Unicode: {reason}") from error


def check_texts(name: str, values: object) -> None:
    """Require a sequence of texts; the message has the position of the first item that is not a text."""
    check_sequence(name, values)
    assert isinstance(values, Iterable)  # for the type checker
    for position, value in enumerate(values):
        check_text(f"{name}[{position}]", value)


def check_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= _MAX:
        raise _not(name, f"an integer from 0 to {_MAX}", value)


def check_limit(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise _not(name, "at least 1", value)


def check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _not(name, "a number", value)


def check_flag(name: str, value: object) -> None:
    # numpy's bool is recognised by its name, so that clients of REST alone need no numpy.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise _not(name, "true or false", value)


def check_sequence(name: str, values: object) -> None:
    """Require a sequence. A string is refused, since its letters would be taken as items."""
    if isinstance(values, str | bytes | Mapping | Set) or not (
        hasattr(values, "__len__") and hasattr(values, "__getitem__")
    ):
        raise _not(name, "a sequence", values)


def check_source(name: str, values: object) -> None:
    """Require an iterable or asynchronous iterable; a string is refused."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable | AsyncIterable):
        raise _not(name, "an iterable", values)


def _not(name: str, wanted: str, value: object) -> ValidationError:
    return ValidationError(f"{name} must be {wanted}, not {'None' if value is None else quoted(value)}")


_BY_TYPE: dict[Any, Callable[[str, object], None]] = {
    str: check_text,
    int: check_count,
    float: check_number,
    bool: check_flag,
    Sequence[str]: check_texts,
}
