"""Reading inputs from Arrow IPC streams: texts, pairs or token ids by column name, and key columns to repeat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TooLarge
from teimgr.spec import MAX_TEXT_BYTES
from teimgr.wire.arrow_limits import StreamSize, stream_size
from teimgr.wire.arrow_tables import Keys, images_of, is_images
from teimgr.wire.text_column import SharedTexts, TextColumn

GoOn = Callable[[], None]
"""Called between steps of a few milliseconds; raises if the call has ended."""


# A reader reads dictionaries again for every batch. Limit of all that is read, as a multiple of the decoded limit.
_MAX_REREAD = 8
_SHOWN_NAMES, _SHOWN_CHARS = 20, 64


def checked_size(
    ipc: bytes | memoryview, limit_bytes: int, check_rows: Callable[[int], None] = lambda rows: None
) -> StreamSize:
    """Return the size of a stream once decompressed, by its headers; `check_rows` gets the number of its rows and may
    raise.

    Raises:
        InvalidInput: not an IPC stream.
        TooLarge: more than `limit_bytes`, or than the bounds of `wire/arrow_limits.py`.
    """
    try:
        found = stream_size(ipc)
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if found.decoded_bytes > limit_bytes:
        raise TooLarge(f"Arrow batch decodes to {found.decoded_bytes} bytes, the limit is {limit_bytes} bytes")
    if found.read_bytes > limit_bytes * _MAX_REREAD:
        raise TooLarge(f"The dictionaries of the Arrow stream are too large for its {found.batches} batches")
    check_rows(found.rows)
    return found


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn Arrow's errors in the block, and names that are not UTF-8, into `InvalidInput`."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Invalid Arrow IPC: {_shown(str(error))}") from error


def _opened(ipc: bytes | memoryview) -> pa.RecordBatchStreamReader:
    return pa.ipc.open_stream(pa.py_buffer(ipc))


def _columns(
    ipc: bytes | memoryview, whole: pa.RecordBatchStreamReader, positions: Iterable[int], go_on: GoOn
) -> list[dict[int, pa.Array]]:
    """Return the columns at `positions` of all batches. Offsets and UTF-8 are validated, which reading IPC does not do.

    `whole` is a reader of `ipc` that has read only the schema. Other columns are not decoded. `go_on` is called before
    each batch and may raise.

    Raises:
        InvalidInput: the stream has no batch.
    """
    wanted = sorted(set(positions))
    batches = []
    with _refusing(), ExitStack() as readers:
        reader = readers.enter_context(whole)
        if len(wanted) < len(reader.schema):
            options = pa.ipc.IpcReadOptions(included_fields=wanted)
            reader = readers.enter_context(pa.ipc.open_stream(pa.py_buffer(ipc), options=options))
        go_on()
        for batch in reader:
            batch.validate(full=True)
            batches.append(dict(zip(wanted, batch.columns, strict=True)))
            go_on()
    if not batches:
        raise InvalidInput("No RecordBatch in stream")
    return batches


def _shown(text: str, limit: int = 500) -> str:
    """Shorten a client's text, or a text that contains parts of it, for an error."""
    return text if len(text) <= limit else text[:limit] + "…"


def _shown_names(names: list[str]) -> str:
    shown = str([_shown(name, _SHOWN_CHARS) for name in names[:_SHOWN_NAMES]])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown[:-1]}, … ({len(names)} columns)]"


def is_string(kind: pa.DataType) -> bool:
    """True if a column of this type holds texts, itself or as values of a dictionary."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts_of(columns: list[pa.Array], limit_bytes: int) -> TextColumn | SharedTexts:
    """Join the rows of validated string columns, at least one. Bytes that rows share, such as those of a dictionary's
    value, are not copied, nor is a single column of plain strings.

    Raises:
        InvalidInput: a text has more than `MAX_TEXT_BYTES`, which one call decodes with the GIL.
        TooLarge: they take more than `limit_bytes` as separate strings.
    """
    located = _Locator()
    parts = [located.column(column) for column in columns]
    lengths = np.concatenate([part.ends - part.begins for part in parts])
    if lengths.max(initial=0) > MAX_TEXT_BYTES:
        row = int(lengths.argmax())
        raise InvalidInput(f"Row {row} has a text of {lengths[row]} bytes, the limit is {MAX_TEXT_BYTES} bytes")
    total = int(lengths.sum())
    if total > limit_bytes:
        raise TooLarge(f"Arrow batch has {total} bytes of text, the limit is {limit_bytes} bytes")
    plain = [part.plain for part in parts if part.plain is not None]
    return TextColumn.joined(plain) if len(plain) == len(parts) else _shared(parts)


class _Located(NamedTuple):
    """Where the texts of a column are in its `blocks` (uint8, as if concatenated); a null has no bytes.

    `plain` is the column itself if its texts follow each other.
    """

    blocks: Sequence[NDArray[np.uint8]]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    nulls: NDArray[np.bool_]
    plain: TextColumn | None = None


class _Locator:
    """Finds the texts of columns. A dictionary is examined once for all batches that share it."""

    def __init__(self) -> None:
        self._dictionaries: dict[tuple[int, ...], tuple[pa.Array, _Located]] = {}

    def column(self, column: pa.Array) -> _Located:
        if pa.types.is_dictionary(column.type):
            return self._of_dictionary(column)
        found = _of_views(column) if pa.types.is_string_view(column.type) else _of_strings(column)
        if found.plain is not None:
            return found
        begins, ends = (np.where(found.nulls, 0, places) for places in (found.begins, found.ends))
        return found._replace(begins=begins, ends=ends)

    def _of_dictionary(self, column: pa.Array) -> _Located:
        dictionary = column.dictionary
        key = (len(dictionary), dictionary.offset, *(0 if one is None else one.address for one in dictionary.buffers()))
        if key not in self._dictionaries:
            self._dictionaries[key] = dictionary, self.column(dictionary)  # kept alive: the key has its addresses
        values = self._dictionaries[key][1]
        nulls = _is_null(column)
        if not len(dictionary):
            nothing = np.zeros(len(column), np.int64)
            return _Located(values.blocks, nothing, nothing, nulls)
        rows = pc.fill_null(column.indices, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        nulls = nulls | values.nulls[rows]
        begins, ends = (np.where(nulls, 0, places[rows]) for places in (values.begins, values.ends))
        return _Located(values.blocks, begins, ends, nulls)


def _of_strings(column: pa.Array) -> _Located:
    nulls = _is_null(column)
    if not len(column):
        nothing = np.zeros(0, np.int64)
        return _Located([], nothing, nothing, nulls, TextColumn(np.zeros(0, np.uint8), np.zeros(1, np.int64)))
    _, bounds, data = column.buffers()
    width = np.int32 if pa.types.is_string(column.type) else np.int64
    offsets = np.frombuffer(bounds, width)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    block = np.frombuffer(data or b"", np.uint8)
    has_nulls = bool(column.null_count)
    is_plain = not (has_nulls and np.diff(offsets)[nulls].any())  # no null row has bytes
    plain = TextColumn(block, offsets, nulls if has_nulls else None) if is_plain else None
    return _Located([block], offsets[:-1], offsets[1:], nulls, plain)


def _of_views(column: pa.Array) -> _Located:
    """A view is 16 bytes: the length as an int32, then up to 12 bytes of text, or 4 of its first, block and offset."""
    nulls = _is_null(column)
    if not len(column):
        nothing = np.zeros(0, np.int64)
        return _Located([], nothing, nothing, nulls)
    _, views, *buffers = column.buffers()
    blocks = [np.frombuffer(one or b"", np.uint8) for one in (views, *buffers)]
    starts = np.cumsum([0, *map(len, blocks)])
    rows = np.arange(column.offset, column.offset + len(column), dtype=np.int64)
    fields = np.frombuffer(views, np.int32).reshape(-1, 4)[rows].astype(np.int64)
    lengths = np.where(nulls, 0, fields[:, 0])
    is_inline = nulls | (lengths <= _INLINE_BYTES)
    of_block = starts[np.where(is_inline, 0, fields[:, 2] + 1)]
    begins = np.where(is_inline, 16 * rows + 4, of_block + fields[:, 3])
    return _Located(blocks, begins, begins + lengths, nulls)


def _shared(parts: Sequence[_Located]) -> SharedTexts:
    starts: dict[int, int] = {}  # position of each list of blocks, by identity: batches share those of a dictionary
    blocks: list[NDArray[np.uint8]] = []
    size = 0
    for part in parts:
        if id(part.blocks) not in starts:
            starts[id(part.blocks)] = size
            blocks += part.blocks
            size += sum(map(len, part.blocks))
    joined = blocks[0] if len(blocks) == 1 else np.concatenate([np.zeros(0, np.uint8), *blocks])
    begins = np.concatenate([part.begins + starts[id(part.blocks)] for part in parts])
    ends = np.concatenate([part.ends + starts[id(part.blocks)] for part in parts])
    return SharedTexts(joined, begins, ends, np.concatenate([part.nulls for part in parts]))


_INLINE_BYTES = 12
_ID_TYPES = (pa.uint32(), pa.int32(), pa.int64())
_MAX_ID = np.iinfo(np.int32).max

# A text, a pair of texts, token ids (int32), a file, a file with a text, or a null row.
RowInput = str | tuple[str, str] | NDArray[np.int32] | bytes | tuple[bytes, str] | None


class InputKind(Enum):
    """The kind of a table's inputs."""

    TEXT = "text"
    PAIR = "pair"
    IDS = "ids"
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class InputBatches:
    """The inputs of all batches in one sequence, texts as a column, and the number of rows of each batch.

    `refused` has the error of each invalid input, by row; `inputs` has None at those rows.
    """

    kind: InputKind
    inputs: Sequence[RowInput]
    rows: list[int]
    keys: Keys
    refused: dict[int, InvalidInput]


FILES = (InputKind.IMAGE, InputKind.AUDIO)
"""Kinds whose column has the name of the kind. Rows without a file may have a text in `text`."""


def read_inputs(
    ipc: bytes | memoryview,
    limit_bytes: int,
    check_rows: Callable[[int], None] = lambda rows: None,
    kind: InputKind | None = None,
    key_columns: Sequence[str] = (),
    go_on: GoOn = lambda: None,
    files: Collection[InputKind] = FILES,
) -> InputBatches:
    """Decode and fully validate the columns of inputs and keys. Without a `kind`, the columns determine it; a column of
    files counts if its kind is among `files`, the kinds that the model reads.

    `check_rows` is called with their number before anything is decoded, `go_on` repeatedly; both may raise.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8, no batch, or a column that is missing, repeated or
            of another type.
        TooLarge: its buffers once decompressed, or its texts as separate strings, need more than `limit_bytes`, or
            the bounds of `wire/arrow_limits.py`.
    """
    checked_size(ipc, limit_bytes, check_rows)
    with _refusing():
        reader = _opened(ipc)
        schema = reader.schema
        names = schema.names
        keys = [_position(names, name) for name in key_columns]
        kind = kind or _kind_of(schema, files)
        sources = [_source(schema, names, name) for name in _names(names, kind)]
    batches = _columns(ipc, reader, [*keys, *sources], go_on)
    columns = [[batch[position] for batch in batches] for position in sources]
    inputs, refused = _inputs(kind, columns, limit_bytes)
    go_on()
    kept = Keys([schema.field(at) for at in keys], [[batch[at] for at in keys] for batch in batches])
    return InputBatches(kind, inputs, [len(column) for column in columns[0]], kept, refused)


def has_files(ipc: bytes | memoryview, column: str) -> bool:
    """True if a stream has files in a column of this name; raises InvalidInput if it is not an IPC stream."""
    with _refusing():
        return _holds_files(_opened(ipc).schema, column)


def _holds_files(schema: pa.Schema, column: str) -> bool:
    return any(name == column and is_images(schema.field(at).type) for at, name in enumerate(schema.names))


def _kind_of(schema: pa.Schema, files: Collection[InputKind]) -> InputKind:
    names = schema.names
    if "input_ids" in names:
        return InputKind.IDS
    has_texts = "text" in names
    named = [kind for kind in FILES if kind.value in names]
    for kind in named:
        if kind in files and (not has_texts or _holds_files(schema, kind.value)):
            return kind
    if "query" in names or "text_pair" in names:
        return InputKind.PAIR
    if named and not has_texts:
        raise InvalidInput(f"The model reads no {named[0].value} files, and no column is named `text`")
    return InputKind.TEXT


def _names(names: list[str], kind: InputKind) -> tuple[str, ...]:
    if kind is InputKind.IDS:
        return ("input_ids",)
    if kind is InputKind.TEXT:
        return ("text",)
    if kind in FILES:
        return (kind.value, "text") if "text" in names else (kind.value,)
    if "query" in names and "text_pair" in names:
        raise InvalidInput("Pairs are `text` with `text_pair` or `query` with `text`: the batch has all three columns")
    return ("query", "text") if "query" in names else ("text", "text_pair")


def _position(names: list[str], name: str) -> int:
    positions = [at for at, one in enumerate(names) if one == name]
    if len(positions) != 1:
        how = "Several columns are" if positions else "No column is"
        raise InvalidInput(f"{how} named `{_shown(name)}`: {_shown_names(names)}")
    return positions[0]


def _source(schema: pa.Schema, names: list[str], name: str) -> int:
    position = _position(names, name)
    kind = schema.field(position).type
    if name == "input_ids" and not _is_ids(kind):
        raise InvalidInput(f"Column `{name}` must be a list of uint32, int32 or int64, not {_shown(str(kind))}")
    if name in ("image", "audio") and not is_images(kind):
        raise InvalidInput(f"Column `{name}` must be of {name} files, binary, not {_shown(str(kind))}")
    if name not in ("input_ids", "image", "audio") and not is_string(kind):
        raise InvalidInput(f"Column `{name}` must be of strings, not {_shown(str(kind))}")
    return position


def _is_ids(kind: pa.DataType) -> bool:
    # List views are refused: their rows may share items, so a few bytes could decode to gigabytes.
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and kind.value_type in _ID_TYPES)


def _inputs(
    kind: InputKind, columns: list[list[pa.Array]], limit_bytes: int
) -> tuple[Sequence[RowInput], dict[int, InvalidInput]]:
    if kind is InputKind.IDS:
        return _ids(columns[0])
    if kind is InputKind.TEXT:
        return texts_of(columns[0], limit_bytes), {}
    if kind in FILES:
        texts = _strings(texts_of(columns[1], limit_bytes), limit_bytes) if len(columns) > 1 else None
        return images_of(columns[0], texts)
    firsts, seconds = (_strings(texts_of(column, limit_bytes), limit_bytes) for column in columns)
    pairs = [None if a is None or b is None else (a, b) for a, b in zip(firsts, seconds, strict=True)]
    return pairs, {}


def _strings(texts: TextColumn | SharedTexts, limit_bytes: int) -> Sequence[str | None]:
    """Return the texts as strings; equal ones of a dictionary are made once.

    Raises:
        TooLarge: they may take more than `limit_bytes`, at four bytes a character.
    """
    if isinstance(texts, SharedTexts):
        begins, ends = np.unique(np.stack([texts.begins, texts.ends]), axis=1)
        distinct = SharedTexts(texts.data, begins, ends, np.zeros(len(begins), np.bool_))
    needed = 4 * (distinct if isinstance(texts, SharedTexts) else texts).characters
    if needed > limit_bytes:
        raise TooLarge(f"The texts of the pairs may take {needed} bytes, the limit is {limit_bytes} bytes")
    return texts[:] if isinstance(texts, SharedTexts) else texts


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
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    nulls: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _bad_id(item: pa.Scalar) -> InvalidInput:
    value = item.as_py() if item.is_valid else "a null"
    return InvalidInput(f"Input validation error: `input_ids` has {value}, and token ids are 0 to {_MAX_ID}")


def read_texts(
    ipc: bytes | memoryview,
    limit_bytes: int,
    check_rows: Callable[[int], None] = lambda rows: None,
    go_on: GoOn = lambda: None,
) -> tuple[TextColumn | SharedTexts, list[int]]:
    """Decode and fully validate a stream of texts: return the texts of all batches, and the rows per batch.

    `check_rows` is called with their number before anything is decoded: a row may be a single byte here, and a whole
    vector later. `go_on` is called repeatedly. Both may raise.

    Raises:
        InvalidInput: not an IPC stream, broken buffers, bad UTF-8, no batch, or no string column.
        TooLarge: its buffers once decompressed, or its texts as separate strings, need more than `limit_bytes`, or
            the bounds of `wire/arrow_limits.py`.
    """
    checked_size(ipc, limit_bytes, check_rows)
    with _refusing():
        reader = _opened(ipc)
        position = _text_column(reader.schema)
    columns = [batch[position] for batch in _columns(ipc, reader, [position], go_on)]
    texts = texts_of(columns, limit_bytes)
    go_on()
    return texts, [len(column) for column in columns]


def _text_column(schema: pa.Schema) -> int:
    names = schema.names
    candidates = [position for position, field in enumerate(schema) if is_string(field.type)]
    if "text" in names and all(names[position] != "text" for position in candidates):
        return _source(schema, names, "text")  # raises: embedding another column instead would be silently wrong
    if not candidates:
        if any(is_images(field.type) for field in schema):
            raise InvalidInput(
                "No string column: only text is supported by this model, and the table has files of images"
            )
        raise InvalidInput(f"No string column: expected `text`, got {_shown_names(names)} (a StringArray is needed)")
    return next((position for position in candidates if names[position] == "text"), candidates[0])
