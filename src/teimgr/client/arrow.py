"""Texts to Arrow IPC and Arrow IPC to vectors: what `EmbedArrow` carries, seen from the client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from teimgr.client.checks import check_limit, check_sequence, check_source, check_text
from teimgr.client.values import Embedded, Vectors
from teimgr.config.schema import said
from teimgr.errors import Internal, ValidationError

Texts: TypeAlias = Sequence[str | None] | pa.Array | pa.ChunkedArray
Compression = Literal["lz4", "zstd"]

_COMPRESSIONS = (None, "lz4", "zstd")
_NULLABLE = pa.schema([pa.field("text", pa.utf8())])
_NOT_NULL = pa.schema([pa.field("text", pa.utf8(), nullable=False)])
_STRINGS = (pa.utf8(), pa.large_utf8(), pa.string_view())


def slices(texts: Texts, batch_rows: int) -> Iterator[Texts]:
    """`texts` in pieces of `batch_rows`, the last one shorter; nothing at all gives one empty piece.

    Raises:
        ValidationError: `texts` is no sequence, or `batch_rows` is below 1.
    """
    check_limit("batch_rows", batch_rows)
    check_sequence("texts", texts)
    for start in range(0, max(len(texts), 1), batch_rows):
        yield texts[start : start + batch_rows]


def pack_texts(
    texts: Texts, compression: Compression | None = None, *, name: str = "texts", first_row: int = 0
) -> bytes:
    """An IPC stream of one batch with the column `text`; the field is nullable only where a text is null.

    Raises:
        ValidationError: something in `texts` is no string; its position counts from `first_row` and is one in `name`.
    """
    check_compression(compression)
    column = _column(texts, name, first_row)
    schema = _NULLABLE if column.null_count else _NOT_NULL
    if column.type != pa.utf8():
        schema = pa.schema([pa.field("text", column.type, nullable=bool(column.null_count))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    return bytes(sink.getvalue())


def check_compression(compression: object) -> None:
    """Refuse what is no codec of Arrow's."""
    if compression not in _COMPRESSIONS:
        raise ValidationError(f"compression must be 'lz4', 'zstd' or None, not {said(compression)}")


def unpack_vectors(ipc: bytes) -> Embedded:
    """The rows of a reply, every batch of it; float16 becomes float32. Without nulls nothing is copied.

    The vectors are the column `embeddings`, else the first; the column `error` may be missing.

    Raises:
        Internal: the bytes are no such reply.
    """
    try:
        table = pa.ipc.open_stream(ipc).read_all()
        column = table.column("embeddings" if "embeddings" in table.column_names else 0)
        vectors = _stack([_matrix(chunk) for chunk in column.chunks], column.type.list_size)
        return Embedded(vectors, _failures(column, table))
    except (pa.ArrowException, AttributeError, IndexError, ValueError) as error:
        raise Internal(f"the reply is no Arrow stream of vectors: {error}") from error


def joined(parts: Sequence[Embedded]) -> Embedded:
    """Consecutive answers as one; there must be at least one."""
    if len(parts) == 1:
        return parts[0]
    errors: dict[int, str] = {}
    offset = 0
    for part in parts:
        errors.update({offset + row: reason for row, reason in part.errors.items()})
        offset += len(part.vectors)
    return Embedded(np.concatenate([part.vectors for part in parts]), errors)


def _column(texts: Texts, name: str, first_row: int) -> Any:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    if isinstance(texts, pa.Array):
        if texts.type in _STRINGS or pa.types.is_dictionary(texts.type):
            return texts
        raise ValidationError(f"{name} must be an array of strings, not of {texts.type}")
    check_source(name, texts)
    try:
        return pa.array(texts, pa.utf8())
    except (pa.ArrowException, TypeError, UnicodeEncodeError) as error:
        for row, text in enumerate(texts, first_row):
            if text is not None:
                check_text(f"{name}[{row}]", text)
        raise ValidationError(f"{name}: {error}") from error


def _matrix(column: Any) -> Vectors:
    """One FixedSizeList array as float32 [n, dim]; null rows are NaN."""
    dim = column.type.list_size
    # `values` disregards the array's own offset, `flatten` would drop the null rows.
    values = column.values.slice(column.offset * dim, len(column) * dim).to_numpy(zero_copy_only=False)
    rows: Vectors = values.reshape(len(column), dim).astype(np.float32, copy=False)
    if not column.null_count:
        return rows
    rows = rows.copy()
    rows[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return rows


def _stack(matrices: list[Vectors], dim: int) -> Vectors:
    if len(matrices) == 1:
        return matrices[0]
    return np.concatenate(matrices) if matrices else np.empty((0, dim), np.float32)


def _failures(column: Any, table: Any) -> dict[int, str]:
    reasons = table.column("error").to_pylist() if "error" in table.column_names else [None] * table.num_rows
    if not column.null_count:
        return {row: reason for row, reason in enumerate(reasons) if reason is not None}
    missing = column.is_null().to_pylist()
    return {
        row: reason or "no vector"
        for row, (reason, absent) in enumerate(zip(reasons, missing, strict=True))
        if absent or reason is not None
    }
