"""The settings in effect, key by key, with the source of each value; secrets are not shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from teimgr.config.extra_args import REDACTED, shown_args
from teimgr.config.sources import Configuration
from teimgr.spec import DeclaredKey, InstanceKey, key_of


@dataclass(frozen=True, slots=True)
class Value:
    """One key: its table ("" at the top, `instances[0]` for the first seed), its plain value, and its source."""

    table: str
    key: str
    value: Any
    source: str

    @property
    def path(self) -> str:
        """The dotted path of the key."""
        return f"{self.table}.{self.key}" if self.table else self.key


def effective(configuration: Configuration) -> Iterator[Value]:
    """Every key: first those of the top level, then table by table."""
    found = [*_walk("", configuration.settings, configuration.said_by)]
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


def _walk(table: str, holder: Any, said_by: Mapping[str, str]) -> Iterator[Value]:
    for item in fields(holder):
        value, key, path = getattr(holder, item.name), key_of(item), f"{table}.{item.name}" if table else item.name
        if isinstance(key, InstanceKey) and not key.in_config:
            continue
        if is_dataclass(value):
            yield from _walk(path, value, said_by)
        elif isinstance(value, Mapping) and not table:
            yield from _entries(path, value, said_by)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, each in enumerate(value):
                yield from _walk(f"{path}[{index}]", each, said_by)
        else:
            yield Value(table, item.name, _shown(item.name, value, key), said_by.get(path, "default"))


def _entries(path: str, table: Mapping[str, Any], said_by: Mapping[str, str]) -> Iterator[Value]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _entries(f"{path}.{name}", value, said_by)
        else:
            yield Value(path, name, _shown(name, value), said_by.get(f"{path}.{name}", "default"))


def _shown(name: str, value: Any, key: DeclaredKey | None = None) -> Any:
    if key and key.secret and value:
        return REDACTED
    return shown_args(value) if name == "extra_args" and value else plain(value)
