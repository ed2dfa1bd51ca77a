"""On which line of a TOML file each key stands, for `tomllib` does not say."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


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
