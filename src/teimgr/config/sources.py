"""Sources of the settings, by precedence: built-in default < TOML file < environment < command line.

A scalar key `k` is read from the environment as `TEIMGR_K`, or under tei-manager's name, if any; `TEIMGR_` wins. All
faults of a file are reported together, each with its line, its path and the nearest known key. Rules between keys are
checked after each key.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from teimgr.config import schema
from teimgr.config.instance_keys import REDACTED, shown_args
from teimgr.config.schema import ConfigFault, ConfigFaults, join, refused
from teimgr.config.settings import Otel, Settings, faults
from teimgr.errors import InvalidConfig
from teimgr.spec import KEYS, DeclaredKey, InstanceKey, InstanceSpec, key_of, updatable

# Variables of workers without a key (`engine/native_library.py`, `engine/gpu_kernels/forward_graphs.py`).
_WORKER_VARIABLES = ("TEIMGR_NATIVE", "TEIMGR_CUDA_GRAPHS", "TEIMGR_AGENT", "TEIMGR_LISTEN_ADDRESS")


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
    """The sources of the settings. `overrides` are keys of the command line; None: not given."""

    file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and the source of each given key by its path; other keys have their defaults.

    `digest` is the SHA-256 of the file's content, or of b"" without a file.
    """

    settings: Settings
    sources: Mapping[str, str]
    digest: str = ""


def read(source: Source, content: bytes | None = None) -> Configuration:
    """Read and validate the settings; `content` is the file's where it was read before.

    Raises:
        InvalidConfig: The message has a line for each fault, with the file and its line, or the variable, and the path.
    """
    lines: dict[str, int] = {}
    try:
        content = content_of(source) if content is None else content
        text = _text(content, source.file)
        lines = key_lines(text)
        values, found = _from_file(tomllib.loads(text))
        sources = {path: f"{source.file}:{line}" for path, line in lines.items()}
        of_variables: list[str] = []
        for path, variable in _from_environment(source.environ, values, of_variables):
            sources[path] = f"environment {variable}"
        given = {name: value for name, value in source.overrides.items() if value is not None}
        values |= schema.read(Settings, given)
        settings = Settings(**values)
        found += _of_the_rest(settings, {_top(fault.path) for fault in found})
        if found or of_variables:
            located = [_located(fault, source.file, lines) for fault in found]
            of_tls = (
                () if any(fault.path.startswith(("auth.tls", "auth.mtls")) for fault in found) else _of_tls(settings)
            )
            raise InvalidConfig("\n".join([*located, *of_variables, *of_tls]))
    except ConfigFaults as error:
        raise InvalidConfig("\n".join(_located(fault, source.file, lines) for fault in error.faults)) from error
    except RecursionError as error:  # too deeply nested
        raise InvalidConfig(f"{source.file}: nested too deep") from error
    return Configuration(settings, sources | dict.fromkeys(given, "command line"), digest_of(content))


def _of_the_rest(settings: Settings, wrong: Collection[str]) -> list[ConfigFault]:
    """Faults of the keys in their relations, without those that are about the keys `wrong`, which are left out."""
    names = [re.compile(rf"\b{re.escape(name)}\b") for name in wrong]
    right = (fault for fault in faults(settings) if _top(fault.path) not in wrong)
    return [fault for fault in right if not any(name.search(fault.message) for name in names)]


def _of_tls(settings: Settings) -> Iterator[str]:
    """The fault of the server's TLS files, beside others."""
    try:
        if settings.tls_files is not None:
            settings.tls_files.context()
    except InvalidConfig as error:
        yield error.message


def _top(path: str) -> str:
    """The key of `Settings` that a path is in."""
    return path.partition(".")[0].partition("[")[0]


def with_template(
    keys: Mapping[str, Any], name: object, templates: Mapping[str, Mapping[str, Any]], path: str = "template"
) -> dict[str, Any]:
    """The keys of an instance over those of a template; tags of both are joined.

    Raises:
        ConfigFaults: There is no such template.
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
    """One key that environment variables can set; the last of `variables` wins."""

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


CLIENT_VARIABLES = frozenset(
    f"TEIMGR_{name}"
    for name in (
        *("URL", "GRPC_URL", "API_KEY", "API_KEY_FILE", "CA", "CERT", "KEY", "SERVER_NAME", "CONTEXT", "CONTEXTS"),
        *("COMPLETE", "JOIN_TOKEN"),
    )
)
"""Variables of commands (most in `client/connection.py`), which may also be set for a daemon."""


def unread_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Warnings about unrecognised variables with our prefix or tei-manager's.

    tei-manager's documentation names some that it never read, among them those meant to turn on TLS.
    """
    if "FORWARDED_ALLOW_IPS" in environ:
        yield "the environment variable FORWARDED_ALLOW_IPS is not read; give `trusted_proxies`"
    known = [*_WORKER_VARIABLES, *(variable for scalar in scalars() for variable in scalar.variables)]
    for variable in sorted(environ):
        if variable in CLIENT_VARIABLES:
            continue
        if variable.startswith(("TEIMGR_", "TEI_MANAGER_")) and variable not in known:
            yield f"the environment variable {variable} is not read; {schema.nearest(variable, known)}"


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def content_of(source: Source) -> bytes:
    """The content of the file, empty without one.

    Raises:
        InvalidConfig: it cannot be read.
    """
    try:
        return b"" if source.file is None else source.file.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{source.file}: cannot be read: {error.strerror}") from error


def _text(content: bytes, file: Path | None) -> str:
    try:
        text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        tomllib.loads(text)
    except ValueError as error:  # invalid TOML or UTF-8
        raise InvalidConfig(f"{file}: {error}") from error
    return text


def _from_file(table: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigFault]]:
    """The keys of the file that are right, typed as those of `Settings`, and the faults of the others.

    Seeds are completed from templates.
    """
    templates, seeds = table.pop("templates", {}), table.pop("instances", [])
    values: dict[str, Any]
    values, faults = _try(lambda: schema.read(Settings, table), {})
    if faults:
        wrong = {_top(fault.path) for fault in faults}
        right = {name: value for name, value in table.items() if name not in wrong}
        values, _ = _try(lambda: schema.read(Settings, right), {})
    values["templates"], more = _try(lambda: _templates(templates), {})
    faults += more
    values["instances"], more = _try(lambda: _seeds(seeds, values["templates"]), ())
    return values, [*faults, *more]


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
    return str(fault) if file is None else f"{file}: {fault}" if line is None else f"{file}:{line}: {fault}"


def _from_environment(
    environ: Mapping[str, str], values: dict[str, Any], wrong: list[str]
) -> Iterator[tuple[str, str]]:
    """Put each variable that is set into `values`; yields the paths of the keys and the variables.

    Sentences about those whose text is not valid go to `wrong`.
    """
    for scalar in scalars():
        for variable in scalar.variables:
            if (text := environ.get(variable)) is None:
                continue
            *table, name = scalar.path
            kind = Otel if table else Settings  # only the table `[otel]` has variables
            try:
                value = schema.read(kind, {name: schema.from_text(text, scalar.annotation)})
            except (ValueError, ConfigFaults) as error:
                wrong.append(f"Invalid {variable} value {text!r}: {error}")
                continue
            values |= {"otel": replace(values.get("otel", Otel()), **value)} if table else value
            yield ".".join(scalar.path), variable


# The settings in effect, with the source of each value and without secrets.


@dataclass(frozen=True, slots=True)
class Value:
    """One key: its table ("" at the top, `instances[0]` for the first seed), plain value and source."""

    table: str
    key: str
    value: Any
    source: str

    @property
    def path(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.key


def effective(configuration: Configuration) -> Iterator[Value]:
    """Every key: first those of the top level, then table by table."""
    found = [*_walk("", configuration.settings, configuration.sources)]
    yield from sorted(found, key=lambda each: each.table != "")


def plain(value: Any) -> Any:
    """`value` in JSON's and TOML's types, without its secrets."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _shown(name, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _shown(item.name, getattr(value, item.name), key_of(item)) for item in fields(value)}
    return value


def _walk(table: str, holder: Any, sources: Mapping[str, str]) -> Iterator[Value]:
    for item in fields(holder):
        value, key, path = getattr(holder, item.name), key_of(item), f"{table}.{item.name}" if table else item.name
        if isinstance(key, InstanceKey) and not key.in_config:
            continue
        if is_dataclass(value):
            yield from _walk(path, value, sources)
        elif isinstance(value, Mapping) and not table:
            yield from _entries(path, value, sources)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, each in enumerate(value):
                yield from _walk(f"{path}[{index}]", each, sources)
        else:
            yield Value(table, item.name, _shown(item.name, value, key), sources.get(path, "default"))


def _entries(path: str, table: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Value]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _entries(f"{path}.{name}", value, sources)
        else:
            yield Value(path, name, _shown(name, value), sources.get(f"{path}.{name}", "default"))


def _shown(name: str, value: Any, key: DeclaredKey | None = None) -> Any:
    if key and key.secret and value:
        return REDACTED
    return shown_args(value) if name == "extra_args" and value else plain(value)
