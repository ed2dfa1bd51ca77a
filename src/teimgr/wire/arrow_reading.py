"""An Arrow IPC stream, opened with its size known and read with every buffer checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from teimgr.errors import InvalidInput, TooLarge
from teimgr.wire.arrow_limits import decoded_bytes


@contextmanager
def opened(ipc: bytes | memoryview, limit_bytes: int) -> Iterator[pa.RecordBatchStreamReader]:
    """A reader of the stream. What Arrow says against it, in the block too, becomes `InvalidInput`.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8.
        TooLarge: its buffers need more than `limit_bytes` once decompressed.
    """
    try:
        needed = decoded_bytes(ipc)
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if needed > limit_bytes:
        raise TooLarge(f"Arrow batch decodes to {needed} bytes, the limit is {limit_bytes} bytes")
    try:
        with pa.ipc.open_stream(pa.py_buffer(ipc)) as reader:
            yield reader
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error


def batches_of(reader: pa.RecordBatchStreamReader) -> list[pa.RecordBatch]:
    """All batches, once their offsets and UTF-8 are known to be sound: IPC reading alone checks neither.

    Raises:
        InvalidInput: there is none.
    """
    batches = [_checked(batch) for batch in reader]
    if not batches:
        raise InvalidInput("No RecordBatch in stream")
    return batches


def is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts; a dictionary does when its values do."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts_of(columns: list[pa.Array], limit_bytes: int) -> list[str | None]:
    """The rows of string columns in one list, None for a null.

    Raises:
        TooLarge: they take more than `limit_bytes` once each has its own.
    """
    said = sum(map(_text_bytes, columns))
    if said > limit_bytes:
        raise TooLarge(f"Arrow batch says {said} bytes of text, the limit is {limit_bytes} bytes")
    texts: list[str | None] = []
    for column in columns:
        texts.extend(column.to_pylist())
    return texts


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


def _text_bytes(column: pa.Array) -> int:
    """UTF-8 bytes of all rows. Rows of a dictionary or of views may share them, as Python strings they will not."""
    if pa.types.is_dictionary(column.type):
        lengths = _lengths(column.dictionary).take(column.indices)
    else:
        lengths = _lengths(column)
    return int(pc.sum(lengths).as_py() or 0)


def _lengths(column: pa.Array) -> pa.Array:
    """Bytes of each row, null for a null row."""
    if not pa.types.is_string_view(column.type):
        return pc.binary_length(column)
    # Arrow computes no lengths of views; each starts with its own as an int32 of the 16 bytes it takes.
    views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
    lengths = views[column.offset : column.offset + len(column), 0]
    return pa.array(lengths, pa.int64(), mask=~column.is_valid().to_numpy(zero_copy_only=False))
