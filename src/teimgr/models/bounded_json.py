"""Reads the JSON files of models and the heads of their safetensors, with limits on size, number of values and depth.

The files are untrusted. All code that parses one (the daemon for `/models` and new instances, the fetcher, the worker)
uses this module.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.source import file_problem
from teimgr.wire import json_scan

_MIB = 1 << 20
# The most bytes of any file, and of the larger kinds, of which the largest known files have 33, 9 and 9 MB.
_MAX_BYTES = 4 * _MIB
_MAX_BYTES_OF = {
    "tokenizer.json": 64 * _MIB,
    "vocab.json": 64 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "model.safetensors.index.json": 16 * _MIB,
    "pytorch_model.bin.index.json": 16 * _MIB,
}
MAX_VALUES = 4_000_000
"""The most values of a vocabulary. A parsed value takes some 60 bytes, so a file takes at most 250 MB."""
_MAX_VALUES_OF_OTHERS = 1_000_000
# The most objects and lists: freeing a million of them holds the GIL for 0.1 s. The largest known file has 60,000.
_MAX_CONTAINERS_OF_OTHERS = 100_000
_VOCABULARIES = ("tokenizer.json", "vocab.json")
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer that git without git-lfs checks out in place of a large file."""
IS_POINTER = "is a pointer of git-lfs and not the file itself: run `git lfs pull` in the directory"
_SHOWN_CHARS = 80
# Longer texts are decoded in pieces: the library's decoder holds the GIL throughout, some 0.1 s for a million lists.
_WHOLE_BYTES = 64 * 1024
# The most digits of an integer, since code multiplies them; the longest known, a `model_max_length`, has 31.
_MAX_DIGITS = 40
MAX_DEPTH = 64
"""The deepest nesting of objects and lists; known files have ten levels."""


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file.

    Raises:
        ModelLoadFailed: it cannot be read, is not valid JSON, exceeds a limit, or holds no object.
    """
    content = _read(path)
    if content is not None and not isinstance(content, dict):
        raise ModelLoadFailed(f"{_shown(path)} should hold a JSON object")
    return content


def read_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON file; [] if there is no such file.

    Raises:
        ModelLoadFailed: as `read_object`, or it holds no list of objects.
    """
    content = _read(path)
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ModelLoadFailed(f"{_shown(path)} should hold a list of JSON objects")
    return content


def check_size(path: Path) -> None:
    """Check the size of a JSON file before a library reads it; an absent file passes.

    Raises:
        ModelLoadFailed: it is not a file, cannot be read, or has more bytes than `read_object` would read.
    """
    if problem := file_problem(path):
        raise ModelLoadFailed(f"{_shown(path)} {problem}")
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        raise ModelLoadFailed(f"{_shown(path)} cannot be read: {error.strerror or error}") from error
    if size > (limit := most_bytes(path.name)):
        raise ModelLoadFailed(f"{path.name} has {size:,} bytes, and at most {limit:,} are read")


def most_bytes(name: str) -> int:
    """Return the most bytes that are read of a file of this name."""
    return _MAX_BYTES_OF.get(name, _MAX_BYTES)


def parse(content: bytes, name: str) -> Any:
    """Parse a JSON text; `name` is that of its file, with or without its folder's, for messages and limits.

    Raises:
        ModelLoadFailed: it is not valid JSON in UTF-8, has more than `MAX_DEPTH` levels, or more values or
            containers than a file of this name may have.
    """
    if content.startswith(POINTER):
        raise ModelLoadFailed(f"{name} {IS_POINTER}")
    # An upper bound before anything is built: one of these characters precedes each value but the first.
    values = sum(content.count(mark) for mark in (b",", b":", b"[", b"{"))
    is_vocabulary = name.rpartition("/")[2] in _VOCABULARIES
    limit = MAX_VALUES if is_vocabulary else _MAX_VALUES_OF_OTHERS
    if values > limit:
        raise ModelLoadFailed(f"{name} has more than {limit:,} values")
    if not is_vocabulary and content.count(b"[") + content.count(b"{") > _MAX_CONTAINERS_OF_OTHERS:
        raise ModelLoadFailed(f"{name} has more than {_MAX_CONTAINERS_OF_OTHERS:,} objects and lists")
    try:
        value = _decoded(content) if len(content) <= _WHOLE_BYTES else json_scan.read(content, _IN_PIECES)
    except (RecursionError, json_scan.DepthExceededError) as error:
        raise ModelLoadFailed(f"{name} is nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:
        raise ModelLoadFailed(f"{name} is not valid JSON: {error}") from error
    if _is_deep(value):
        raise ModelLoadFailed(f"{name} is nested more than {MAX_DEPTH} levels deep")
    return value


def _read(path: Path) -> Any:
    try:
        check_size(path)
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(most_bytes(path.name) + 1)
    except OSError as error:
        raise ModelLoadFailed(f"{_shown(path)} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes(path.name):  # it grew after the check
        raise ModelLoadFailed(f"{path.name} has more than {most_bytes(path.name):,} bytes")
    if (value := parse(content, _shown(path))) is None:  # the file is `null`
        raise ModelLoadFailed(f"{_shown(path)} holds null")
    return value


_MODULE_FOLDER = re.compile(r"(?:\w+_)?\d+_[A-Za-z]\w*")


def _shown(path: Path) -> str:
    """Return the name of a file, with its folder if this is a module's, such as "1_Pooling/config.json"."""
    return f"{path.parent.name}/{path.name}" if _MODULE_FOLDER.fullmatch(path.parent.name) else path.name


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of a JSON text; duplicate keys are refused, since readers disagree about which value counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        given: dict[str, Any] = {}
        for key, value in pairs:
            _add(given, key, value)
    return found


def _add(found: dict[str, Any], key: str, value: Any) -> None:
    if found.setdefault(key, value) != value:
        raise ValueError(f"the key {key[:_SHOWN_CHARS]!r} has two values")


def _integer(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > _MAX_DIGITS:
        raise ValueError(f"it has a number of {count:,} digits, and at most {_MAX_DIGITS} are read")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_WITH_LONG_NUMBERS = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)  # half as fast
_TOO_LONG, _AS_ZEROS = b"0" * (_MAX_DIGITS + 1), bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))


def _decoded(content: bytes) -> Any:
    decoder = _WITH_LONG_NUMBERS if _TOO_LONG in content.translate(_AS_ZEROS) else _DECODER
    return decoder.decode(content.decode())


_IN_PIECES = json_scan.Reading(None, max(_MAX_BYTES_OF.values()), _decoded, _add)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
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


MAX_HEAD_BYTES = 16 * 2**20
"""Known heads have 1 MB."""
MAX_TENSORS = 30_000
"""The most tensors of a model. Known ones have 19,000; for 200,000 the libraries take minutes."""
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**63 - 1  # bound the time of their product


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a file. `begin` and `end` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_head(file: Path) -> list[HeadTensor]:
    """The tensors of a safetensors file in the order of its head. Blocking.

    Raises:
        NoHead: it does not begin with the length of a head.
        CutShort: it ends within the head. A file may still end before the data that the head announces.
        ModelLoadFailed: the head violates the format, or has more bytes or tensors than are read.
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        whole = file.stat().st_size
        size = int.from_bytes(opened.read(8), "little")
        if MAX_HEAD_BYTES < size <= whole - 8:
            raise ModelLoadFailed(
                f"the head of {file.name} has {size:,} bytes, and at most {MAX_HEAD_BYTES:,} are read"
            )
        if whole < 8 or not 0 < size <= MAX_HEAD_BYTES:
            raise NoHead(f"{file.name} is not a safetensors file")
        if whole < 8 + size:
            raise CutShort(f"{file.name} ends too soon")
        content = opened.read(size)
    if content.count(b'"data_offsets"') > MAX_TENSORS:  # before any is built
        raise ModelLoadFailed(f"{file.name} has more than {MAX_TENSORS:,} tensors")
    head = parse(content, file.name)
    try:
        return [_tensor(name, each, 8 + size) for name, each in head.items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadFailed(f"the head of {file.name} is malformed: {error!r}") from error


class NoHead(ModelLoadFailed):
    """The file has another format."""


class CutShort(ModelLoadFailed):
    """The file ends too soon."""


def _tensor(name: str, described: Any, data: int) -> HeadTensor:
    begin, end = described["data_offsets"]
    shape = tuple(described["shape"])
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {len(shape):,} dimensions")
    numbers = (begin, end, *shape)
    if any(type(each) is not int or each < 0 for each in numbers) or end < begin:
        raise ValueError(f"tensor {name}")
    if max(numbers) > _MAX_SIZE:
        raise ValueError(f"tensor {name} has a size of {max(numbers):,}")
    if math.prod(shape) > 8 * (end - begin):  # the smallest elements have one bit
        raise ValueError(f"tensor {name} of {end - begin:,} bytes has the shape {shape}")
    return HeadTensor(name, str(described["dtype"]), shape, data + begin, data + end)
