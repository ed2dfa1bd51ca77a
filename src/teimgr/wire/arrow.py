"""Arrow IPC streams of texts in, of vectors out.

In: a stream (never the file format) whose batches have a string column, `text` by name or else the first one; any
string type, dictionary-encoded too; bodies plain, LZ4 or ZSTD.
Out: the same batches with two columns, `embeddings` (fixed-size list, null where the row failed) and `error`
(string, null where it did not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TeimgrError, TooLarge
from teimgr.wire.arrow_limits import decoded_bytes


@dataclass(frozen=True, slots=True)
class TextBatches:
    """The texts of all batches in one list (None for a null), and how many rows each batch had."""

    texts: list[str | None]
    rows: list[int]


def read_texts(
    ipc: bytes | memoryview, limit_bytes: int, check_rows: Callable[[int], None] = lambda rows: None
) -> TextBatches:
    """Decode and fully validate a stream of texts.

    `check_rows` is told how many there are while they are still Arrow's, and may raise: a row can be a single byte on
    the way in, and is a Python string and a whole vector from here on.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8, no batch, or no string column.
        TooLarge: its buffers need more than `limit_bytes` once decompressed, or its texts do once each has its own.
    """
    try:
        needed = decoded_bytes(ipc)
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if needed > limit_bytes:
        raise TooLarge(f"Arrow batch decodes to {needed} bytes, the limit is {limit_bytes} bytes")
    try:
        with pa.ipc.open_stream(pa.py_buffer(ipc)) as reader:
            position = _text_column(reader.schema)
            columns = [_checked(batch).column(position) for batch in reader]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if not columns:
        raise InvalidInput("No RecordBatch in stream")
    check_rows(sum(map(len, columns)))
    said = sum(map(_text_bytes, columns))
    if said > limit_bytes:
        raise TooLarge(f"Arrow batch says {said} bytes of text, the limit is {limit_bytes} bytes")
    texts: list[str | None] = []
    for column in columns:
        texts.extend(column.to_pylist())
    return TextBatches(texts, [len(column) for column in columns])


def write_vectors(
    vectors: NDArray[np.float32],
    errors: Mapping[int, TeimgrError],
    rows: list[int],
    *,
    half: bool = False,
    lz4: bool = False,
) -> memoryview:
    """The reply stream for `vectors` (`[n, dim]`, C-contiguous), cut into batches of `rows` rows.

    `half` sends float16; `lz4` compresses bodies (which gains nothing on vectors and is there for clients that ask).
    """
    values = vectors.astype(np.float16) if half else vectors
    item = pa.field("item", pa.float16() if half else pa.float32(), nullable=False)
    kind = pa.list_(item, vectors.shape[1])
    schema = pa.schema([pa.field("embeddings", kind), pa.field("error", pa.string())])
    options = pa.ipc.IpcWriteOptions(compression="lz4" if lz4 else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        start = 0
        for count in rows:
            stop = start + count
            writer.write_batch(_batch(schema, values[start:stop], [errors.get(row) for row in range(start, stop)]))
            start = stop
    return memoryview(sink.getvalue())


def _text_column(schema: pa.Schema) -> int:
    candidates = [position for position, field in enumerate(schema) if _is_string(field.type)]
    if not candidates:
        raise InvalidInput(f"No string column: expected `text`, got {schema.names} (a StringArray is needed)")
    named = [position for position in candidates if schema.names[position] == "text"]
    return named[0] if named else candidates[0]


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch itself, once its offsets and UTF-8 are known to be sound: IPC reading alone checks neither."""
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


def _batch(
    schema: pa.Schema, values: NDArray[np.float32] | NDArray[np.float16], failures: list[TeimgrError | None]
) -> pa.RecordBatch:
    flat = pa.array(values.reshape(-1))
    kind = schema.field("embeddings").type
    if any(failures):
        failed = pa.array([failure is not None for failure in failures])
        embeddings = pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=failed)
        messages = pa.array([failure.message if failure else None for failure in failures], pa.string())
    else:
        embeddings = pa.FixedSizeListArray.from_arrays(flat, type=kind)
        messages = pa.nulls(len(failures), pa.string())
    return pa.record_batch([embeddings, messages], schema=schema)
