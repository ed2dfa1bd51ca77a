"""The size of an Arrow IPC stream once it is decoded, and its counts, from its headers, before anything is allocated.

A body of a few bytes may declare that it decompresses to terabytes, or have thousands of columns, or batches that share
a large dictionary, and Arrow's reader takes time and memory for each. This module reads only the headers, within its
own limits: every compressed buffer starts with its decoded length as an int64.
Formats: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc and
Message.fbs; flatbuffers are read by their vtables (https://flatbuffers.dev/internals).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from teimgr.errors import TooLarge

# Limits of one stream. Child columns and dictionary batches count too. An empty column or buffer costs Arrow's reader
# some microseconds, an empty batch up to a hundred.
MAX_COLUMNS = 1024
MAX_BATCHES = 10_000
MAX_BUFFERS = 100_000
# Arrow decodes and copies column names, metadata and time zones repeatedly, each in one call.
MAX_SCHEMA_BYTES = 2**20

_u16, _u32, _i32, _i64 = (struct.Struct(each).unpack_from for each in ("<H", "<I", "<i", "<q"))
_marker_and_size, _two_longs = struct.Struct("<Ii").unpack_from, struct.Struct("<qq").unpack_from

_CONTINUATION = 0xFFFFFFFF
_SCHEMA = 1
_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3
_STORED_UNCOMPRESSED = -1

# Field numbers in Message.fbs.
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_BATCH_LENGTH, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 2, 3
_DICTIONARY_ID, _DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 0, 1, 2

# Field numbers and types in Schema.fbs: Utf8, LargeUtf8, Utf8View; a dictionary has the type of its values.
_SCHEMA_FIELDS, _FIELD_TYPE, _FIELD_CHILDREN = 1, 2, 5
_STRINGS = (5, 20, 24)

# The most messages, and the most columns, that `read_outline` inspects.
_OUTLINE = 100


class Outline(NamedTuple):
    """Whether a stream has a string column and a batch, or may have them beyond the inspected part."""

    has_text: bool
    has_batch: bool


def read_outline(stream: bytes | bytearray | memoryview) -> Outline:
    """Inspect the first messages of an IPC stream: cheap at any size, so not every fault is found.

    Raises:
        ValueError: it does not begin with a schema, or a header points outside the stream.
    """
    view = memoryview(stream)
    try:
        headers = [_header(view, metadata) for metadata, _, _ in islice(_messages(view), _OUTLINE)]
        if not headers or headers[0][0] != _SCHEMA:
            raise ValueError(f"Expected schema message, found {'another' if headers else 'empty stream'}")
        has_batch = len(headers) == _OUTLINE or any(kind == _RECORD_BATCH for kind, _ in headers)
        return Outline(_has_text(view, headers[0][1]), has_batch)
    except (struct.error, IndexError) as error:
        raise ValueError("a message header points outside the stream") from error


class StreamSize(NamedTuple):
    """The contents of an IPC stream: rows and batches, the bytes of all buffers after decompression, and `read_bytes`,
    which counts dictionaries again for each batch: each batch validates them, and copies them if they grow."""

    rows: int
    batches: int
    decoded_bytes: int
    read_bytes: int


def stream_size(stream: bytes | memoryview) -> StreamSize:
    """Return the size of an IPC stream, by its headers.

    Raises:
        ValueError: a header points outside the stream.
        TooLarge: more than `MAX_COLUMNS`, `MAX_BATCHES`, `MAX_BUFFERS` or `MAX_SCHEMA_BYTES`.
    """
    view = memoryview(stream)
    try:
        return _stream_size(view)
    except (struct.error, IndexError) as error:
        raise ValueError("a message header points outside the stream") from error


def _stream_size(view: memoryview) -> StreamSize:
    rows = batches = decoded = read = buffers = 0
    dictionaries: dict[int, int] = {}  # bytes by id
    for count, (metadata, body, size) in enumerate(_messages(view)):
        if count > MAX_BATCHES:
            raise TooLarge(f"The Arrow stream has more than {MAX_BATCHES} batches")
        kind, header = _header(view, metadata)
        if kind == _SCHEMA:
            if body - metadata > MAX_SCHEMA_BYTES:
                raise TooLarge(f"The Arrow schema has {body - metadata} bytes, the limit is {MAX_SCHEMA_BYTES} bytes")
            _check_columns(view, header)
        if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
            continue
        batch = header
        if kind == _DICTIONARY_BATCH:
            data_at = _field(view, header, _DICTIONARY_DATA)
            if not data_at:
                continue
            batch = _follow(view, data_at)
        found, needed = _decoded_body(view, batch, body, size)
        if (buffers := buffers + found) > MAX_BUFFERS:
            raise TooLarge(f"The Arrow stream has more than {MAX_BUFFERS} buffers")
        decoded += needed
        if kind == _DICTIONARY_BATCH:
            number = _long(view, header, _DICTIONARY_ID)
            delta_at = _field(view, header, _DICTIONARY_IS_DELTA)
            dictionaries[number] = needed + (dictionaries.get(number, 0) if delta_at and view[delta_at] else 0)
        else:
            batches += 1
            rows += max(0, _long(view, batch, _BATCH_LENGTH))
            read += needed + sum(dictionaries.values())
    return StreamSize(rows, batches, decoded, read)


def _check_columns(view: memoryview, schema: int) -> None:
    """Count columns with their children, as often as a reader meets them: several may share a child."""
    waiting, count = [(schema, _SCHEMA_FIELDS)], 0
    while waiting:
        at = _field(view, *waiting.pop())
        if not at:
            continue
        vector = _follow(view, at)
        (fields,) = _u32(view, vector)
        if (count := count + fields) > MAX_COLUMNS:
            raise TooLarge(f"The Arrow schema has more than {MAX_COLUMNS} columns, their children included")
        waiting += [(_follow(view, vector + 4 + 4 * index), _FIELD_CHILDREN) for index in range(fields)]


def _long(view: memoryview, table: int, number: int) -> int:
    at = _field(view, table, number)
    return int(_i64(view, at)[0]) if at else 0


def _messages(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (start of the metadata, start of the body, size of the body) of every message."""
    offset = 0
    while offset + 8 <= len(view):
        marker, size = _marker_and_size(view, offset)
        if marker != _CONTINUATION:
            raise ValueError("not an IPC stream (no continuation marker)")
        if size == 0:
            break
        metadata = offset + 8
        body = metadata + size
        if size < 0 or body > len(view):
            raise ValueError(f"a message claims {size} bytes of metadata, {len(view) - metadata} are there")
        length_at = _field(view, _follow(view, metadata), _MESSAGE_BODY_LENGTH)
        (length,) = _i64(view, length_at) if length_at else (0,)
        if length < 0 or body + length > len(view):
            raise ValueError(f"a message claims a body of {length} bytes, {len(view) - body} are there")
        yield metadata, body, length
        offset = body + length


def _header(view: memoryview, metadata: int) -> tuple[int, int]:
    """Return the type of a message, 0 if it has none, and the position of its header table."""
    message = _follow(view, metadata)
    kind_at = _field(view, message, _MESSAGE_HEADER_TYPE)
    header_at = _field(view, message, _MESSAGE_HEADER)
    return (view[kind_at], _follow(view, header_at)) if kind_at and header_at else (0, 0)


def _has_text(view: memoryview, schema: int) -> bool:
    at = _field(view, schema, _SCHEMA_FIELDS)
    if not at:
        return False
    vector = _follow(view, at)
    (count,) = _u32(view, vector)
    columns = (_follow(view, vector + 4 + 4 * index) for index in range(min(count, _OUTLINE)))
    types_at = [_field(view, column, _FIELD_TYPE) for column in columns]
    return count > _OUTLINE or any(type_at and view[type_at] in _STRINGS for type_at in types_at)


def _decoded_body(view: memoryview, batch: int, body: int, size: int) -> tuple[int, int]:
    """Return how many buffers a batch has, and their bytes after decompression. Several buffers may share bytes of the
    body, which a reply that repeats columns has once for each."""
    vector, count = _buffers(view, batch)
    if count > MAX_BUFFERS:
        return count, size
    if not _field(view, batch, _BATCH_COMPRESSION):
        lengths = struct.unpack_from(f"<{2 * count}q", view, vector + 4)[1::2] if count else ()
        return count, max(size, sum(length for length in lengths if length > 0))
    places = (_two_longs(view, vector + 4 + 16 * index) for index in range(count))
    return count, sum(_decoded_buffer(view, body, size, offset, length) for offset, length in places)


def _decoded_buffer(view: memoryview, body: int, size: int, offset: int, length: int) -> int:
    if length == 0:
        return 0
    if offset < 0 or length < 8 or offset + length > size:
        raise ValueError("a buffer lies outside its message")
    (decoded,) = _i64(view, body + offset)
    if decoded == _STORED_UNCOMPRESSED:
        return length
    if decoded < 0:
        raise ValueError("a compressed buffer claims a negative length")
    return int(decoded)


def _buffers(view: memoryview, batch: int) -> tuple[int, int]:
    """Return the position of the vector of a batch's buffers, and their number."""
    at = _field(view, batch, _BATCH_BUFFERS)
    if not at:
        return 0, 0
    vector = _follow(view, at)
    (count,) = _u32(view, vector)
    if count * 16 > len(view) - vector:
        raise ValueError(f"a batch claims {count} buffers")
    return vector, int(count)


# Flatbuffers: a table starts with the signed distance back to its vtable. The vtable has two sizes, then the 16-bit
# offset of each field in the table, 0 if the field is absent.


def _follow(view: memoryview, at: int) -> int:
    (distance,) = _u32(view, at)
    return at + int(distance)


def _field(view: memoryview, table: int, number: int) -> int:
    """Return the position of a table's field, 0 if it is absent."""
    (back,) = _i32(view, table)
    vtable = table - back
    if vtable < 0:
        raise ValueError("a table points before the stream")
    (vtable_size,) = _u16(view, vtable)
    slot = 4 + 2 * number
    if slot + 2 > vtable_size:
        return 0
    (offset,) = _u16(view, vtable + slot)
    return table + int(offset) if offset else 0
