"""The decoded size of an Arrow IPC stream, from its headers, before anything is allocated.

A body of a few bytes may declare that it decompresses to terabytes, and Arrow's reader allocates first. So the
RecordBatch headers are read here: every compressed buffer starts with its decoded length as an int64.
Formats: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc and
Message.fbs; flatbuffers are read by their vtables (https://flatbuffers.dev/internals).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

_CONTINUATION = 0xFFFFFFFF
_SCHEMA = 1
_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3
_STORED_UNCOMPRESSED = -1

# Field numbers in Message.fbs.
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3
_DICTIONARY_DATA = 1

# Field numbers and types in Schema.fbs: Utf8, LargeUtf8, Utf8View; a dictionary has the type of its values.
_SCHEMA_FIELDS, _FIELD_TYPE = 1, 2
_STRINGS = (5, 20, 24)

# Messages, and columns of the schema, that an outline inspects at most.
_OUTLINE = 100


class Outline(NamedTuple):
    """Whether a stream has a string column and a batch, or may have them beyond the inspected part."""

    has_text: bool
    has_batch: bool


def read_outline(stream: bytes | memoryview) -> Outline:
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


def decoded_bytes(stream: bytes | memoryview) -> int:
    """Bytes of all buffers of all batches of an IPC stream after decompression.

    Raises:
        ValueError: a header points outside the stream.
    """
    view = memoryview(stream)
    try:
        return sum(_decoded_body(view, metadata, body, size) for metadata, body, size in _messages(view))
    except (struct.error, IndexError) as error:
        raise ValueError("a message header points outside the stream") from error


def _messages(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """(start of the metadata, start of the body, size of the body) of every message."""
    offset = 0
    while offset + 8 <= len(view):
        marker, size = struct.unpack_from("<Ii", view, offset)
        if marker != _CONTINUATION:
            raise ValueError("not an IPC stream (no continuation marker)")
        if size == 0:
            break
        metadata = offset + 8
        body = metadata + size
        if size < 0 or body > len(view):
            raise ValueError(f"a message claims {size} bytes of metadata, {len(view) - metadata} are there")
        length_at = _field(view, _follow(view, metadata), _MESSAGE_BODY_LENGTH)
        (length,) = struct.unpack_from("<q", view, length_at) if length_at else (0,)
        if length < 0 or body + length > len(view):
            raise ValueError(f"a message claims a body of {length} bytes, {len(view) - body} are there")
        yield metadata, body, length
        offset = body + length


def _header(view: memoryview, metadata: int) -> tuple[int, int]:
    """The type of a message, 0 when it has none, and the position of its header table."""
    message = _follow(view, metadata)
    kind_at = _field(view, message, _MESSAGE_HEADER_TYPE)
    header_at = _field(view, message, _MESSAGE_HEADER)
    return (view[kind_at], _follow(view, header_at)) if kind_at and header_at else (0, 0)


def _has_text(view: memoryview, schema: int) -> bool:
    at = _field(view, schema, _SCHEMA_FIELDS)
    if not at:
        return False
    vector = _follow(view, at)
    (count,) = struct.unpack_from("<I", view, vector)
    columns = (_follow(view, vector + 4 + 4 * index) for index in range(min(count, _OUTLINE)))
    types_at = [_field(view, column, _FIELD_TYPE) for column in columns]
    return count > _OUTLINE or any(type_at and view[type_at] in _STRINGS for type_at in types_at)


def _decoded_body(view: memoryview, metadata: int, body: int, size: int) -> int:
    kind, batch = _header(view, metadata)
    if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return 0
    if kind == _DICTIONARY_BATCH:
        data_at = _field(view, batch, _DICTIONARY_DATA)
        if not data_at:
            return 0
        batch = _follow(view, data_at)
    if not _field(view, batch, _BATCH_COMPRESSION):
        return size
    return sum(_decoded_buffer(view, body, size, offset, length) for offset, length in _buffers(view, batch))


def _decoded_buffer(view: memoryview, body: int, size: int, offset: int, length: int) -> int:
    if length == 0:
        return 0
    if offset < 0 or length < 8 or offset + length > size:
        raise ValueError("a buffer lies outside its message")
    (decoded,) = struct.unpack_from("<q", view, body + offset)
    if decoded == _STORED_UNCOMPRESSED:
        return length
    if decoded < 0:
        raise ValueError("a compressed buffer claims a negative length")
    return int(decoded)


def _buffers(view: memoryview, batch: int) -> list[tuple[int, int]]:
    at = _field(view, batch, _BATCH_BUFFERS)
    if not at:
        return []
    vector = _follow(view, at)
    (count,) = struct.unpack_from("<I", view, vector)
    if count * 16 > len(view) - vector:
        raise ValueError(f"a batch claims {count} buffers")
    return [struct.unpack_from("<qq", view, vector + 4 + 16 * index) for index in range(count)]


# Flatbuffers: a table starts with the signed distance back to its vtable; the vtable holds, after its own two
# sizes, the 16-bit offset of each field in the table, 0 when absent.


def _follow(view: memoryview, at: int) -> int:
    (distance,) = struct.unpack_from("<I", view, at)
    return at + int(distance)


def _field(view: memoryview, table: int, number: int) -> int:
    """The position of a table's field, 0 when it is absent."""
    (back,) = struct.unpack_from("<i", view, table)
    vtable = table - back
    if vtable < 0:
        raise ValueError("a table points before the stream")
    (vtable_size,) = struct.unpack_from("<H", view, vtable)
    slot = 4 + 2 * number
    if slot + 2 > vtable_size:
        return 0
    (offset,) = struct.unpack_from("<H", view, vtable + slot)
    return table + int(offset) if offset else 0
