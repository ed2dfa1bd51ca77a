"""Protobuf encoding of array replies by hand, byte for byte as protobuf serialises them.

For 384 floats, building a message and serialising it takes some 58 µs, joining the bytes a quarter of one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from teimgr.wire.frames import Timings
from teimgr.wire.protobuf import varint

_LENGTH_DELIMITED_1 = b"\x0a"  # field 1, wire type 2
_LENGTH_DELIMITED_2 = b"\x12"  # field 2, wire type 2
# An entry of a sparse vector: tag and length, tag of the index, its varint, tag of the value, its four bytes.
_SPARSE_WIDTH = 2 + 1 + 5 + 1 + 4
_VARINT_1 = 0x08  # field 1, wire type 0
_FIXED32_2 = 0x15  # field 2, wire type 5


def metadata(timings: Timings) -> bytes:
    """`tei.v1.Metadata`: fields 1 to 6 in order, zeros omitted as in proto3."""
    return b"".join(bytes((field << 3,)) + varint(value) for field, value in enumerate(timings, 1) if value)


def with_metadata(body: bytes, timings: Timings) -> bytes:
    """A reply of field 1, serialised in `body`, and its metadata, which is field 2 of every reply."""
    meta = metadata(timings)
    return b"".join((body, _LENGTH_DELIMITED_2, varint(len(meta)), meta))


def embed_response(vector: NDArray[np.float32], timings: Timings) -> bytes:
    """`tei.v1.EmbedResponse` of one vector (shape `[dim]`, float32, contiguous)."""
    floats = vector.astype("<f4", copy=False).tobytes()
    meta = metadata(timings)
    return b"".join(
        (_LENGTH_DELIMITED_1, varint(len(floats)), floats, _LENGTH_DELIMITED_2, varint(len(meta)), meta)
        if floats
        else (_LENGTH_DELIMITED_2, varint(len(meta)), meta)
    )


def embed_sparse_response(indices: NDArray[np.uint32], values: NDArray[np.float32], timings: Timings) -> bytes:
    """`tei.v1.EmbedSparseResponse` of K entries: uint32 [K], float32 [K].

    Every entry is laid out at full width, then a mask selects the bytes to send: those that the index needs, and no
    field that is zero.
    """
    floats = np.ascontiguousarray(values, "<f4")
    rows = np.empty((len(indices), _SPARSE_WIDTH), np.uint8)
    sent = np.ones(rows.shape, np.bool_)
    rows[:, 0] = _LENGTH_DELIMITED_1[0]
    rows[:, 2] = _VARINT_1
    rows[:, 3:8], sent[:, 3:8] = _varints(indices)
    sent[:, 2] = sent[:, 3]
    rows[:, 8] = _FIXED32_2
    rows[:, 9:] = floats.view(np.uint8).reshape(-1, 4)
    sent[:, 8:] = (floats.view("<u4") != 0)[:, None]  # compared as bits: -0.0 is sent
    rows[:, 1] = sent[:, 2:].sum(axis=1)
    return with_metadata(rows[sent].tobytes(), timings)


def _varints(numbers: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The varint of each number, uint8 [K, 5], and a mask of the bytes it needs: none for zero."""
    groups = numbers.astype(np.uint64)[:, None] >> np.arange(0, 35, 7, dtype=np.uint64)
    needed = groups != 0
    follows = np.zeros_like(needed)
    follows[:, :-1] = needed[:, 1:]
    return (groups & np.uint64(0x7F)).astype(np.uint8) | follows.astype(np.uint8) << np.uint8(7), needed


def embed_all_response(vectors: NDArray[np.float32], timings: Timings) -> bytes:
    """`tei.v1.EmbedAllResponse` of vectors per token, float32 [tokens, width]."""
    tokens, width = vectors.shape
    floats = np.ascontiguousarray(vectors, "<f4").view(np.uint8).reshape(tokens, 4 * width)
    inner = _LENGTH_DELIMITED_1 + varint(4 * width) if width else b""
    head = np.frombuffer(_LENGTH_DELIMITED_1 + varint(len(inner) + 4 * width) + inner, np.uint8)
    body = np.hstack((np.broadcast_to(head, (tokens, len(head))), floats)).tobytes()
    return with_metadata(body, timings)


def arrow_response(ipc: bytes | memoryview) -> bytes:
    """`EmbedArrowResponse` (or the sparse one) around an Arrow IPC stream."""
    return b"".join((_LENGTH_DELIMITED_1, varint(len(ipc)), ipc))
