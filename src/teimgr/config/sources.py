"""Where the settings come from: built-in default < TOML file < environment < command line.

A scalar key `k` is read from the environment as `TEIMGR_K`, and under the name tei-manager gave it where it had one;
`TEIMGR_` wins. A file is judged whole: every fault is told, with its line, its path and the nearest known key. What
must hold between keys is judged once each of them is right by itself.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from teimgr.config import rules, schema
from teimgr.config.schema import Fault, Faulty, join
from teimgr.config.settings import SPEC_RULES, Otel, Settings
from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, by the path of the key: `api_port`, `auth.mtls`, `instances[0].port`. `text` is good TOML.

    A key inside an inline table or array of one statement has the line where that statement begins.
    """
    lines: dict[str, int] = {}
    arrays: Counter[str] = Counter()
    prefix = ""
    for start, statement in _statements(text):
        table = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            prefix = _header(table, arrays)
            lines.setdefault(prefix, start)
        else:
            for path in _paths(table, prefix):
                lines.setdefault(path, start)
    return lines


def line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """The line of the key at `path`, or of what it should be in."""
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The headers and the assignments, each with its first line: no part of either is good TOML by itself."""
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        start = start if statement else number
        statement += line + "\n"
        try:
            tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        yield start, statement
        statement = ""


def _header(table: dict[str, Any], arrays: Counter[str]) -> str:
    """The path of `[a.b]` or `[[a.b]]`, whose `table` is nothing but that; the items of `arrays` are counted."""
    path, value = "", table
    while value:
        name, inner = next(iter(value.items()))
        path = f"{path}.{name}" if path else name
        if isinstance(inner, list):
            arrays[path] += 1
            inner = inner[0]
        if path in arrays:
            path = f"{path}[{arrays[path] - 1}]"
        value = inner
    return path


def _paths(value: object, path: str) -> Iterator[str]:
    if path:
        yield path
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{index}]")


HIDDEN = ("wanted_running", "seeded")
"""What an instance knows of itself and no configuration says."""

Rules = Callable[[Settings], Iterable[Fault]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who may say something. `overrides` are the command line's keys; those that are None were not given."""

    file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and by the path of each key that somebody said who that was; the others have their defaults."""

    settings: Settings
    said_by: Mapping[str, str]


def load(
    config_path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings that file, environment and command line say together, checked.

    Raises:
        InvalidConfig: as `read`.
    """
    file = None if config_path is None else Path(config_path)
    return read(Source(file=file, environ=environ, overrides=overrides or {})).settings


def read(source: Source, more_rules: Rules = lambda settings: ()) -> Configuration:
    """What `source` says, checked, also by `more_rules`.

    Raises:
        InvalidConfig: the message has a line for each fault, with the file and its line, or the variable, and the path.
    """
    text = "" if source.file is None else _text(source.file)
    lines = key_lines(text)
    try:
        values = _from_file(tomllib.loads(text))
        said_by = {path: f"{source.file}:{line}" for path, line in lines.items()}
        for scalar, variable, value in _from_environment(source.environ):
            _put(values, scalar.path, value)
            said_by[".".join(scalar.path)] = f"environment {variable}"
        given = {name: value for name, value in source.overrides.items() if value is not None}
        values |= schema.read(Settings, given)
        settings = Settings(**values)
        _judge(settings, more_rules)
    except Faulty as error:
        raise InvalidConfig("\n".join(_located(fault, source.file, lines) for fault in error.faults)) from error
    return Configuration(settings, said_by | dict.fromkeys(given, "command line"))


def seed(table: object, path: str, templates: Mapping[str, Mapping[str, Any]] | None = None) -> InstanceSpec:
    """The spec that one `[[instances]]` table asks for, with the keys of the template that it may name.

    Raises:
        Faulty: a key is unknown, missing, of a wrong type or out of its limits, or there is no such template.
    """
    if isinstance(table, Mapping) and "template" in table:
        rest = {name: value for name, value in table.items() if name != "template"}
        table = with_template(rest, table["template"], templates or {}, join(path, "template"))
    return schema.build(InstanceSpec, table, path, rules=SPEC_RULES, hidden=HIDDEN)


def with_template(
    keys: Mapping[str, Any], name: object, templates: Mapping[str, Mapping[str, Any]], path: str = "template"
) -> dict[str, Any]:
    """The keys of an instance over those of a template; tags of both are joined.

    Raises:
        Faulty: there is no such template.
    """
    if not isinstance(name, str) or name not in templates:
        raise Faulty(Fault(path, schema.unknown_word(str(name), templates)))
    template = templates[name]
    joined: dict[str, Any] = {**template, **keys}
    tags = (template.get("tags"), keys.get("tags"))
    if all(isinstance(each, Mapping) for each in tags):
        joined["tags"] = {**template["tags"], **keys["tags"]}
    return joined


class Scalar(NamedTuple):
    """One key that an environment variable can say; of the `variables` the last one wins."""

    path: tuple[str, ...]
    annotation: Any
    variables: tuple[str, ...]


def scalars() -> Iterator[Scalar]:
    """Each key that one environment variable can say: those of the top level, and those of `[otel]`."""
    yield from _scalars(Settings, ())
    yield from _scalars(Otel, ("otel",))


def unheard(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence for each variable of ours or tei-manager's that no key reads: a slip of the pen, or a promise.

    tei-manager's documentation names some that it never read, those that were to turn on TLS among them.
    """
    known = [variable for scalar in scalars() for variable in scalar.variables]
    for variable in sorted(environ):
        if variable.startswith(("TEIMGR_", "TEI_MANAGER_")) and variable not in known:
            yield f"the environment variable {variable} is not read; {schema.nearest(variable, known)}"


def _scalars(kind: type[Any], table: tuple[str, ...]) -> Iterator[Scalar]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        annotation = hints[item.name]
        if get_origin(annotation) in (tuple, Mapping) or any(map(is_dataclass, (annotation, *get_args(annotation)))):
            continue
        path = (*table, item.name)
        names = (item.metadata["also"], f"TEIMGR_{'_'.join(path).upper()}")
        yield Scalar(path, annotation, tuple(filter(None, names)))


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        tomllib.loads(text)
    except OSError as error:
        raise InvalidConfig(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOML syntax, or bytes that are no UTF-8
        raise InvalidConfig(f"{file}: {error}") from error
    return text


def _from_file(table: dict[str, Any]) -> dict[str, Any]:
    """The keys of the file, as `Settings` types them; templates and seeds are made of each other."""
    templates, seeds = table.pop("templates", {}), table.pop("instances", [])
    values: dict[str, Any]
    values, faults = _try(lambda: schema.read(Settings, table), {})
    values["templates"], more = _try(lambda: _templates(templates), {})
    faults += more
    values["instances"], more = _try(lambda: _seeds(seeds, values["templates"]), ())
    if faults := [*faults, *more]:
        raise Faulty(*faults)
    return values


def _templates(tables: object) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, Mapping):
        raise Faulty(Fault("templates", f"must be a table of tables, [templates.NAME] (got {schema.said(tables)})"))
    hidden = ("name", "port", "prometheus_port", "created_at", *HIDDEN)

    def one(name: str, table: object) -> dict[str, Any]:
        return schema.read(InstanceSpec, table, f"templates.{name}", rules=SPEC_RULES, hidden=hidden)

    return schema.each(tables.items(), one)


def _seeds(tables: object, templates: Mapping[str, Mapping[str, Any]]) -> tuple[InstanceSpec, ...]:
    if not isinstance(tables, list):
        raise Faulty(Fault("instances", f"must be a list of tables, [[instances]] (got {schema.said(tables)})"))
    found = schema.each(enumerate(tables), lambda index, table: seed(table, f"instances[{index}]", templates))
    return tuple(replace(spec, seeded=True) for spec in found.values())


def _try(make: Callable[[], Any], otherwise: Any) -> tuple[Any, list[Fault]]:
    try:
        return make(), []
    except Faulty as error:
        return otherwise, list(error.faults)


def _judge(settings: Settings, more_rules: Rules) -> None:
    """Apply every rule; what `more_rules` say of a place that is known to be wrong is left out.

    Raises:
        Faulty: some are broken.
    """
    faults = list(rules.faults(settings))
    wrong = [fault.path for fault in faults]
    faults += [more for more in more_rules(settings) if not any(path.startswith(more.path) for path in wrong)]
    if faults:
        raise Faulty(*faults)


def _located(fault: Fault, file: Path | None, lines: Mapping[str, int]) -> str:
    """The fault as a line of text, with the place in the file where it stands there."""
    if file is None:
        return str(fault)
    line = line_of(fault.path, lines)
    return f"{file}: {fault}" if line is None else f"{file}:{line}: {fault}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Scalar, str, Any]]:
    for scalar in scalars():
        for variable in scalar.variables:
            if variable in environ:
                yield scalar, variable, _variable(variable, environ[variable], scalar)


def _variable(variable: str, text: str, scalar: Scalar) -> Any:
    kind = Otel if len(scalar.path) > 1 else Settings
    name = scalar.path[-1]
    try:
        plain = schema.from_text(text, scalar.annotation)
        return schema.read(kind, {name: plain})[name]
    except ValueError as error:
        raise InvalidConfig(f"Invalid {variable} value {text!r}: {error}") from error
    except Faulty as error:
        raise InvalidConfig(f"Invalid {variable} value {text!r}: {error.message}") from error


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Change one key; the one table that has variables is `[otel]`."""
    *table, name = path
    if table:
        values[table[0]] = replace(values.get(table[0], Otel()), **{name: value})
    else:
        values[name] = value
