"""Encodes JSON of large replies in pieces: one `orjson.dumps` of a million numbers holds the GIL for 0.1 s."""

from __future__ import annotations

import binascii
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from teimgr.wire.gil import Rests

# The weight encoded in one call, in a few milliseconds: a number weighs 1, a character an eighth.
_AT_ONCE = 2**15
# Lists of up to this many rows are small if their first row is.
_FEW_ROWS = 16
_TEXT_AT_ONCE = 8 * _AT_ONCE
_SCALARS = frozenset({int, float, bool, type(None)})
_BASE64_BYTES = 3 * 2**16  # a multiple of 3: only the last piece is padded


def dumps(value: Any, weight: int | None = None) -> bytes:
    """Encode `value` like `orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)`; keys of objects are texts.

    `weight` is about how many numbers are in it, an eighth for each character, if the caller knows; else rows are
    weighed one by one, which takes a tenth of the time of a reply with 64 vectors in base64.
    """
    if weight is not None and weight <= _AT_ONCE:
        return _dumped(value)
    if not _may_be_large(value) or _weight_up_to(value, _AT_ONCE) <= _AT_ONCE:
        return _dumped(value)
    return joined(_pieces(value))


def joined(pieces: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """Join pieces: `b"".join` would hold the GIL while it copies all of them, and a buffer that grows while it moves:
    30 ms as it comes to 32 MiB."""
    rest = Rests()
    parts: list[bytes | bytearray | memoryview] = []
    for piece in pieces:
        parts.append(piece)
        rest()
    size = sum(map(len, parts))
    if size <= _JOINED_AT_ONCE:
        return b"".join(parts)
    whole = _new_bytes(None, size)
    at, parts = 0, parts[::-1]
    with _memory_at(_address_of(whole), size, _WRITABLE) as view:
        while parts:
            piece = parts.pop()
            view[at : at + len(piece)] = piece
            at += len(piece)
            rest()
    return whole


# Bytes that are filled before anything else sees them, as the C API allows.
_new_bytes: Callable[[None, int], bytes] = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)  # type: ignore[attr-defined]
_address_of: Callable[[bytes], int] = ctypes.pythonapi.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)  # type: ignore[attr-defined]
_memory_at: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype, _memory_at.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)  # type: ignore[attr-defined]
_WRITABLE = 0x200
_JOINED_AT_ONCE = 2**20


class Base64:
    """Bytes that `dumps` writes as base64 in pieces: encoding them whole would take another copy, 1 ms per MB."""

    __slots__ = ("data",)

    def __init__(self, data: memoryview) -> None:
        self.data = data


def in_base64(array: np.ndarray[Any, Any]) -> str | Base64:
    """Return the bytes of a contiguous array in base64, for `dumps`."""
    if array.nbytes <= _BASE64_BYTES:
        return binascii.b2a_base64(array.data, newline=False).decode("ascii")
    return Base64(array.reshape(-1).view(np.uint8).data)


def rows_in_base64(matrix: np.ndarray[Any, Any]) -> list[Any]:
    """Return `in_base64` of each row of a contiguous matrix."""
    size = matrix.shape[1] * matrix.itemsize
    if not 0 < size <= _BASE64_BYTES:
        return [in_base64(row) for row in matrix]
    data = matrix.reshape(-1).view(np.uint8).data
    return [
        binascii.b2a_base64(data[at : at + size], newline=False).decode("ascii") for at in range(0, len(data), size)
    ]


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _may_be_large(value: Any) -> bool:
    """True if a value has many rows, or a first row with a large part. Takes a microsecond at most."""
    rows = value
    if type(value) is dict:
        rows = next((member for member in value.values() if type(member) is list), value)
    if type(rows) is list and len(rows) > _FEW_ROWS:
        return True
    return _is_large(rows, 1)


def _is_large(value: Any, rows: int) -> bool:
    """True if `rows` values like this one have many numbers; the first element of a list stands for all."""
    kind = type(value)
    if kind is np.ndarray:
        return bool(value.size * rows > _AT_ONCE)
    if kind is dict:
        return any(type(member) not in _SCALARS and _is_large(member, rows) for member in value.values())
    if kind is str:
        return len(value) * rows > _TEXT_AT_ONCE
    if kind is Base64:
        return True
    if kind is list and value:
        return len(value) * rows > _AT_ONCE or _is_large(value[0], len(value) * rows)
    return False


def weight_of(value: Any) -> int:
    """Estimate how many numbers are in a value; a character counts an eighth."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, str):
        return 1 + len(value) // 8
    if isinstance(value, dict):
        return 1 + _sum_of_weights(value.values())
    if isinstance(value, (list, tuple)):
        return 1 + _sum_of_weights(value)
    if isinstance(value, Base64):
        return 1 + max(_AT_ONCE, len(value.data) // 6)
    return 1


def _sum_of_weights(values: Iterable[Any]) -> int:
    """Add the weights of members; usual ones without a call for each, as a reply has three or more for each text."""
    total = 0
    for value in values:
        kind = type(value)
        if kind in _SCALARS:
            total += 1
        elif kind is np.ndarray:
            total += value.size
        elif kind is str:
            total += 1 + len(value) // 8
        else:
            total += weight_of(value)
    return total


def _weight_up_to(value: Any, limit: int) -> int:
    """Return `weight_of` a reply, or a number over `limit` as soon as its rows reach that."""
    if type(value) is not dict:
        value = {"": value}
    total = 0
    for member in value.values():
        if type(member) is not list:
            total += weight_of(member)
            continue
        for at in range(0, len(member), _FEW_ROWS):
            total += _sum_of_weights(member[at : at + _FEW_ROWS])
            if total > limit:
                return total
    return total


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for place, (key, member) in enumerate(value.items()):
            yield (b"," if place else b"{") + _dumped(key) + b":"
            yield from _pieces(member)
        yield b"}"
    elif isinstance(value, (list, tuple)) and value:
        yield from _rows(value)
    elif isinstance(value, np.ndarray) and value.ndim and value.size > _AT_ONCE:
        yield from _slices(value)
    elif isinstance(value, str) and len(value) > _TEXT_AT_ONCE:
        yield b'"'
        for at in range(0, len(value), _TEXT_AT_ONCE):
            yield _dumped(value[at : at + _TEXT_AT_ONCE])[1:-1]
        yield b'"'
    elif isinstance(value, Base64):
        yield b'"'
        for at in range(0, len(value.data), _BASE64_BYTES):
            yield binascii.b2a_base64(value.data[at : at + _BASE64_BYTES], newline=False)
        yield b'"'
    else:
        yield _dumped(value)


def _rows(values: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    """Encode a list: many small elements at a time, each large one in its own pieces."""
    few: list[Any] = []
    before, numbers = b"[", 0
    for value in values:
        weight = weight_of(value)
        if few and numbers + weight > _AT_ONCE:
            yield before + _dumped(few)[1:-1]
            before, few, numbers = b",", [], 0
        if weight > _AT_ONCE:
            yield before
            yield from _pieces(value)
            before = b","
        else:
            few.append(value)
            numbers += weight
    if few:
        yield before + _dumped(few)[1:-1]
    yield b"]"


def _slices(array: np.ndarray[Any, Any]) -> Iterator[bytes]:
    step = max(1, _AT_ONCE * len(array) // array.size)
    for at in range(0, len(array), step):
        yield (b"," if at else b"[") + _dumped(array[at : at + step])[1:-1]
    yield b"]"
