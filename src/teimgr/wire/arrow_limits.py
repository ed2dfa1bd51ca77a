"""How much memory an Arrow IPC stream would take, read from its headers before anything is allocated.

A body of a few bytes may declare that it decompresses to terabytes, and the reader allocates first. So the
RecordBatch headers are walked here: every compressed buffer starts with its decoded length as an int64.
Formats: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc and
Message.fbs; flatbuffers are read by their vtables (https://flatbuffers.dev/internals).
"""

from __future__ import annotations

import struct

_CONTINUATION = 0xFFFFFFFF
_RECORD_BATCH = 3
_DICTIONARY_BATCH = 2
_STORED_UNCOMPRESSED = -1

# Field numbers in Message.fbs.
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3
_DICTIONARY_DATA = 1


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


def _messages(view: memoryview) -> list[tuple[int, int, int]]:
    """(start of the metadata, start of the body, size of the body) of every message."""
    found = []
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
        (length,) = struct.unpack_from("<q", view, at) if (at := _field(view, _root(view, metadata), 3)) else (0,)
        if length < 0 or body + length > len(view):
            raise ValueError(f"a message claims a body of {length} bytes, {len(view) - body} are there")
        found.append((metadata, body, length))
        offset = body + length
    return found


def _decoded_body(view: memoryview, metadata: int, body: int, size: int) -> int:
    message = _root(view, metadata)
    kind_at = _field(view, message, _MESSAGE_HEADER_TYPE)
    header_at = _field(view, message, _MESSAGE_HEADER)
    if not kind_at or not header_at or view[kind_at] not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return 0
    batch = _follow(view, header_at)
    if view[kind_at] == _DICTIONARY_BATCH:
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


def _root(view: memoryview, start: int) -> int:
    return _follow(view, start)


def _follow(view: memoryview, at: int) -> int:
    (distance,) = struct.unpack_from("<I", view, at)
    return at + int(distance)


def _field(view: memoryview, table: int, number: int) -> int:
    """Where a field of a table lies, 0 when it is absent."""
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
