"""Quantisation of vectors to fewer bits, number by number, so a vector never depends on its batch.

As in sentence-transformers' `quantize_embeddings` (6.2), int8 is uint8 minus 128. But int8 and uint8 always span -1 to
1, the range of unit vectors, instead of the range of the batch or of a calibration set.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import InvalidInput
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.protobuf import varint

_STEP = np.float32(2.0) / np.float32(255.0)
_HALF_MAX = float(np.finfo(np.float16).max)
_BITS = 8


class Precision(str, Enum):
    """Element type of a vector; the values are sentence-transformers' names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"

    @property
    def dtype(self) -> np.dtype[Any]:
        return _DTYPES[self]

    @property
    def needs_unit_vectors(self) -> bool:
        """True if numbers beyond -1 and 1 are clipped."""
        return self in (Precision.INT8, Precision.UINT8)

    def elements(self, width: int) -> int:
        return -(-width // _BITS) if self in (Precision.BINARY, Precision.UBINARY) else width

    def size_bytes(self, width: int) -> int:
        return self.elements(width) * self.dtype.itemsize


def converted(vectors: NDArray[np.float32], precision: Precision) -> NDArray[Any]:
    """Convert `vectors` (float32 [..., width]) to `precision.dtype` [..., elements], C-contiguous.

    float32 returns `vectors` itself. float16 clips to ±65504, so no number becomes infinite. int8 and uint8 have 256
    steps from -1 to 1. binary and ubinary have a bit per number, set if it is positive, the first in the highest bit.
    """
    if precision is Precision.FLOAT32:
        return vectors
    if precision is Precision.FLOAT16:
        return np.clip(vectors, -_HALF_MAX, _HALF_MAX).astype(np.float16)
    if precision in (Precision.BINARY, Precision.UBINARY):
        unsigned = np.packbits(vectors > 0, axis=-1)
    else:
        unsigned = np.clip(np.floor((vectors + np.float32(1.0)) / _STEP), 0, 255).astype(np.uint8)
    if precision.dtype == np.uint8:
        return unsigned
    return (unsigned ^ np.uint8(0x80)).view(np.int8)  # minus 128


_DTYPES: dict[Precision, np.dtype[Any]] = {
    Precision.FLOAT32: np.dtype(np.float32),
    Precision.FLOAT16: np.dtype(np.float16),
    Precision.INT8: np.dtype(np.int8),
    Precision.UINT8: np.dtype(np.uint8),
    Precision.BINARY: np.dtype(np.int8),
    Precision.UBINARY: np.dtype(np.uint8),
}

# Request metadata of EmbedArrow and EmbedArrowStream; its value is one of `Precision`.
OUTPUT_DTYPE_KEY = "x-teimgr-output-dtype"

NUMBER_OF: dict[Precision, int] = {
    Precision.FLOAT32: multiplexer_pb2.OUTPUT_DTYPE_F32,
    Precision.FLOAT16: multiplexer_pb2.OUTPUT_DTYPE_F16,
    Precision.INT8: 101,
    Precision.UINT8: 102,
    Precision.BINARY: 103,
    Precision.UBINARY: 104,
}

_TAG = varint(multiplexer_pb2.EmbedArrowRequest.OUTPUT_DTYPE_FIELD_NUMBER << 3)


def output_dtype_field(word: str) -> bytes:
    """Serialise the field `output_dtype`, to append to a message: the last occurrence of a field counts.

    Raises:
        InvalidInput: `word` is not a value of `Precision`.
    """
    try:
        return _TAG + varint(NUMBER_OF[Precision(word)])
    except ValueError:
        known = ", ".join(precision.value for precision in Precision)
        raise InvalidInput(f"The metadata `{OUTPUT_DTYPE_KEY}` is {word[:80]!r}, not one of {known}") from None
