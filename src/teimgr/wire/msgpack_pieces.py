"""msgpack in pieces: one call of the library reads a text, a number or the head of a list or map, or writes a few rows.

Arrays are written as msgpack-numpy writes them: a map of `nd`, `type`, `kind`, `shape`, `data`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from teimgr.spec import MAX_TEXT_BYTES
from teimgr.wire import json_scan
from teimgr.wire.gil import free
from teimgr.wire.json_pieces import joined
from teimgr.wire.json_scan import MAX_CONTAINERS, MAX_VALUES

MAX_BINARY_BYTES = 20 * 2**20  # the largest image or sound; one call copies it in some milliseconds
_PIECE_BYTES = 64 * 1024
_MAX_DEPTH = 1024
# Heads of lists and maps with more than 15 elements. The library allocates the announced elements, even if none follow:
# a thousand such heads, nested in each other, make 1 GB out of 5 kB.
_LONG_HEADS = (b"\xdc", b"\xdd", b"\xde", b"\xdf")
_FEW_LONG_HEADS = 16
_FIXED_MAPS, _FIXED_LISTS = range(0x80, 0x90), range(0x90, 0xA0)
_MAPS, _LISTS = frozenset((*_FIXED_MAPS, 0xDE, 0xDF)), frozenset((*_FIXED_LISTS, 0xDC, 0xDD))
_BINARIES = frozenset((0xC4, 0xC5, 0xC6))
_NO_KEY = object()


def loads_small(body: bytes | bytearray | memoryview) -> Any:
    """Like `loads`, by one call of the library unless lists in the body may announce more than is there."""
    raw = bytes(body)
    if sum(map(raw.count, _LONG_HEADS)) > _FEW_LONG_HEADS:
        return loads(body)
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=False)
    except msgpack.UnpackException as error:  # not all are ValueErrors
        raise ValueError(str(error)) from error


def loads(body: bytes | bytearray | memoryview) -> Any:
    """Return the value of a msgpack text, like `msgpack.unpackb(body, raw=False, strict_map_key=False)`.

    Raises:
        ValueError: it is not msgpack, or lists and maps announce more elements than the body has bytes.
        InvalidInput: it has more than `MAX_CONTAINERS` lists and maps or members of one map, more than `MAX_VALUES`
            values, a text of more than `MAX_TEXT_BYTES`, or bytes of more than `MAX_BINARY_BYTES`.
    """
    reader = _Reader(memoryview(body))
    try:
        return reader.whole()
    except msgpack.UnpackException as error:  # not all are ValueErrors
        raise ValueError(str(error)) from error


class _Open:
    """A list or map that is being read, with the number of elements or members still to come."""

    __slots__ = ("container", "key", "left")

    def __init__(self, container: list[Any] | dict[Any, Any], left: int) -> None:
        self.container = container
        self.left = left
        self.key: Any = _NO_KEY

    def add(self, value: Any) -> None:
        if isinstance(self.container, list):
            self.container.append(value)
        elif self.key is _NO_KEY:
            if isinstance(value, (list, dict)):
                raise ValueError("the key of a map is a list or a map")  # noqa: TRY004
            self.key = value
            return
        else:
            self.container[self.key] = value
            self.key = _NO_KEY
        self.left -= 1


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._fed = 0
        self._containers = self._values = 0
        self._stack: list[_Open] = []
        size = max(len(body), 1)
        self._unpacker = msgpack.Unpacker(
            raw=False, strict_map_key=False, max_buffer_size=size, max_array_len=size, max_map_len=size
        )

    def whole(self) -> Any:
        """The value of the whole body; what was read of one that is refused is freed in parts."""
        try:
            return self._whole()
        except Exception:
            free(*(one.container for one in self._stack))
            raise

    def _whole(self) -> Any:
        stack = self._stack
        while True:
            value, count = self._next()
            if count:
                if len(stack) == _MAX_DEPTH:
                    raise ValueError("too nested")
                stack.append(_Open(value, count))
                continue
            while stack:
                stack[-1].add(value)
                if stack[-1].left:
                    break
                value = stack.pop().container
            if not stack:
                break
        if self._unpacker.tell() < len(self._body):
            raise ValueError("unpack(b) received extra data.")
        return value

    def _next(self) -> tuple[Any, int]:
        """A value and 0, or an empty list or map and the number of elements or members that follow."""
        at = self._unpacker.tell()
        if at >= len(self._body):
            raise ValueError("Unpack failed: incomplete input")
        head = self._body[at]
        if head in _MAPS:
            if (count := self._read(self._unpacker.read_map_header)) > MAX_CONTAINERS:
                raise json_scan.too_large(f"an object with more than {MAX_CONTAINERS} members")
            self._announced(2 * count)
            return {}, count
        if head in _LISTS:
            count = self._read(self._unpacker.read_array_header)
            self._announced(count)
            return [], count
        return self._read(self._unpacker.unpack, MAX_BINARY_BYTES if head in _BINARIES else MAX_TEXT_BYTES), 0

    def _announced(self, values: int) -> None:
        """Count a list or map, before anything is allocated for what it announces: each value has a byte at least."""
        self._containers += 1
        self._values += values
        if self._values >= len(self._body):
            raise ValueError("Unpack failed: incomplete input")
        if self._containers > MAX_CONTAINERS:
            raise json_scan.too_large(f"more than {MAX_CONTAINERS} lists and objects")
        if self._values > MAX_VALUES:
            raise json_scan.too_large(f"more than {MAX_VALUES} values")

    def _read(self, read: Callable[[], Any], most_bytes: int = MAX_TEXT_BYTES) -> Any:
        while True:
            try:
                return read()
            except msgpack.OutOfData:
                if self._fed >= len(self._body):
                    raise ValueError("Unpack failed: incomplete input") from None
                if self._fed - self._unpacker.tell() > most_bytes:
                    place = (one.key if isinstance(one.container, dict) else len(one.container) for one in self._stack)
                    raise json_scan.long_value(place, most_bytes) from None
                self._unpacker.feed(self._body[self._fed : self._fed + _PIECE_BYTES])
                self._fed += _PIECE_BYTES


# Bytes of an array copied in one call, and rows of a list written in one call: a millisecond or two.
_COPIED_BYTES = 2**20
_ROWS_AT_ONCE = 256
# Arrays up to this size are written together with the surrounding values.
_SMALL_ARRAY_BYTES = 2**16 - 1


def dumps(value: Any) -> bytes:
    """Encode `value` as msgpack, with arrays of numpy; the elements of large lists are maps of few members."""
    pieces: list[bytes | memoryview] = []
    packer = msgpack.Packer(default=_array, use_bin_type=True)
    _write(pieces.append, packer, value)
    return joined(pieces)


def _write(write: Callable[[bytes | memoryview], object], packer: msgpack.Packer, value: Any) -> None:
    if isinstance(value, dict) and any(map(_may_be_large, value.values())):
        write(packer.pack_map_header(len(value)))
        for key, member in value.items():
            write(packer.pack(key))
            _write(write, packer, member)
    elif isinstance(value, list) and value:
        write(packer.pack_array_header(len(value)))
        for at in range(0, len(value), _ROWS_AT_ONCE):
            few = value[at : at + _ROWS_AT_ONCE]
            if any(map(_may_be_large, few)):
                for one in few:
                    _write(write, packer, one)
            else:
                write(b"".join(map(packer.pack, few)))
    elif isinstance(value, np.ndarray) and value.nbytes > _SMALL_ARRAY_BYTES:
        whole = np.ascontiguousarray(value)
        head = packer.pack(_array(whole[:0]) | {b"shape": whole.shape})
        write(head[: -len(_NO_BYTES)] + b"\xc6" + whole.nbytes.to_bytes(4, "big"))
        data = whole.reshape(-1).view(np.uint8).data
        for at in range(0, len(data), _COPIED_BYTES):
            write(data[at : at + _COPIED_BYTES])
    else:
        write(packer.pack(value))


_NO_BYTES = msgpack.packb(b"")


def _may_be_large(value: Any) -> bool:
    """True if a value is an array that is not small, or may contain one."""
    if isinstance(value, np.ndarray):
        return value.nbytes > _SMALL_ARRAY_BYTES
    return isinstance(value, list) or (isinstance(value, dict) and any(map(_may_be_large, value.values())))


def _array(value: object) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} in an answer")
    array = np.ascontiguousarray(value)
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}
