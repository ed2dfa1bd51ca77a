"""Files of texts, read in batches in constant memory: Parquet, JSON lines, CSV, text, Arrow. Tables may have files."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from teimgr.errors import InvalidConfig
from teimgr.wire.arrow_tables import is_images

TEXT = "text"
FAULT = "fault"
"""Column with the reason why a row has no text; null if it has one."""

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".txt", ".arrow", ".feather")

MAX_FILE_BYTES = 16 << 20
"""Of a text, and of a file in a row; a longer one is a row that fails."""

FileKind = Literal["image", "audio"]
"""Of files in rows, by the name of their column in a request."""
_FILES: tuple[FileKind, ...] = get_args(FileKind)
_FILE_ROWS = 32  # of a table in memory: each may have megabytes
_STRINGS = (pa.utf8(), pa.large_utf8(), pa.string_view())
_READ_BYTES = 1 << 20
_TYPED_ROWS = 1000
# Above the 16 MiB of a text, so that a longer text only fails its row; it also bounds a quote that is never closed.
_CSV_FIELD_CHARS = 32 << 20


class TextSource(ABC):
    """A file of rows, each with a text. `batches` can begin at any row, and gives the same rows every time.

    Attributes:
        kept: Names and types of the columns that are copied to the output.
        rows: How many rows there are; None if only reading it all would show.
        has_files: The column `text` of its batches holds files.
        labels: The columns that a report of failed rows copies, to identify them; none if they hold files.
    """

    kept: pa.Schema
    rows: int | None = None
    has_files = False
    labels: tuple[str, ...] = (TEXT,)

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        self.path = path
        self.text_column = text_column
        self.keep = tuple(dict.fromkeys(keep))

    @abstractmethod
    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `size` rows from `first_row` on: columns `text`, `fault`, and those of `kept`.

        Raises:
            InvalidConfig: the file cannot be read; the message has the place.
        """

    def position(self) -> float | None:
        """Return the share of a CSV file that was read, from 0 to 1; None for other formats."""
        return None

    def identity(self) -> dict[str, Any]:
        """Return the facts that identify the file in a later run."""
        status = self.path.stat()
        return {"source": str(self.path.absolute()), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}

    def _chosen(self, schema: pa.Schema) -> pa.Schema:
        """Return the kept columns of a schema, after checking the text column.

        Raises:
            InvalidConfig: a column is missing or ambiguous, or the text column holds neither strings nor files.
        """
        for name in (self.text_column, *self.keep):
            if (times := schema.names.count(name)) != 1:
                found = f"{times} columns" if times else "no column"
                others = "".join(
                    f"; {one!r} holds {schema.field(one).type}, not the bytes of files, and no path or link is opened"
                    for one in _FILES
                    if name == TEXT and schema.names.count(one) == 1
                )
                raise InvalidConfig(f"{self.path}: {found} {name!r}; there are {', '.join(schema.names)}{others}")
        found = _value_type(schema.field(self.text_column).type)
        if is_images(found):
            self.has_files, self.labels = True, ()
        elif found not in _STRINGS:
            raise InvalidConfig(f"{self.path}: the column {self.text_column!r} holds {found}, not strings or files")
        return pa.schema([_without_dictionaries(schema.field(name)) for name in self.keep])

    def _batch(self, texts: Any, kept: Sequence[Any], faults: Any = None) -> pa.RecordBatch:
        if self.has_files:
            texts, faults = _files_of(texts.cast(_value_type(texts.type)))
        elif texts.type not in (pa.utf8(), pa.large_utf8()):
            texts = texts.cast(pa.large_utf8())
        faults = faults if faults is not None else pa.nulls(len(texts), pa.utf8())
        kept = [column.cast(field.type) for column, field in zip(kept, self.kept, strict=True)]
        schema = pa.schema([(TEXT, texts.type), (FAULT, pa.utf8()), *self.kept])
        return pa.RecordBatch.from_arrays([texts, faults, *kept], schema=schema)

    def _of_table(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self._batch(batch.column(self.text_column), [batch.column(name) for name in self.keep])


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _without_dictionaries(field: pa.Field) -> pa.Field:
    """Return the field with values in place of dictionaries, which may differ from batch to batch."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        return field.with_type(_value_type(kind))
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_without_dictionaries(each) for each in kind]))
    if pa.types.is_map(kind):
        key, item = (_without_dictionaries(each) for each in (kind.key_field, kind.item_field))
        return field.with_type(pa.map_(key, item, kind.keys_sorted))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return field.with_type(pa.list_(_without_dictionaries(kind.value_field), getattr(kind, "list_size", -1)))
    if pa.types.is_large_list(kind):
        return field.with_type(pa.large_list(_without_dictionaries(kind.value_field)))
    return field


def open_source(path: Path, text_column: str | None = None, keep: Sequence[str] | None = None) -> TextSource:
    """The source for a file by its suffix.

    `text_column` defaults to `text`, of a table without it to `image` or `audio` where that holds files; `keep` to the
    column `id` where there is one. A text file has lines, no columns.

    Raises:
        InvalidConfig: another suffix, a missing or unreadable file, a missing column, or strings where a column is
            named after files.
    """
    if not path.is_file():
        raise InvalidConfig(f"{path}: no such file or folder")
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InvalidConfig(f"{path}: the suffix is not one of {', '.join(SUFFIXES)}, nor that of an image or a sound")
    try:
        if keep is None:
            keep = [name for name in kind.columns(path) if name == "id" and name != text_column]
        source: TextSource = kind(path, text_column or _default_column(kind, path), keep)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {error}") from error
    if source.text_column in _FILES and not source.has_files:  # paths would be embedded as texts
        raise InvalidConfig(
            f"{path}: the column {source.text_column!r} holds strings, and needs the bytes of files: no path or link "
            "is opened; embed the folder, or give a column of texts another name"
        )
    return source


def _default_column(kind: Any, path: Path) -> str:
    if kind in (ParquetSource, ArrowSource):
        schema = kind.schema(path)
        if TEXT not in schema.names:
            held = [name for name in _FILES if name in schema.names and is_images(_value_type(schema.field(name).type))]
            return held[0] if held else TEXT
    return TEXT


def _files_of(column: Any) -> tuple[Any, Any]:
    """Return the bytes of a column of files, and why rows have none: a path in it is not opened."""
    if not pa.types.is_struct(column.type):
        return column, None
    files = pc.struct_field(column, "bytes")
    if column.type.get_field_index("path") < 0:
        return files, None
    named = pc.and_(pc.is_null(files), pc.is_valid(pc.struct_field(column, "path")))
    reason = pa.scalar("the row has no `bytes`: a `path` is not opened", pa.utf8())
    return files, pc.if_else(named, reason, pa.scalar(None, pa.utf8()))


class ParquetSource(TextSource):
    """Parquet; completed rows are skipped by row groups."""

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        super().__init__(path, text_column, keep)
        with pq.ParquetFile(path) as file:
            self.kept = self._chosen(file.schema_arrow)
            self.rows = file.metadata.num_rows

    @staticmethod
    def schema(path: Path) -> pa.Schema:
        return pq.read_schema(path)

    @classmethod
    def columns(cls, path: Path) -> list[str]:
        names: list[str] = cls.schema(path).names
        return names

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            groups: list[int] = []
            skip = first_row
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if not groups and skip >= rows:
                    skip -= rows
                else:
                    groups.append(group)
            columns = list(dict.fromkeys([self.text_column, *self.keep]))
            size = min(size, _FILE_ROWS) if self.has_files else size
            for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                yield self._of_table(batch.slice(skip))
                skip = 0


class ArrowSource(TextSource):
    """An Arrow IPC file (Feather), or an IPC stream."""

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        super().__init__(path, text_column, keep)
        with pa.memory_map(str(path)) as mapped:
            try:
                reader = pa.ipc.open_file(mapped)
                self.is_file = True
                self.rows = sum(reader.get_batch(at).num_rows for at in range(reader.num_record_batches))
            except pa.ArrowInvalid:
                mapped.seek(0)
                reader = pa.ipc.open_stream(mapped)
                self.is_file = False
            self.kept = self._chosen(reader.schema)

    @staticmethod
    def schema(path: Path) -> pa.Schema:
        with pa.memory_map(str(path)) as mapped:
            try:
                return pa.ipc.open_file(mapped).schema
            except pa.ArrowInvalid:
                mapped.seek(0)
                return pa.ipc.open_stream(mapped).schema

    @classmethod
    def columns(cls, path: Path) -> list[str]:
        names: list[str] = cls.schema(path).names
        return names

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as mapped:
            skip = first_row
            for batch in self._read(mapped):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                size = min(size, _FILE_ROWS) if self.has_files else size
                for start in range(skip, batch.num_rows, size):
                    yield self._of_table(batch.slice(start, size))
                skip = 0

    def _read(self, mapped: Any) -> Iterator[pa.RecordBatch]:
        if not self.is_file:
            yield from pa.ipc.open_stream(mapped)
            return
        reader = pa.ipc.open_file(mapped)
        for at in range(reader.num_record_batches):
            yield reader.get_batch(at)


class CsvSource(TextSource):
    """CSV with a line of headings; every kept column is text."""

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        super().__init__(path, text_column, keep)
        self.kept = self._chosen(pa.schema([(name, pa.utf8()) for name in self.columns(path)]))
        self._bytes = 0

    def identity(self) -> dict[str, Any]:
        """Add that blank lines are skipped: they counted as rows in runs of earlier versions."""
        return super().identity() | {"blank_lines": "skipped"}

    @staticmethod
    def columns(path: Path) -> list[str]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(_csv_rows(path, file), [])

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            reader = _csv_rows(self.path, file)
            names = next(reader, [])
            text_at, kept_at = names.index(self.text_column), [names.index(name) for name in self.keep]
            rows = islice(reader, first_row, None)
            while piece := list(islice(rows, size)):
                self._bytes = os.lseek(file.fileno(), 0, os.SEEK_CUR)
                faults = [None if len(row) == len(names) else _ragged(len(row), len(names)) for row in piece]
                texts = [row[text_at] if fault is None else None for row, fault in zip(piece, faults, strict=True)]
                kept = [[row[at] if at < len(row) else None for row in piece] for at in kept_at]
                yield self._batch(
                    pa.array(texts, pa.utf8()),
                    [pa.array(each, pa.utf8()) for each in kept],
                    pa.array(faults, pa.utf8()),
                )

    def position(self) -> float | None:
        return self._bytes / max(self.path.stat().st_size, 1)


def _csv_rows(path: Path, file: TextIO) -> Iterator[list[str]]:
    """Yield the rows of a CSV file.

    Raises:
        InvalidConfig: it cannot be parsed, or is not UTF-8; the message has the last line that was whole.
    """
    import csv

    csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD_CHARS))  # of the whole process, so never lowered
    # Otherwise an unclosed quote would join all following rows to one text.
    reader, line = csv.reader(file, strict=True), 0
    try:
        for row in reader:
            line = reader.line_num
            if row:  # not a blank line
                yield row
    except csv.Error as error:
        why = f"{error}; a quote in a row is closed, and a quote in a quoted text doubled"
        raise InvalidConfig(f"{path}: the row after line {line}: {why}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path}: after line {line}: {error}") from error


def _ragged(found: int, wanted: int) -> str:
    return f"{found} columns in a file of {wanted}"


class LineSource(TextSource):
    """A text file: every line is a text. A line of only white space is a row that fails."""

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        super().__init__(path, text_column, keep)
        if keep:
            raise InvalidConfig(f"{path}: a text file has no columns to keep")
        self.kept = pa.schema([])
        self.rows = _line_count(path)

    @staticmethod
    def columns(path: Path) -> list[str]:
        return []

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        for lines in _lines(self.path, first_row, size):
            texts = [_decoded(line) for line in lines]
            yield self._batch(
                pa.array([text for text, _ in texts], pa.utf8()), [], pa.array([fault for _, fault in texts], pa.utf8())
            )


class JsonLinesSource(TextSource):
    """JSON lines: objects with the text column; a kept column has the type of all its values, or is text."""

    def __init__(self, path: Path, text_column: str, keep: Sequence[str]) -> None:
        super().__init__(path, text_column, keep)
        self.rows = _line_count(path)
        names = self.columns(path)
        missing = [name for name in (text_column, *keep) if name not in names]
        if missing:
            raise InvalidConfig(f"{path}: no key {missing[0]!r} in its first lines; there are {', '.join(names)}")
        self.kept = pa.schema([])
        for lines in _lines(path, 0, _TYPED_ROWS) if keep else ():
            rows = [row for row, _ in map(_json_object, lines) if row is not None]
            found = pa.schema([(name, _type_of([row.get(name) for row in rows])) for name in self.keep])
            self.kept = found if not self.kept else _united(self.kept, found)
        self.kept = pa.schema(
            [(each.name, pa.utf8() if pa.types.is_null(each.type) else each.type) for each in self.kept]
        )

    @staticmethod
    def columns(path: Path) -> list[str]:
        return list(dict.fromkeys(key for row, _ in map(_json_object, _head(path)) for key in row or ()))

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        at = first_row
        for lines in _lines(self.path, first_row, size):
            rows = [_json_object(line) for line in lines]
            texts = [_text_of(row, self.text_column, fault) for row, fault in rows]
            kept = [
                _typed(self.path, at, field, [(row or {}).get(field.name) for row, _ in rows]) for field in self.kept
            ]
            yield self._batch(
                pa.array([text for text, _ in texts], pa.utf8()),
                kept,
                pa.array([fault for _, fault in texts], pa.utf8()),
            )
            at += len(lines)


_KINDS: dict[str, Any] = {
    **{".parquet": ParquetSource, ".csv": CsvSource, ".txt": LineSource},
    **{".jsonl": JsonLinesSource, ".ndjson": JsonLinesSource, ".arrow": ArrowSource, ".feather": ArrowSource},
}


def _line_count(path: Path) -> int:
    """Count the lines of a file, including a last one without an end. A gigabyte takes about a second."""
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n")


def _lines(path: Path, first_row: int, size: int) -> Iterator[list[bytes]]:
    """Yield lines without their ends, in lists of `size`. Windows' editors write a byte-order mark before the first
    one."""
    with path.open("rb", buffering=_READ_BYTES) as file:
        lines = islice(file, first_row, None)
        while piece := [line.rstrip(b"\r\n") for line in islice(lines, size)]:
            if not first_row:
                piece[0], first_row = piece[0].removeprefix(BOM_UTF8), 1
            yield piece


def _head(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return list(islice(file, _TYPED_ROWS))


def _decoded(line: bytes) -> tuple[str | None, str | None]:
    """Return the text or the fault of a line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"no UTF-8 at byte {error.start} of the line"
    return (text, None) if text.strip() else (None, "empty line")


def _json_object(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"no JSON: {error}"
    return (row, None) if isinstance(row, dict) else (None, "no JSON object")


def _text_of(row: dict[str, Any] | None, column: str, fault: str | None) -> tuple[str | None, str | None]:
    if row is None:
        return None, fault
    text = row.get(column)
    if not isinstance(text, str):
        return None, f"no key {column!r}" if column not in row else f"{column!r} is not a string"
    try:
        text.encode()
    except UnicodeEncodeError:
        return None, f"{column!r} has half of a surrogate pair"
    return text, None


def _type_of(values: list[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except (ValueError, pa.ArrowException, OverflowError):  # ValueError: half of a surrogate pair
        return pa.utf8()


def _united(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the columns of both, each of a type that holds the values of the two; text if no other type does."""
    if first == second:
        return first
    fields = []
    for one, other in zip(first, second, strict=True):
        try:
            [field] = pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive")
        except pa.ArrowException:
            field = one.with_type(pa.utf8())
        fields.append(field)
    return pa.schema(fields)


def _typed(path: Path, first_row: int, field: pa.Field, values: list[Any]) -> Any:
    if field.type == pa.utf8():
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    try:
        return pa.array(values, field.type)
    except (ValueError, pa.ArrowException, TypeError, OverflowError) as error:
        place = f"rows {first_row} to {first_row + len(values) - 1}"
        raise InvalidConfig(
            f"{path}: {place}: {field.name!r} is not always {field.type}: {error}; run without it: --keep"
        ) from error
