"""Reading inputs from Arrow IPC streams: texts, pairs or token ids by column name, and key columns to repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TooLarge
from teimgr.wire.arrow_limits import decoded_bytes
from teimgr.wire.arrow_tables import Keys
from teimgr.wire.text_column import TextColumn


def checked_size(ipc: bytes | memoryview, limit_bytes: int) -> int:
    """Bytes of a stream's buffers once decompressed.

    Raises:
        InvalidInput: not an IPC stream.
        TooLarge: more than `limit_bytes`.
    """
    try:
        needed = decoded_bytes(ipc)
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if needed > limit_bytes:
        raise TooLarge(f"Arrow batch decodes to {needed} bytes, the limit is {limit_bytes} bytes")
    return needed


@contextmanager
def opened(ipc: bytes | memoryview, limit_bytes: int) -> Iterator[pa.RecordBatchStreamReader]:
    """A reader of the stream. Arrow's errors, in the block too, become `InvalidInput`.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8.
        TooLarge: its buffers need more than `limit_bytes` once decompressed.
    """
    checked_size(ipc, limit_bytes)
    try:
        with pa.ipc.open_stream(pa.py_buffer(ipc)) as reader:
            yield reader
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error


def batches_of(reader: pa.RecordBatchStreamReader) -> list[pa.RecordBatch]:
    """All batches, with offsets and UTF-8 validated, which reading IPC alone does not do.

    Raises:
        InvalidInput: there is none.
    """
    batches = []
    for batch in reader:
        batch.validate(full=True)
        batches.append(batch)
    if not batches:
        raise InvalidInput("No RecordBatch in stream")
    return batches


def is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts, itself or as values of a dictionary."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts_of(columns: list[pa.Array], limit_bytes: int) -> TextColumn:
    """The rows of string columns, at least one, in one column; a column of plain strings is not copied.

    Raises:
        TooLarge: they take more than `limit_bytes` as separate strings.
    """
    total = sum(map(_text_bytes, columns))
    if total > limit_bytes:
        raise TooLarge(f"Arrow batch has {total} bytes of text, the limit is {limit_bytes} bytes")
    return TextColumn.joined([_text_column_of(column) for column in columns])


def _text_column_of(column: pa.Array) -> TextColumn:
    """The rows of a validated string column."""
    width = {pa.string(): np.int32, pa.large_string(): np.int64}.get(column.type)
    if width is None or not len(column):
        return TextColumn.of(column.to_pylist())
    _, bounds, data = column.buffers()
    offsets = np.frombuffer(bounds, width)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    nulls = _is_null(column) if column.null_count else None
    if nulls is not None and np.diff(offsets)[nulls].any():  # bytes that belong to no text
        return TextColumn.of(column.to_pylist())
    return TextColumn(np.frombuffer(data or b"", np.uint8), offsets, nulls)


def _text_bytes(column: pa.Array) -> int:
    """UTF-8 bytes of all rows as separate strings; rows of a dictionary or of views may share them in Arrow."""
    if pa.types.is_dictionary(column.type):
        lengths = _lengths(column.dictionary).take(column.indices)
    else:
        lengths = _lengths(column)
    return int(pc.sum(lengths).as_py() or 0)


def _lengths(column: pa.Array) -> pa.Array:
    """UTF-8 bytes of each row, null for a null row."""
    if not pa.types.is_string_view(column.type):
        return pc.binary_length(column)
    # Arrow computes no lengths of views; each view is 16 bytes that start with its length as an int32.
    views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
    lengths = views[column.offset : column.offset + len(column), 0]
    return pa.array(lengths, pa.int64(), mask=~column.is_valid().to_numpy(zero_copy_only=False))


_ID_TYPES = (pa.uint32(), pa.int32(), pa.int64())
_MAX_ID = np.iinfo(np.int32).max

# A text, two texts, int32 [tokens], or a row that is null.
RowInput = str | tuple[str, str] | NDArray[np.int32] | None


class InputKind(Enum):
    """The kind of a table's inputs."""

    TEXT = "text"
    PAIR = "pair"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class InputBatches:
    """The inputs of all batches in one sequence, texts as a column, and the number of rows of each batch.

    `refused` has the error of each invalid input, by row; `inputs` has None there.
    """

    inputs: Sequence[RowInput]
    rows: list[int]
    keys: Keys
    refused: dict[int, InvalidInput]


def read_inputs(
    ipc: bytes | memoryview,
    limit_bytes: int,
    check_rows: Callable[[int], None] = lambda rows: None,
    kind: InputKind | None = None,
    key_columns: Sequence[str] = (),
) -> InputBatches:
    """Decode and fully validate a stream of inputs; without a `kind`, the column names determine it.

    `check_rows` is called with their number before they become Python objects, and may raise.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8, no batch, or a column that is missing, there
            twice or of another type.
        TooLarge: its buffers once decompressed, or its texts as separate strings, need more than `limit_bytes`.
    """
    with opened(ipc, limit_bytes) as reader:
        schema = reader.schema
        keys = [_position(schema, name) for name in key_columns]
        kind = kind or _kind_by_names(schema.names)
        sources = [_source(schema, name) for name in _names(schema.names, kind)]
        batches = batches_of(reader)
    rows = [batch.num_rows for batch in batches]
    check_rows(sum(rows))
    columns = [[batch.column(position) for batch in batches] for position in sources]
    inputs, refused = _inputs(kind, columns, limit_bytes)
    kept = Keys([schema.field(at) for at in keys], [[batch.column(at) for at in keys] for batch in batches])
    return InputBatches(inputs, rows, kept, refused)


def _kind_by_names(names: list[str]) -> InputKind:
    if "input_ids" in names:
        return InputKind.IDS
    return InputKind.PAIR if "query" in names or "text_pair" in names else InputKind.TEXT


def _names(names: list[str], kind: InputKind) -> tuple[str, ...]:
    if kind is InputKind.IDS:
        return ("input_ids",)
    if kind is InputKind.TEXT:
        return ("text",)
    if "query" in names and "text_pair" in names:
        raise InvalidInput("Pairs are `text` with `text_pair` or `query` with `text`: the batch has all three columns")
    return ("query", "text") if "query" in names else ("text", "text_pair")


def _position(schema: pa.Schema, name: str) -> int:
    positions: list[int] = schema.get_all_field_indices(name)
    if len(positions) != 1:
        raise InvalidInput(f"{'Several columns are' if positions else 'No column is'} named `{name}`: {schema.names}")
    return positions[0]


def _source(schema: pa.Schema, name: str) -> int:
    position = _position(schema, name)
    kind = schema.field(position).type
    if name == "input_ids" and not _is_ids(kind):
        raise InvalidInput(f"Column `{name}` must be a list of uint32, int32 or int64, not {kind}")
    if name != "input_ids" and not is_string(kind):
        raise InvalidInput(f"Column `{name}` must be of strings, not {kind}")
    return position


def _is_ids(kind: pa.DataType) -> bool:
    # Not views of lists: their rows may share items, and a few bytes would become gigabytes.
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and kind.value_type in _ID_TYPES)


def _inputs(
    kind: InputKind, columns: list[list[pa.Array]], limit_bytes: int
) -> tuple[Sequence[RowInput], dict[int, InvalidInput]]:
    if kind is InputKind.IDS:
        return _ids(columns[0])
    if kind is InputKind.TEXT:
        return texts_of(columns[0], limit_bytes), {}
    firsts, seconds = (texts_of(column, limit_bytes) for column in columns)
    pairs = [None if a is None or b is None else (a, b) for a, b in zip(firsts, seconds, strict=True)]
    return pairs, {}


def _ids(columns: list[pa.Array]) -> tuple[Sequence[RowInput], dict[int, InvalidInput]]:
    inputs: list[RowInput] = []
    refused: dict[int, InvalidInput] = {}
    for column in columns:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        flat = pc.list_flatten(column)
        wide = pc.fill_null(flat, 0).to_numpy(zero_copy_only=False)
        stops = np.cumsum(lengths)
        rows: list[RowInput] = list(np.split(wide.astype(np.int32), stops[:-1])) if len(column) else []
        for row in np.flatnonzero(_is_null(column)):
            rows[row] = None
        wrong = np.flatnonzero((wide < 0) | (wide > _MAX_ID) | _is_null(flat))
        wrong_rows, first = np.unique(np.searchsorted(stops, wrong, side="right"), return_index=True)
        for row, at in zip(wrong_rows.tolist(), wrong[first].tolist(), strict=True):
            rows[row] = None
            refused[len(inputs) + row] = _bad_id(flat[at])
        inputs += rows
    return inputs, refused


def _is_null(column: pa.Array) -> NDArray[np.bool_]:
    nulls: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _bad_id(item: pa.Scalar) -> InvalidInput:
    value = item.as_py() if item.is_valid else "a null"
    return InvalidInput(f"Input validation error: `input_ids` has {value}, and token ids are 0 to {_MAX_ID}")


def read_texts(
    ipc: bytes | memoryview, limit_bytes: int, check_rows: Callable[[int], None] = lambda rows: None
) -> tuple[TextColumn, list[int]]:
    """Decode and fully validate a stream of texts: those of all batches, and the rows per batch.

    `check_rows` is called with their number before anything is made of them, and may raise: a row may be a single byte
    here, and a whole vector later.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8, no batch, or no string column.
        TooLarge: its buffers once decompressed, or its texts as separate strings, need more than `limit_bytes`.
    """
    with opened(ipc, limit_bytes) as reader:
        position = _text_column(reader.schema)
        columns = [batch.column(position) for batch in batches_of(reader)]
    check_rows(sum(map(len, columns)))
    return texts_of(columns, limit_bytes), [len(column) for column in columns]


def _text_column(schema: pa.Schema) -> int:
    candidates = [position for position, field in enumerate(schema) if is_string(field.type)]
    if not candidates:
        raise InvalidInput(f"No string column: expected `text`, got {schema.names} (a StringArray is needed)")
    named = [position for position in candidates if schema.names[position] == "text"]
    return named[0] if named else candidates[0]
