"""Conversion of plain values (TOML, environment) to frozen dataclasses; faults have the path of the value.

Types are the dataclass's annotations; limits are in the `Key` of a field's metadata. Supported annotations: bool, int,
float, str, Path, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, dataclasses, and Literal of strings, also in a union
with a number.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from teimgr.errors import InvalidConfig
from teimgr.spec import DeclaredKey, InstanceKey, key_of

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class ConfigFault(NamedTuple):
    """A fault of the value at one path, such as `instances[0].port`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigFaults(InvalidConfig):
    """All faults of a table; the message has one line for each."""

    def __init__(self, *faults: ConfigFault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def refused(path: str, message: str) -> ConfigFaults:
    return ConfigFaults(ConfigFault(path, message))


def build(kind: type[T], table: object, path: str = "", *, hidden: Collection[str] = ()) -> T:
    """A whole `kind` from a table.

    Raises:
        ConfigFaults: Like `read`, and where a key without a default is absent.
    """
    faults: list[ConfigFault] = []
    values: Mapping[str, Any] = table if isinstance(table, Mapping) else {}
    try:
        values = read(kind, table, path, hidden=hidden)
    except ConfigFaults as error:
        faults += error.faults
    for field in fields(kind):  # type: ignore[arg-type]
        required = field.default is MISSING and field.default_factory is MISSING
        if required and isinstance(table, Mapping) and field.name not in values:
            faults.append(ConfigFault(join(path, field.name), "is required"))
    if faults:
        raise ConfigFaults(*faults)
    return kind(**values)


def read(kind: type[Any], table: object, path: str = "", *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The keys in `table`, typed as the fields of `kind`; absent keys stay absent, `hidden` fields are not keys.

    Raises:
        ConfigFaults: Unknown keys, wrong types, numbers outside their limits.
    """
    if not isinstance(table, Mapping):
        raise refused(path, f"must be a table (got {quoted(table)})")
    hints = _hints_of(kind)  # type: ignore[arg-type]
    known = {field.name: field for field in fields(kind) if field.name not in hidden}

    def one(name: str, value: object) -> Any:
        if name not in known:
            raise refused(join(path, name), unknown(name, value, known))
        return convert(value, hints[name], join(path, name), key_of(known[name]))

    return each(table.items(), one)


@cache
def _hints_of(kind: type[Any]) -> Mapping[str, Any]:
    """The types of the fields of a dataclass. Kept: they would be evaluated once for each instance."""
    return get_type_hints(kind)


def each(items: Iterable[tuple[K, object]], one: Callable[[K, object], V]) -> dict[K, V]:
    """`one` of every item, by its key.

    Raises:
        ConfigFaults: `one` did, with the faults of all items.
    """
    values: dict[K, V] = {}
    faults: list[ConfigFault] = []
    for key, value in items:
        try:
            values[key] = one(key, value)
        except ConfigFaults as error:
            faults += error.faults
    if faults:
        raise ConfigFaults(*faults)
    return values


def convert(value: object, annotation: Any, path: str, key: DeclaredKey | None = None) -> Any:
    """`value` typed as `annotation`.

    Raises:
        ConfigFaults: It has another type, or is outside the limits of `key`.
    """
    if annotation is Any:  # checked by its user
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):  # in a union with a Literal, strings are the Literal's
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        chosen = [kind for kind in kinds if (get_origin(kind) is Literal) is isinstance(value, str)]
        return convert(value, (chosen or kinds)[0], path, key)
    if origin is Literal:
        if value not in arguments:
            raise refused(path, f"must be one of {', '.join(map(repr, arguments))} (got {quoted(value)})")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise refused(path, f"must be a list (got {quoted(value)})")
        return tuple(each(enumerate(value), lambda i, item: convert(item, arguments[0], f"{path}[{i}]")).values())
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise refused(path, f"must be a table (got {quoted(value)})")
        return each(value.items(), lambda name, item: convert(item, arguments[1], join(path, name)))
    if is_dataclass(annotation):
        return build(annotation, value, path)  # type: ignore[arg-type]
    if isinstance(key, InstanceKey) and key.auto and isinstance(value, str):
        if value != "auto":
            raise refused(path, f'must be an integer or "auto" (got {quoted(value)})')
        return 0
    accepted, noun = _SCALARS[annotation]
    if not isinstance(value, accepted) or (isinstance(value, bool) and annotation is not bool):
        raise refused(path, f"must be {noun} (got {quoted(value)})")
    result = annotation(value)
    if key and (problem := key.out_of_range(result)):
        raise refused(path, problem)
    return result


_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str, Path), "a path"),
}


def from_text(text: str, annotation: Any) -> object:
    """The plain value of an environment variable's text for a key of this type.

    Raises:
        ValueError: It is not a number, or neither `true` nor `false`.
    """
    kinds = {annotation, *get_args(annotation)}
    if bool in kinds:
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                raise ValueError(f"must be {_SCALARS[number][1]}") from None
    return text


def unknown(name: str, value: object, known: Collection[str]) -> str:
    """The sentence that refuses a name and offers the nearest known one.

    A table is compared by its first key too, so that `[grpc] port` finds `grpc_port`.
    """
    if isinstance(value, Mapping):
        first = next(iter(value), "")
        return f"unknown table {name!r}; {nearest(f'{name}_{first}', known)}"
    return f"unknown key {name!r}; {nearest(name, known)}"


def unknown_word(word: str, known: Collection[str]) -> str:
    """The sentence that refuses one word of several and offers the nearest."""
    return f"unknown {word!r}; {nearest(word, known) if known else 'the list is empty'}"


_NEAR = 0.6  # minimum similarity, 0 to 1


def nearest(name: str, known: Collection[str]) -> str:
    """A clause with the known name nearest to `name`, or with all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def quoted(value: object) -> str:
    """A value with its type, for a message: `text 'x'`, `a table`, `number 1.5`."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    noun = {bool: "boolean", int: "integer", float: "number", str: "text"}.get(type(value), type(value).__name__)
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{noun} {shown[:80]}"
