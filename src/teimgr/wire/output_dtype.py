"""The element type of EmbedArrow's vectors by request metadata: the contract's field knows float32 and float16 alone.

A front says it in the field `output_dtype` of the message, whose enumeration is open: numbers from 101 are teimgr's.
"""

from __future__ import annotations

from teimgr.errors import InvalidInput
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.fields import varint
from teimgr.wire.precision import Precision

# Request metadata of EmbedArrow and EmbedArrowStream; its value is a word of `Precision`.
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
    """The field `output_dtype` for `word`, to stand behind a message: the last of several counts.

    Raises:
        InvalidInput: it is no word of `Precision`.
    """
    try:
        return _TAG + varint(NUMBER_OF[Precision(word)])
    except ValueError:
        known = ", ".join(precision.value for precision in Precision)
        raise InvalidInput(f"The metadata `{OUTPUT_DTYPE_KEY}` is {word[:80]!r}, not one of {known}") from None
