"""Vectors as a finished file: Parquet, Arrow IPC or NumPy, written batch by batch and then renamed."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from teimgr.errors import Code, InvalidConfig, Refused, error_from_code
from teimgr.files import lock_file, write_atomically
from teimgr.wire.spaces import fingerprint, meets

VECTOR = "embedding"
SUFFIXES = (".parquet", ".arrow", ".npy")

_GROUP_ROWS, _GROUP_BYTES = 16_384, 128 << 20


def write_output(path: Path, batches: Iterable[pa.RecordBatch], rows: int, fingerprint: str = "") -> None:
    """Write all batches to `path` by its suffix, atomically; `rows` is their sum. Only some batches are in memory at a
    time.

    NumPy takes only the vectors, [rows, dim], NaN if a row failed, so their fingerprint goes into a separate file.

    Raises:
        InvalidConfig: the disk refused; the file at `path` is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with _disk(temporary):
        _WRITERS[path.suffix.lower()](temporary, iter(batches), rows)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if path.suffix.lower() == ".npy" and fingerprint:
            space, _, precision = fingerprint.partition("/")
            content = json.dumps({"space": space, "precision": precision}).encode()
            write_atomically(path.with_name(f"{path.name}.space.json"), content + b"\n")
        temporary.replace(path)


def _parquet(path: Path, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    writer: Any = None
    group: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            if writer is None:
                # Floats of vectors hardly compress, and their dictionaries and statistics are of no use.
                plain = [name for name in batch.schema.names if name != VECTOR]
                writer = pq.ParquetWriter(
                    path, batch.schema, compression="zstd", use_dictionary=plain, write_statistics=plain
                )
            group.append(batch)
            size = sum(each.nbytes for each in group)
            if sum(each.num_rows for each in group) >= _GROUP_ROWS or size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(group))
                group = []
        if writer is None:
            pq.write_table(_empty(), path)
        elif group:
            writer.write_table(pa.Table.from_batches(group))
    finally:
        if writer is not None:
            writer.close()


def _arrow(path: Path, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    first = next(batches, None)
    with pa.ipc.new_file(path, _empty().schema if first is None else first.schema) as writer:
        if first is not None:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)


def _numpy(path: Path, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    with path.open("wb") as file:
        first = next(batches, None)
        matrix = np.empty((0, 0), np.float32) if first is None else _matrix(first)
        header = {"descr": matrix.dtype.str, "fortran_order": False, "shape": (rows, matrix.shape[1])}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(matrix.tobytes())
        for batch in batches:
            file.write(_matrix(batch).tobytes())


_WRITERS = {".parquet": _parquet, ".arrow": _arrow, ".npy": _numpy}


def _matrix(batch: pa.RecordBatch) -> Any:
    """Return the vectors of a batch, [n, dim]; null rows are NaN."""
    column = batch.column(VECTOR)
    dim = column.type.list_size
    values = column.values.slice(column.offset * dim, len(column) * dim).to_numpy(zero_copy_only=False)
    rows = values.reshape(len(column), dim)
    if column.null_count:
        rows = rows.copy()
        rows[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return rows


def _empty() -> pa.Table:
    return pa.table({"row": pa.array([], pa.int64()), VECTOR: pa.array([], pa.list_(pa.float32(), 0))})


_VERSION = 1


class _Done(NamedTuple):
    """Whole batches and their ends: rows, rows without a vector, bytes of the data and of the failures."""

    rows: int = 0
    failed: int = 0
    data_bytes: int = 0
    failure_bytes: int = 0


class PartialOutput:
    """Append batches and failures, and `commit`. One process at a time; used as `with`.

    The completed work is one record, replaced when a batch and its failures are written. A commit writes that record,
    so an interruption or a full disk at any point leaves a journal that fits the files: bytes after its ends are cut
    off.

    Attributes: fingerprint: The space and the precision of the vectors, empty before the first and if the server does
    not report it.
    """

    def __init__(self, output: Path, failures: Path, job: Mapping[str, Any]) -> None:
        """`job` identifies the work: an unfinished one of another job is refused when this is opened."""
        self.data_path = output.with_name(f"{output.name}.partial")
        self.journal_path = output.with_name(f"{output.name}.journal")
        self.failures_path = failures
        self.fingerprint = ""
        self._job = dict(job)
        self._done = _Done()
        self._schema: pa.Schema | None = None
        self._held = ExitStack()
        self._data: FileIO
        self._failures: FileIO

    @property
    def rows(self) -> int:
        """Complete rows, including failed ones."""
        return self._done.rows

    @property
    def failed(self) -> int:
        """Complete rows without a vector."""
        return self._done.failed

    @property
    def dimension(self) -> int:
        """Values of a vector; 0 before the first row."""
        if self._schema is None:
            return 0
        kind = self._schema.field(VECTOR).type
        return int(kind.list_size if pa.types.is_fixed_size_list(kind) else kind.value_type.list_size)

    def __enter__(self) -> Self:
        """Lock the files, and continue after the last commit.

        Raises:
            Refused: another process writes this output, or an unfinished one of another job is there.
            InvalidConfig: the folder cannot be written, or the files are not those of the journal.
        """
        with ExitStack() as held:
            with _disk(self.data_path):
                lock = lock_file(self.data_path)
            if lock is None:
                raise Refused(f"{self.data_path}: another process is writing it")
            held.callback(os.close, lock)
            done = self._journal()
            self._done = _Done(*(done.get(name, 0) for name in _Done._fields))
            self.fingerprint = done.get("fingerprint", "")
            self._data = held.enter_context(_opened_at(self.data_path, self._done.data_bytes))
            self._failures = held.enter_context(_opened_at(self.failures_path, self._done.failure_bytes))
            deque(self._stored(), maxlen=0)  # quick: memory is mapped, and vectors are not read
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if error is not None and not self.rows:  # nothing to go on with
                self.remove()

    def append(self, batch: pa.RecordBatch, failures: Iterable[Mapping[str, Any]]) -> None:
        """Add complete rows and, for rows without a vector, their entries in the file of failures.

        Raises:
            InvalidConfig: the columns differ from those of earlier rows, or the disk refused; completed work stays.
        """
        if self._done.data_bytes and self._schema is not None and batch.schema != self._schema:
            of_rows, to_add = (
                ", ".join(f"{each.name}: {each.type}" for each in one) for one in (self._schema, batch.schema)
            )
            raise self._damaged(f"its columns are {of_rows}, and those to add {to_add}")
        self._schema = batch.schema
        lines = [json.dumps(failure, ensure_ascii=False).encode() + b"\n" for failure in failures]
        done = self._done
        schema = b"" if done.data_bytes else batch.schema.serialize().to_pybytes()
        data_bytes = _write_at(self._data, done.data_bytes, schema, batch.serialize())
        failure_bytes = _write_at(self._failures, done.failure_bytes, *lines)
        self._done = _Done(done.rows + batch.num_rows, done.failed + len(lines), data_bytes, failure_bytes)

    def take_space(self, space: str, precision: str) -> None:
        """Check that vectors to be appended are of the space of those before, in no coarser a precision.

        Raises:
            SpaceDiffers: they are not; none of them may be appended.
        """
        if not self.fingerprint and space and not self.rows:
            self.fingerprint = fingerprint(space, precision)
        if self.fingerprint and not meets(self.fingerprint, space, precision):
            given = fingerprint(space, precision) if space else "unknown"
            raise error_from_code(
                Code.SPACE_DIFFERS,
                f"{self.data_path}: its vectors are of the space {self.fingerprint}, and those of the server are of "
                f"{given}; serve that model again, or start over with --restart",
            )

    def commit(self) -> None:
        """Make the appended rows survive a kill and a power failure.

        Raises:
            InvalidConfig: the disk refused; the previous commit stands.
        """
        done = self._done
        if not done.rows:
            return
        for file in (self._data, self._failures):
            with _disk(Path(file.name)):
                os.fsync(file.fileno())
        journal = {
            **{"version": _VERSION, "job": self._job, **done._asdict()},
            **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
        }
        with _disk(self.journal_path):
            write_atomically(self.journal_path, json.dumps(journal, indent=1).encode(), durable=True)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches, one at a time.

        Raises:
            InvalidConfig: they are not the rows that were appended.
        """
        self._data.truncate(self._done.data_bytes)
        return self._stored()

    def _stored(self) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            if self._done.data_bytes:
                with pa.memory_map(str(self.data_path)) as file:
                    reader = pa.ipc.open_stream(file)
                    self._schema = reader.schema
                    for batch in reader:
                        if batch.num_rows and batch.column(0)[0].as_py() != rows:
                            break
                        rows += batch.num_rows
                        yield batch
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(str(error)) from error
        if rows != self.rows:
            raise self._damaged(f"row {rows} is not where {self.journal_path.name} has it")

    def _damaged(self, why: str) -> InvalidConfig:
        return InvalidConfig(f"{self.data_path}: damaged ({why}); start over with --restart")

    def remove(self) -> None:
        """Delete the journal and the data; failures stay, if there are any."""
        self.journal_path.unlink(missing_ok=True)
        self.data_path.unlink(missing_ok=True)
        if not self.failed:
            self.failures_path.unlink(missing_ok=True)

    def _journal(self) -> dict[str, Any]:
        try:
            done: dict[str, Any] = json.loads(self.journal_path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise InvalidConfig(f"{self.journal_path}: no JSON: {error}; delete it to start over") from error
        if not done.get("rows"):
            return {}
        if done.get("version") != _VERSION or done["job"] != self._job:
            keys = sorted(key for key in {*done["job"], *self._job} if done["job"].get(key) != self._job.get(key))
            raise Refused(
                f"{self.journal_path}: an unfinished run of another job ({', '.join(keys)} differ); finish that one,"
                " or start over with --restart"
            )
        return done


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Name the file that the disk refused.

    Raises:
        InvalidConfig: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"{path}: {why}; the same command goes on from the last commit") from error


def _opened_at(path: Path, size: int) -> FileIO:
    """Open the file, cut to `size` bytes.

    Raises:
        InvalidConfig: it has fewer, or cannot be written.
    """
    with _disk(path):
        file = FileIO(path, "r+" if path.exists() else "w+")
        if os.fstat(file.fileno()).st_size < size:
            file.close()
            raise InvalidConfig(f"{path}: shorter than its journal states; start over with --restart")
        file.truncate(size)
    return file


def _write_at(file: FileIO, offset: int, *parts: Any) -> int:
    """Write the parts from `offset` on, and return where they end."""
    with _disk(Path(file.name)):
        file.seek(offset)
        for part in parts:
            left = memoryview(part).cast("B")
            offset += len(left)
            while left:
                left = left[file.write(left) :]
    return offset


def discard(output: Path, failures: Path) -> None:
    """Delete the files of an unfinished run."""
    for path in (output.with_name(f"{output.name}.journal"), output.with_name(f"{output.name}.partial"), failures):
        path.unlink(missing_ok=True)
