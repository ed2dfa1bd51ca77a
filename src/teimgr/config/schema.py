"""Plain values (TOML, environment) to frozen dataclasses, refused with the path of what is wrong.

The dataclass is the only description: its annotations say the types, `Rule` in a field's metadata says the limits.
Understood annotations: bool, int, float, str, Path, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, dataclasses,
and Literal of strings, also beside a number.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from teimgr.errors import InvalidConfig

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Fault(NamedTuple):
    """What is wrong with the value at one path, such as `instances[0].port`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Faulty(InvalidConfig):
    """All that is wrong with a table; the message has one line for each fault."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning and the limits of one key.

    `low` and `high` are inclusive. `label` is what a message calls the key where the path alone does not do.
    """

    meaning: str = ""
    low: float | None = None
    high: float | None = None
    label: str = ""

    def check(self, value: object, path: str) -> None:
        """Refuse a number outside the limits; anything else passes.

        Raises:
            Faulty: it is outside.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        label = f"{self.label} " if self.label else ""
        if self.low is not None and value < self.low:
            raise Faulty(Fault(path, f"{label}must be >= {self.low} (got {value})"))
        if self.high is not None and value > self.high:
            raise Faulty(Fault(path, f"{label}must be <= {self.high} (got {value})"))


NO_RULE = Rule()


def rule_of(field: Field[Any]) -> Rule:
    """The rule in the field's metadata, or one that allows everything."""
    rule = field.metadata.get("rule", NO_RULE)
    if not isinstance(rule, Rule):
        raise TypeError(f"metadata 'rule' of {field.name} is a {type(rule).__name__}")
    return rule


def build(kind: type[T], table: object, path: str = "", **how: Any) -> T:
    """A whole `kind` from a table; `how` as in `read`.

    Raises:
        Faulty: as `read`, and where a key without a default is absent.
    """
    faults: list[Fault] = []
    values: Mapping[str, Any] = table if isinstance(table, Mapping) else {}
    try:
        values = read(kind, table, path, **how)
    except Faulty as error:
        faults += error.faults
    for field in fields(kind):  # type: ignore[arg-type]
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed and isinstance(table, Mapping) and field.name not in values:
            faults.append(Fault(join(path, field.name), "is required"))
    if faults:
        raise Faulty(*faults)
    return kind(**values)


def read(
    kind: type[Any],
    table: object,
    path: str = "",
    *,
    rules: Mapping[str, Rule] | None = None,
    hidden: Collection[str] = (),
) -> dict[str, Any]:
    """The keys that `table` gives, as `kind` types them; absent keys stay absent.

    `rules` stand in for metadata of a class that has none; `hidden` fields of the class are no keys.

    Raises:
        Faulty: unknown keys, wrong types, numbers outside their limits.
    """
    if not isinstance(table, Mapping):
        raise Faulty(Fault(path, f"must be a table (got {said(table)})"))
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.name not in hidden}

    def one(name: str, value: object) -> Any:
        if name not in known:
            raise Faulty(Fault(join(path, name), unknown(name, value, known)))
        rule = (rules or {}).get(name) or rule_of(known[name])
        return convert(value, hints[name], join(path, name), rule)

    return each(table.items(), one)


def each(items: Iterable[tuple[K, object]], one: Callable[[K, object], V]) -> dict[K, V]:
    """`one` of every item, by its key.

    Raises:
        Faulty: `one` did, with the faults of all items.
    """
    values: dict[K, V] = {}
    faults: list[Fault] = []
    for key, value in items:
        try:
            values[key] = one(key, value)
        except Faulty as error:
            faults += error.faults
    if faults:
        raise Faulty(*faults)
    return values


def convert(value: object, annotation: Any, path: str, rule: Rule = NO_RULE) -> Any:
    """`value` as `annotation` types it.

    Raises:
        Faulty: it is of another type, or breaks `rule`.
    """
    if annotation is Any:  # judged by whoever knows what it is
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return convert(value, _kind_for(value, [kind for kind in arguments if kind is not type(None)]), path, rule)
    if origin is tuple:
        return _sequence(value, arguments[0], path)
    if origin is Mapping:
        return _table(value, arguments[1], path)
    if origin is Literal:
        return _choice(value, arguments, path)
    if is_dataclass(annotation):
        return build(annotation, value, path)  # type: ignore[arg-type]
    result = _scalar(value, annotation, path)
    rule.check(result, path)
    return result


def from_text(text: str, annotation: Any) -> object:
    """The plain value that an environment variable's text means for a key of this type.

    Raises:
        ValueError: it is not a number, or neither `true` nor `false`.
    """
    kinds = {annotation, *get_args(annotation)}
    if bool in kinds:
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    for number, noun in ((int, "an integer"), (float, "a number")):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                raise ValueError(f"must be {noun}") from None
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
    return f"unknown {word!r}; {nearest(word, known) if known else 'there are none'}"


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that `name` may have meant, or all of them, as a clause."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def join(path: str, name: str) -> str:
    """The dotted path of a key below `path`."""
    return f"{path}.{name}" if path else name


def said(value: object) -> str:
    """What a value is, for a message: `text 'x'`, `a table`, `number 1.5`."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    noun = {bool: "boolean", int: "integer", float: "number", str: "text"}.get(type(value), type(value).__name__)
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{noun} {shown[:80]}"


def _sequence(value: object, item: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Faulty(Fault(path, f"must be a list (got {said(value)})"))
    return tuple(each(enumerate(value), lambda index, element: convert(element, item, f"{path}[{index}]")).values())


def _table(value: object, item: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Faulty(Fault(path, f"must be a table (got {said(value)})"))
    return each(value.items(), lambda name, element: convert(element, item, join(path, name)))


def _kind_for(value: object, kinds: list[Any]) -> Any:
    """The one of `kinds` that `value` is meant as: text is a word of a Literal, where there is one."""
    words = next((kind for kind in kinds if get_origin(kind) is Literal), None)
    return words if words is not None and isinstance(value, str) else kinds[0]


def _choice(value: object, choices: tuple[Any, ...], path: str) -> Any:
    if value not in choices:
        raise Faulty(Fault(path, f"must be one of {', '.join(map(repr, choices))} (got {said(value)})"))
    return value


def _scalar(value: object, kind: Any, path: str) -> Any:
    accepted, noun = _SCALARS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise Faulty(Fault(path, f"must be {noun} (got {said(value)})"))
    return kind(value)


_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str, Path), "a path"),
}
