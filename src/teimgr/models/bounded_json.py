"""Reading the JSON files of models, with limits of size, number of values and depth.

A model's files come from whoever uploaded it. Everything here that parses one of them (the daemon for `/models` and
for new instances, the fetcher, the worker) does it through this module, so that no file is larger, deeper or of
another shape than what reads it can take.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.source import file_problem

_MIB = 1 << 20
# Of any file, and of the kinds that are larger: the largest known are 33, 9 and 9 MB.
_MOST_BYTES = 4 * _MIB
_MOST_BYTES_OF = {
    "tokenizer.json": 64 * _MIB,
    "vocab.json": 64 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "model.safetensors.index.json": 16 * _MIB,
    "pytorch_model.bin.index.json": 16 * _MIB,
}
MOST_VALUES = 4_000_000
"""Of a vocabulary. A value takes some 60 bytes once it is parsed, so that a file takes 250 MB at most."""
_MOST_VALUES_OF_OTHERS = 1_000_000
_MOST_CONTAINERS_OF_OTHERS = 100_000
# Objects and lists: freeing a million of them holds the GIL for 0.1 s. The largest known file has 60,000.
_VOCABULARIES = ("tokenizer.json", "vocab.json")
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that git checks out in place of a large one where git-lfs is not installed."""
IS_POINTER = "is a pointer of git-lfs and not the file itself: run `git lfs pull` in the directory"
_SHOWN_CHARS = 80
# A call of the library's decoder holds the GIL to its end: some 0.1 s for a million lists. A longer text is decoded
# window by window.
_WHOLE_CHARS = 64 * 1024
_WINDOW_CHARS = 4096
_SPACE = re.compile(r"[ \t\n\r]*")
MOST_DEPTH = 64
"""Objects and lists within each other; known files have ten."""


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file.

    Raises:
        ModelLoadFailed: it cannot be read, is not valid JSON, exceeds a limit, or holds no object.
    """
    content = _read(path)
    if content is not None and not isinstance(content, dict):
        raise ModelLoadFailed(f"{path.name} should hold a JSON object")
    return content


def read_list(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON file; [] where there is no such file.

    Raises:
        ModelLoadFailed: as `read_object`, or it holds no list of objects.
    """
    content = _read(path)
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ModelLoadFailed(f"{path.name} should hold a list of JSON objects")
    return content


def check_size(path: Path) -> None:
    """Check the size of a JSON file that a library is to read; a file that is absent passes.

    Raises:
        ModelLoadFailed: it cannot be read, or has more bytes than `read_object` would read.
    """
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        raise ModelLoadFailed(f"{path.name} cannot be read: {error.strerror or error}") from error
    if size > (limit := most_bytes(path.name)):
        raise ModelLoadFailed(f"{path.name} has {size:,} bytes, and at most {limit:,} are read")


def most_bytes(name: str) -> int:
    """How many bytes of a file of this name are read at most."""
    return _MOST_BYTES_OF.get(name, _MOST_BYTES)


def parse(content: bytes, name: str) -> Any:
    """The value of a JSON text; `name` is that of its file, for messages.

    Raises:
        ModelLoadFailed: it is not valid JSON in UTF-8, has more than `MOST_DEPTH` levels, or more values or
            containers than a file of this name may have.
    """
    if content.startswith(POINTER):
        raise ModelLoadFailed(f"{name} {IS_POINTER}")
    # An upper bound, counted in the text before anything is built: each value but the first is behind one of these.
    values = sum(content.count(mark) for mark in (b",", b":", b"[", b"{"))
    limit = MOST_VALUES if name in _VOCABULARIES else _MOST_VALUES_OF_OTHERS
    if values > limit:
        raise ModelLoadFailed(f"{name} has more than {limit:,} values")
    if name not in _VOCABULARIES and content.count(b"[") + content.count(b"{") > _MOST_CONTAINERS_OF_OTHERS:
        raise ModelLoadFailed(f"{name} has more than {_MOST_CONTAINERS_OF_OTHERS:,} objects and lists")
    try:
        text = content.decode()
        value = _DECODER.decode(text) if len(text) <= _WHOLE_CHARS else _decode_in_windows(text)
    except RecursionError as error:
        raise ModelLoadFailed(f"{name} is nested more than {MOST_DEPTH} levels deep") from error
    except ValueError as error:
        raise ModelLoadFailed(f"{name} is not valid JSON: {error}") from error
    if _is_deep(value):
        raise ModelLoadFailed(f"{name} is nested more than {MOST_DEPTH} levels deep")
    return value


def _read(path: Path) -> Any:
    try:
        if problem := file_problem(path):
            raise ModelLoadFailed(f"{path.name} {problem}")
        if not path.is_file():
            return None
        check_size(path)
        with path.open("rb") as file:
            content = file.read(most_bytes(path.name) + 1)
    except OSError as error:
        raise ModelLoadFailed(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes(path.name):  # it grew
        raise ModelLoadFailed(f"{path.name} has more than {most_bytes(path.name):,} bytes")
    return parse(content, path.name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text. Readers disagree about which of two values of a key holds: here neither does."""
    found = dict(pairs)
    if len(found) != len(pairs):
        given: dict[str, Any] = {}
        for key, value in pairs:
            _add(given, key, value)
    return found


def _add(found: dict[str, Any], key: str, value: Any) -> None:
    if found.setdefault(key, value) != value:
        raise ValueError(f"the key {key[:_SHOWN_CHARS]!r} has two values")


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _decode_in_windows(text: str) -> Any:
    """As `_DECODER.decode`, with other threads running in between.

    Raises:
        ValueError: it is not valid JSON, or one of its numbers has `_WINDOW_CHARS` characters or more.
        RecursionError: it is nested deeper than `MOST_DEPTH`, or than a window can be decoded.
    """
    value, end = _value_at(text, _after_space(text, 0), 1)
    if (end := _after_space(text, end)) < len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


def _value_at(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    window = text[at : at + _WINDOW_CHARS]
    try:
        value, size = _DECODER.raw_decode(window)
        if size < len(window) or at + size == len(text):
            return value, at + size
        problem = JSONDecodeError(f"A number of {_WINDOW_CHARS} characters or more", text, at)
    except JSONDecodeError as error:
        problem = JSONDecodeError(error.msg, text, at + error.pos)
    if depth > MOST_DEPTH:
        raise RecursionError
    match window[:1]:
        case "[":
            return _list_at(text, at + 1, depth)
        case "{":
            return _object_at(text, at + 1, depth)
        case '"':
            return _DECODER.raw_decode(text, at)  # one string, however long, takes no time
    raise problem


def _list_at(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    """The list whose first value, or end, follows at `at`."""
    found: list[Any] = []
    at = _after_space(text, at)
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        values, end = _many_at(text, at, "[]")
        if end == at:
            value, end = _value_at(text, at, depth + 1)
            values = [value]
        found += values
        if _is_last(text, at := _after_space(text, end), "]"):
            return found, at + 1
        at = _after_space(text, at + 1)


def _object_at(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """The object whose first key, or end, follows at `at`."""
    found: dict[str, Any] = {}
    at = _after_space(text, at)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        values, end = _many_at(text, at, "{}")
        if end == at:
            if text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = _DECODER.raw_decode(text, at)
            if text[(at := _after_space(text, at)) : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", text, at)
            value, end = _value_at(text, _after_space(text, at + 1), depth + 1)
            values = {key: value}
        for key, value in values.items():
            _add(found, key, value)
        if _is_last(text, at := _after_space(text, end), "}"):
            return found, at + 1
        at = _after_space(text, at + 1)


def _many_at(text: str, at: int, brackets: str) -> tuple[Any, int]:
    """The values of a container that lie in the window at `at`, up to a comma, and where that is; `at` for none found.

    What is cut elsewhere than between two values of the container has a string or a bracket without its end, and is
    no JSON.
    """
    window = text[at : at + _WINDOW_CHARS]
    for last in ("],", "},", ","):
        if (cut := window.rfind(last) + len(last) - 1) > 0:
            with suppress(JSONDecodeError):
                return _DECODER.decode(brackets[0] + window[:cut] + brackets[1]), at + cut
    return None, at


def _is_last(text: str, at: int, end: str) -> bool:
    """Whether the container ends at `at`, rather than goes on behind a comma."""
    if (mark := text[at : at + 1]) not in (",", end) or not mark:
        raise JSONDecodeError("Expecting ',' delimiter", text, at)
    return mark == end


def _after_space(text: str, at: int) -> int:
    return match.end() if (match := _SPACE.match(text, at)) else at


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
