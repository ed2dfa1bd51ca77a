"""What `EmbedArrow` and `EmbedSparseArrow` carry: a stream of texts in, of vectors out.

In: a stream (never the file format) whose batches have a string column, `text` by name or else the first one; any
string type, dictionary-encoded too; bodies plain, LZ4 or ZSTD.
Out: the same batches with two columns, `embeddings` (fixed-size list) or `sparse_embeddings` (list of index and value),
null where the row failed, and `error` (string), null where it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TeimgrError
from teimgr.wire.arrow_columns import error_column, failed_rows, sparse_column, vector_column, write_table
from teimgr.wire.arrow_reading import batches_of, is_string, opened, texts_of
from teimgr.wire.precision import Precision


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
    with opened(ipc, limit_bytes) as reader:
        position = _text_column(reader.schema)
        columns = [batch.column(position) for batch in batches_of(reader)]
    check_rows(sum(map(len, columns)))
    return TextBatches(texts_of(columns, limit_bytes), [len(column) for column in columns])


def write_vectors(
    vectors: NDArray[np.float32],
    errors: Mapping[int, TeimgrError],
    rows: Sequence[int],
    *,
    precision: Precision = Precision.FLOAT32,
    lz4: bool = False,
) -> memoryview:
    """The reply stream for `vectors` (`[n, dim]`, C-contiguous), cut into batches of `rows` rows.

    `lz4` compresses bodies (which gains nothing on vectors and is there for clients that ask).
    """
    failed = failed_rows(len(vectors), errors)
    columns = [vector_column("embeddings", vectors, failed, precision), error_column(len(vectors), errors)]
    return write_table(columns, rows, lz4=lz4)


def write_sparse(
    vectors: Sequence[tuple[NDArray[np.uint32], NDArray[np.float32]] | None],
    errors: Mapping[int, TeimgrError],
    rows: Sequence[int],
    *,
    lz4: bool = False,
) -> memoryview:
    """The reply stream for `vectors` (indices ascending and values; None where the row failed)."""
    columns = [sparse_column("sparse_embeddings", vectors), error_column(len(vectors), errors)]
    return write_table(columns, rows, lz4=lz4)


def _text_column(schema: pa.Schema) -> int:
    candidates = [position for position, field in enumerate(schema) if is_string(field.type)]
    if not candidates:
        raise InvalidInput(f"No string column: expected `text`, got {schema.names} (a StringArray is needed)")
    named = [position for position in candidates if schema.names[position] == "text"]
    return named[0] if named else candidates[0]
