"""serde's types over serde_json's reader: strings, options, lists, structs and enums, with the faults of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from teimgr.wire.json_scan import Steps
from teimgr.worker.dialects.serde_json import Fault, Path, Reader, is_digit
from teimgr.worker.dialects.serde_text import shown


class Type(Protocol):
    """A type of serde; both methods raise Fault."""

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        """The value at the reader's position."""

    def of_value(self, value: Any) -> Any:
        """The value of parsed JSON, as `serde_json::from_value` takes it; a fault has neither path nor position."""


class Text:
    """`String`."""

    _EXPECTED = "a string"

    def read(self, reader: Reader, path: Path) -> Steps[str]:
        with reader.within(path):
            if (yield from reader.value_start()) != ord('"'):
                raise reader.wrong_type(self._EXPECTED)
            return reader.string()

    def of_value(self, value: Any) -> str:
        if not isinstance(value, str):
            raise Fault(f"invalid type: {shown(value)}, expected {self._EXPECTED}")
        return value


class Bool:
    """`bool`."""

    _EXPECTED = "a boolean"

    def read(self, reader: Reader, path: Path) -> Steps[bool]:
        with reader.within(path):
            first = yield from reader.value_start()
            if first not in b"tf":
                raise reader.wrong_type(self._EXPECTED)
            return bool(reader.ident(first))

    def of_value(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise Fault(f"invalid type: {shown(value)}, expected {self._EXPECTED}")
        return value


@dataclass(frozen=True)
class Unsigned:
    """`u32` or `usize`."""

    name: str
    end: int

    def read(self, reader: Reader, path: Path) -> Steps[int]:
        with reader.within(path):
            first = yield from reader.value_start()
            if first != ord("-") and not is_digit(first):
                raise reader.wrong_type(self.name)
            return self.of_value(reader.number())

    def of_value(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Fault(f"invalid type: {shown(value)}, expected {self.name}")
        if not 0 <= value < self.end:
            raise Fault(f"invalid value: {shown(value)}, expected {self.name}")
        return value


@dataclass(frozen=True)
class Optional:
    """`Option`: null is None."""

    inner: Type

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        with reader.within(path):
            if reader.after_space() == ord("n"):
                return reader.ident(ord("n"))
        return (yield from self.inner.read(reader, path))

    def of_value(self, value: Any) -> Any:
        return None if value is None else self.inner.of_value(value)


@dataclass(frozen=True)
class ListOf:
    """`Vec`."""

    inner: Type

    def read(self, reader: Reader, path: Path) -> Steps[list[Any]]:
        values: list[Any] = []
        with reader.within(path):
            if (yield from reader.value_start()) != ord("["):
                raise reader.wrong_type("a sequence")
            with reader.nested(reader.end_list):
                while reader.has_element(len(values)):
                    values.append((yield from self.inner.read(reader, (*path, len(values)))))
        return values

    def of_value(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Fault(f"invalid type: {shown(value)}, expected a sequence")
        return [self.inner.of_value(one) for one in value]


class AnyValue:
    """`serde_json::Value`."""

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        return (yield from _AnyReader(reader).read(path))

    def of_value(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class _AnyReader:
    """Values with keys in the path of serde_path_to_error, unlike those of an untagged enum."""

    reader: Reader

    def read(self, path: Path) -> Steps[Any]:
        reader = self.reader
        with reader.within(path):
            first = yield from reader.value_start()
            if first == ord("["):
                values: list[Any] = []
                with reader.nested(reader.end_list):
                    while reader.has_element(len(values)):
                        values.append((yield from self.read((*path, len(values)))))
                return values
            if first == ord("{"):
                fields: dict[str, Any] = {}
                count = 0
                with reader.nested(reader.end_object):
                    while (key := reader.key_at(path, count)) is not None:
                        reader.colon()
                        fields[key] = yield from self.read((*path, key))
                        count += 1
                return fields
            return (yield from reader.any_value(path))


class Unread:
    """A field that TEI lacks and skips. A value that the skip accepts but orjson does not is read as its text."""

    _LONGEST = 64

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        with reader.within(path):
            yield from reader.value_start()
        start = reader.at
        yield from reader.skip(path)
        text = reader.body[start : reader.at]
        with suppress(ValueError):
            if len(text) <= self._LONGEST:
                return orjson.loads(text)
        return text.decode(errors="replace")

    def of_value(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Variants:
    """An enum without fields: a string, or `{"name": null}`."""

    names: Sequence[str]

    def read(self, reader: Reader, path: Path) -> Steps[str]:
        with reader.within(path):
            first = yield from reader.value_start()
            if first == ord('"'):
                return self._variant(reader, path)
            if first != ord("{"):
                raise reader.next_fault("expected value")
            with reader.nested(lambda: None):
                if (yield from reader.value_start()) != ord('"'):
                    raise reader.wrong_type("variant identifier")
                name = self._variant(reader, path)
                reader.colon()
                with reader.within((*path, name)):
                    yield from self._unit(reader)
            reader.close_object()
            return name

    def _variant(self, reader: Reader, path: Path) -> str:
        with reader.within(path):
            return self.of_value(reader.string())

    @staticmethod
    def _unit(reader: Reader) -> Steps[None]:
        if (yield from reader.value_start()) != ord("n"):
            raise reader.wrong_type("unit")
        reader.ident(ord("n"))

    def of_value(self, value: Any) -> str:
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value))
        elif isinstance(value, dict):
            raise Fault("invalid value: map, expected map with a single key")
        if not isinstance(value, str):
            raise Fault(f"invalid type: {shown(value)}, expected string or map")
        if value not in self.names:
            known = [f"`{name}`" for name in self.names]
            expected = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
            raise Fault(f"unknown variant `{value}`, expected {expected}")
        return value


@dataclass(frozen=True)
class Untagged:
    """An untagged enum: any value that `matches` one of its variants."""

    name: str
    matches: Callable[[Any], bool]

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        value = yield from reader.any_value(path)
        try:
            return self.of_value(value)
        except Fault as fault:
            fault.set_path(path)
            raise

    def of_value(self, value: Any) -> Any:
        if not self.matches(value):
            raise Fault(f"data did not match any variant of untagged enum {self.name}")
        return value


class StructField(NamedTuple):
    """A field of a struct.

    If it `has_default`, a struct given as a list may end before it. In an object an `Optional` may be missing too.
    """

    type: Type
    has_default: bool = False


@dataclass(frozen=True)
class Struct:
    """A struct: an object, or a list of its fields in order. Read as a dict of the given fields.

    `own` are teimgr's additional fields, allowed in an object.
    """

    name: str
    fields: Mapping[str, StructField]
    own: Mapping[str, StructField] = field(default_factory=dict)

    def read(self, reader: Reader, path: Path) -> Steps[dict[str, Any]]:
        with reader.within(path):
            first = yield from reader.value_start()
            if first == ord("["):
                with reader.nested(reader.end_list):
                    return (yield from self._of_list(reader, path))
            if first != ord("{"):
                raise reader.wrong_type(f"struct {self.name}")
            with reader.nested(reader.end_object):
                return (yield from self._of_object(reader, path))

    def _of_list(self, reader: Reader, path: Path) -> Steps[dict[str, Any]]:
        values: dict[str, Any] = {}
        for place, (name, (kind, has_default)) in enumerate(self.fields.items()):
            if reader.has_element(place):
                values[name] = yield from kind.read(reader, (*path, place))
            elif not has_default:
                raise self._too_short(place)
        return values

    def _too_short(self, given: int) -> Fault:
        count = len(self.fields)
        elements = f"{count} element{'s' if count > 1 else ''}"
        return Fault(f"invalid length {given}, expected struct {self.name} with {elements}")

    def _of_object(self, reader: Reader, path: Path) -> Steps[dict[str, Any]]:
        values: dict[str, Any] = {}
        count = 0
        while (key := reader.key_at(path, count)) is not None:
            count += 1
            if key in values and key in self.fields:
                raise Fault(f"duplicate field `{key}`")
            reader.colon()
            if (found := self.fields.get(key) or self.own.get(key)) is not None:
                values[key] = yield from found.type.read(reader, (*path, key))
            else:
                yield from reader.skip((*path, key))
        self._check_missing(values)
        return values

    def _check_missing(self, values: Mapping[str, Any]) -> None:
        for name, (kind, has_default) in self.fields.items():
            if name not in values and not has_default and not isinstance(kind, Optional):
                raise Fault(f"missing field `{name}`")

    def of_value(self, value: Any) -> dict[str, Any]:
        if isinstance(value, list):
            return self._of_values(value)
        if not isinstance(value, dict):
            raise Fault(f"invalid type: {shown(value)}, expected struct {self.name}")
        # serde_json sorts a map by the bytes of its keys.
        known = {**self.fields, **self.own}
        given = sorted((name for name in value if name in known), key=str.encode)
        values = {name: known[name].type.of_value(value[name]) for name in given}
        self._check_missing(values)
        return values

    def _of_values(self, given: list[Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for place, (name, (kind, has_default)) in enumerate(self.fields.items()):
            if place < len(given):
                values[name] = kind.of_value(given[place])
            elif not has_default:
                raise self._too_short(place)
        if len(given) > len(self.fields):
            raise Fault(f"invalid length {len(given)}, expected fewer elements in array")
        return values


def read_body(kind: Type, body: bytes) -> Steps[Any]:
    """The body as `kind`; what follows the value is ignored, as TEI does. Raises Fault, with position and path."""
    return kind.read(Reader(body), ())
