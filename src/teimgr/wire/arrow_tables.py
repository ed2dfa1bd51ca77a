"""Arrow tables: results as columns and IPC streams, and columns of image files. A failed row is null."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TeimgrError
from teimgr.wire.quantisation import Precision, converted

_ENTRY = pa.struct([pa.field("index", pa.uint32(), nullable=False), pa.field("value", pa.float32(), nullable=False)])
ENTRY_BYTES = 8

Failed = NDArray[np.bool_] | None
Head = Callable[[int], bytes]
"""Returns the bytes to write before a stream of the given size, such as the tag of a protobuf field."""


class Column(NamedTuple):
    """An Arrow field and its values for all rows of a reply."""

    field: pa.Field
    values: pa.Array


class Keys(NamedTuple):
    """Key columns of a request, repeated in its reply: their fields, and one array per field for every batch."""

    fields: Sequence[pa.Field]
    batches: Sequence[Sequence[pa.Array]]


def failed_rows(count: int, errors: Mapping[int, TeimgrError]) -> Failed:
    """Return a mask of the failed rows, bool [count]; None if none failed."""
    if not errors:
        return None
    failed = np.zeros(count, np.bool_)
    failed[list(errors)] = True
    return failed


def vector_column(
    name: str,
    vectors: NDArray[np.float32],
    failed: Failed,
    precision: Precision = Precision.FLOAT32,
    metadata: Mapping[str, str] | None = None,
) -> Column:
    """Make a column with a fixed-size list per row; `vectors` is float32 [n, width], C-contiguous."""
    elements = converted(vectors, precision)
    kind = _vector_type(precision, elements.shape[1])
    values = pa.FixedSizeListArray.from_arrays(pa.array(elements.reshape(-1)), type=kind, mask=_mask(failed))
    return Column(pa.field(name, kind, metadata=metadata), values)


def matrix_column(
    name: str,
    matrices: Sequence[NDArray[np.float32] | None],
    width: int,
    precision: Precision = Precision.FLOAT32,
    metadata: Mapping[str, str] | None = None,
) -> Column:
    """Make a column with a list of fixed-size lists per row, of float32 [any, width]; a row that is None is null."""
    parts = [np.zeros((0, width), np.float32), *(matrix for matrix in matrices if matrix is not None)]
    elements = converted(np.concatenate(parts), precision)
    inner = _vector_type(precision, elements.shape[1])
    flat = pa.FixedSizeListArray.from_arrays(pa.array(elements.reshape(-1)), type=inner)
    kind = pa.list_(pa.field("item", inner, nullable=False))
    return Column(pa.field(name, kind, metadata=metadata), _lists(kind, flat, matrices))


def sparse_column(
    name: str,
    vectors: Sequence[tuple[NDArray[np.uint32], NDArray[np.float32]] | None],
    metadata: Mapping[str, str] | None = None,
) -> Column:
    """Make a column with a list of (index, value) per row, from uint32 [k] and float32 [k]; None becomes a null row."""
    present = [vector for vector in vectors if vector is not None]
    indices = np.concatenate([np.zeros(0, np.uint32), *(indices for indices, _ in present)])
    values = np.concatenate([np.zeros(0, np.float32), *(values for _, values in present)])
    entries = pa.StructArray.from_arrays([pa.array(indices), pa.array(values)], fields=list(_ENTRY))
    kind = pa.list_(pa.field("item", _ENTRY, nullable=False))
    firsts = [None if vector is None else vector[0] for vector in vectors]
    return Column(pa.field(name, kind, metadata=metadata), _lists(kind, entries, firsts))


def number_column(name: str, numbers: NDArray[np.float32], failed: Failed) -> Column:
    return Column(pa.field(name, pa.float32()), pa.array(numbers, mask=failed))


def error_column(count: int, errors: Mapping[int, TeimgrError]) -> Column:
    texts = [errors[row].message if row in errors else None for row in range(count)] if errors else None
    values = pa.nulls(count, pa.string()) if texts is None else pa.array(texts, pa.string())
    return Column(pa.field("error", pa.string()), values)


def _no_head(size: int) -> bytes:
    return b""


# Streams of at least this size are measured first, so that their buffer does not grow and is not copied behind a head.
_MEASURED_BYTES = 256 * 1024


def write_table(
    columns: Sequence[Column],
    rows: Sequence[int],
    keys: Keys | None = None,
    lz4: bool = False,
    head: Head = _no_head,
    metadata: Mapping[str, str] | None = None,
) -> memoryview:
    """Write `head` and the IPC stream of `keys` and `columns`, in batches of `rows` rows; `lz4` compresses bodies.

    `metadata` is the schema's.
    """
    fields, kept = keys or Keys([], [[]] * len(rows))
    schema = pa.schema([*fields, *(column.field for column in columns)], metadata=metadata or None)
    batches = []
    start = 0
    for repeated, count in zip(kept, rows, strict=True):
        results = [column.values.slice(start, count) for column in columns]
        batches.append(pa.record_batch([*repeated, *results], schema=schema))
        start += count
    if lz4 or sum(column.values.nbytes for column in columns) < _MEASURED_BYTES:
        sink = pa.BufferOutputStream()
        _write_stream(sink, schema, batches, lz4)
        return _behind(head, sink.getvalue())
    measured = pa.MockOutputStream()
    _write_stream(measured, schema, batches, lz4)
    begin = head(measured.size())
    # numpy requests huge pages from 4 MiB on; the kernel clears them four times as fast as small ones.
    buffer = np.empty(len(begin) + measured.size(), np.uint8)
    with pa.FixedSizeBufferWriter(pa.py_buffer(buffer)) as whole:
        whole.write(begin)
        _write_stream(whole, schema, batches, lz4)
    return buffer.data


def _behind(head: Head, ipc: pa.Buffer) -> memoryview:
    """Return the stream after its head; numpy copies without the GIL."""
    begin = head(ipc.size)
    whole = np.empty(len(begin) + ipc.size, np.uint8)
    whole[: len(begin)] = np.frombuffer(begin, np.uint8)
    whole[len(begin) :] = np.frombuffer(ipc, np.uint8)
    return whole.data


def _write_stream(sink: Any, schema: pa.Schema, batches: Sequence[pa.RecordBatch], lz4: bool) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4" if lz4 else None)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _vector_type(precision: Precision, elements: int) -> pa.DataType:
    return pa.list_(pa.field("item", pa.from_numpy_dtype(precision.dtype), nullable=False), elements)


def _lists(kind: pa.DataType, flat: pa.Array, rows: Sequence[Sequence[Any] | NDArray[Any] | None]) -> pa.Array:
    """Split `flat` into lists of the rows' lengths."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([0 if row is None else len(row) for row in rows], out=offsets[1:])
    failed = np.array([row is None for row in rows], np.bool_)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=_mask(failed))


def _mask(failed: Failed) -> pa.Array | None:
    return pa.array(failed) if failed is not None and failed.any() else None


def write_vectors(
    vectors: NDArray[np.float32],
    errors: Mapping[int, TeimgrError],
    rows: Sequence[int],
    precision: Precision = Precision.FLOAT32,
    *,
    lz4: bool = False,
    head: Head = _no_head,
    metadata: Mapping[str, str] | None = None,
) -> memoryview:
    """Write the IPC stream of `vectors` (float32 [n, dim], C-contiguous), in batches of `rows` rows; `head` as in
    `write_table`.

    `lz4` compresses bodies, which gains nothing on vectors; it exists because the contract has it.
    """
    failed = failed_rows(len(vectors), errors)
    columns = [vector_column("embeddings", vectors, failed, precision), error_column(len(vectors), errors)]
    return write_table(columns, rows, lz4=lz4, head=head, metadata=metadata)


def write_sparse(
    vectors: Sequence[tuple[NDArray[np.uint32], NDArray[np.float32]] | None],
    errors: Mapping[int, TeimgrError],
    rows: Sequence[int],
    *,
    lz4: bool = False,
    head: Head = _no_head,
    metadata: Mapping[str, str] | None = None,
) -> memoryview:
    """Write the IPC stream of sparse `vectors` (ascending indices, values; None if the row failed); `head` as above."""
    columns = [sparse_column("sparse_embeddings", vectors), error_column(len(vectors), errors)]
    return write_table(columns, rows, lz4=lz4, head=head, metadata=metadata)


ImageRow = bytes | str | tuple[bytes, str] | None


def is_images(kind: pa.DataType) -> bool:
    """True if a column of this type holds files: binary, or a struct with binary `bytes`."""
    if pa.types.is_struct(kind):
        position = kind.get_field_index("bytes")
        return bool(position >= 0 and _is_binary(kind.field(position).type))
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def images_of(
    columns: Sequence[pa.Array], texts: Sequence[str | None] | None
) -> tuple[list[ImageRow], dict[int, InvalidInput]]:
    """Return the rows of columns of images, with the text of a row without an image, or both; and why rows are refused.

    `texts` has a text or None for each row. A path is never opened.
    """
    rows: list[ImageRow] = []
    refused: dict[int, InvalidInput] = {}
    others = iter(texts) if texts is not None else repeat(None)
    for column in columns:
        is_struct = pa.types.is_struct(column.type)
        files = column.field("bytes") if is_struct else column
        for at in range(len(column)):
            file = files[at].as_py() if column[at].is_valid else None
            text = next(others)
            if file is None and is_struct and text is None and column[at].is_valid:
                refused[len(rows)] = InvalidInput(
                    "Input validation error: the row of `image` has no `bytes`: a `path` is not opened, send the file"
                )
            rows.append(text if file is None else file if text is None else (file, text))
    return rows, refused
