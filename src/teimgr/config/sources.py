"""Sources of the settings, by precedence: built-in default < TOML file < environment < command line.

A scalar key `k` is read from the environment as `TEIMGR_K`, and under tei-manager's name where it had one; `TEIMGR_`
wins. All faults of a file are reported together, each with its line, its path and the nearest known key. The rules
between keys are checked once each key is valid by itself.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from teimgr.config import rules, schema
from teimgr.config.schema import ConfigFault, ConfigFaults, join, refused
from teimgr.config.settings import Otel, Settings
from teimgr.errors import InvalidConfig
from teimgr.spec import KEYS, InstanceSpec, key_of, updatable


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, by the path of the key: `api_port`, `auth.mtls`, `instances[0].port`. `text` is valid TOML.

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
    """The line of the key at `path`, or of the table it belongs in."""
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Headers and assignments, each with its first line; no proper prefix of either is valid TOML."""
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
    """The path of `[a.b]` or `[[a.b]]`, parsed as `table`; counts the items of `arrays`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the settings are read from. `overrides` are the command line's keys; None means not given."""

    file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and the source of each key that was given, by its path; the others have their defaults."""

    settings: Settings
    said_by: Mapping[str, str]


def load(
    config_path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of file, environment and command line; errors as `read`."""
    file = None if config_path is None else Path(config_path)
    return read(Source(file=file, environ=environ, overrides=overrides or {})).settings


def read(source: Source) -> Configuration:
    """Read and validate the settings.

    Raises:
        InvalidConfig: The message has a line for each fault, with the file and its line, or the variable, and the path.
    """
    text = "" if source.file is None else _text(source.file)
    lines = key_lines(text)
    try:
        values = _from_file(tomllib.loads(text))
        said_by = {path: f"{source.file}:{line}" for path, line in lines.items()}
        for path, variable in _from_environment(source.environ, values):
            said_by[path] = f"environment {variable}"
        given = {name: value for name, value in source.overrides.items() if value is not None}
        values |= schema.read(Settings, given)
        settings = Settings(**values)
        if faults := list(rules.faults(settings)):
            raise ConfigFaults(*faults)
    except ConfigFaults as error:
        raise InvalidConfig("\n".join(_located(fault, source.file, lines) for fault in error.faults)) from error
    return Configuration(settings, said_by | dict.fromkeys(given, "command line"))


def with_template(
    keys: Mapping[str, Any], name: object, templates: Mapping[str, Mapping[str, Any]], path: str = "template"
) -> dict[str, Any]:
    """The keys of an instance over those of a template; tags of both are joined.

    Raises:
        Faulty: There is no such template.
    """
    if not isinstance(name, str) or name not in templates:
        raise refused(path, schema.unknown_word(str(name), templates))
    template = templates[name]
    joined: dict[str, Any] = {**template, **keys}
    tags = (template.get("tags"), keys.get("tags"))
    if all(isinstance(each, Mapping) for each in tags):
        joined["tags"] = {**template["tags"], **keys["tags"]}
    return joined


class Scalar(NamedTuple):
    """One key that an environment variable can give; of the `variables` the last one wins."""

    path: tuple[str, ...]
    annotation: Any
    variables: tuple[str, ...]


def scalars() -> Iterator[Scalar]:
    """Each key that one environment variable can give: those of the top level and of `[otel]`."""
    for kind, table in ((Settings, ()), (Otel, ("otel",))):
        hints = get_type_hints(kind)
        for item in fields(kind):
            hint, path = hints[item.name], (*table, item.name)
            if get_origin(hint) not in (tuple, Mapping) and not any(map(is_dataclass, (hint, *get_args(hint)))):
                variables = (key_of(item).also, f"TEIMGR_{'_'.join(path).upper()}")
                yield Scalar(path, hint, tuple(filter(None, variables)))


def unheard(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Warnings about unrecognised variables with our prefix or tei-manager's.

    tei-manager's documentation names some that it never read, among them those meant to turn on TLS.
    """
    known = [variable for scalar in scalars() for variable in scalar.variables]
    for variable in sorted(environ):
        if variable.startswith(("TEIMGR_", "TEI_MANAGER_")) and variable not in known:
            yield f"the environment variable {variable} is not read; {schema.nearest(variable, known)}"


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
    """The keys of the file, typed as those of `Settings`; seeds are completed from templates."""
    templates, seeds = table.pop("templates", {}), table.pop("instances", [])
    values: dict[str, Any]
    values, faults = _try(lambda: schema.read(Settings, table), {})
    values["templates"], more = _try(lambda: _templates(templates), {})
    faults += more
    values["instances"], more = _try(lambda: _seeds(seeds, values["templates"]), ())
    if faults := [*faults, *more]:
        raise ConfigFaults(*faults)
    return values


def _templates(tables: object) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, Mapping):
        raise refused("templates", f"must be a table of tables, [templates.NAME] (got {schema.quoted(tables)})")
    hidden = [name for name in KEYS if not updatable(name)]
    return schema.each(
        tables.items(), lambda name, table: schema.read(InstanceSpec, table, f"templates.{name}", hidden=hidden)
    )


def _seeds(tables: object, templates: Mapping[str, Mapping[str, Any]]) -> tuple[InstanceSpec, ...]:
    if not isinstance(tables, list):
        raise refused("instances", f"must be a list of tables, [[instances]] (got {schema.quoted(tables)})")
    hidden = [name for name, key in KEYS.items() if not key.in_config]

    def seed(index: int, table: object) -> InstanceSpec:
        path = f"instances[{index}]"
        if isinstance(table, Mapping) and "template" in table:
            rest = {name: value for name, value in table.items() if name != "template"}
            table = with_template(rest, table["template"], templates, join(path, "template"))
        return replace(schema.build(InstanceSpec, table, path, hidden=hidden), seeded=True)

    return tuple(schema.each(enumerate(tables), seed).values())


def _try(make: Callable[[], Any], otherwise: Any) -> tuple[Any, list[ConfigFault]]:
    try:
        return make(), []
    except ConfigFaults as error:
        return otherwise, list(error.faults)


def _located(fault: ConfigFault, file: Path | None, lines: Mapping[str, int]) -> str:
    line = line_of(fault.path, lines)
    return ":".join(str(part) for part in (file, line) if part is not None) + f": {fault}" if file else str(fault)


def _from_environment(environ: Mapping[str, str], values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Put each variable that is set into `values`; yields the paths of the keys and the variables."""
    for scalar in scalars():
        for variable in scalar.variables:
            if (text := environ.get(variable)) is None:
                continue
            *table, name = scalar.path
            kind = Otel if table else Settings  # the one table that has variables is `[otel]`
            try:
                value = schema.read(kind, {name: schema.from_text(text, scalar.annotation)})
            except (ValueError, ConfigFaults) as error:
                raise InvalidConfig(f"Invalid {variable} value {text!r}: {error}") from error
            values |= {"otel": replace(values.get("otel", Otel()), **value)} if table else value
            yield ".".join(scalar.path), variable
