"""Vectors as a finished file: Parquet, Arrow IPC or NumPy, written batch by batch and then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

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
    """Write all batches to `path` by its suffix, atomically; `rows` is their sum. Memory is that of some batches.

    NumPy takes the vectors alone, [rows, dim], NaN where a row failed, so their fingerprint goes into a file beside.
    """
    temporary = path.with_name(f"{path.name}.tmp")
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
    """The vectors of a batch, [n, dim]; null rows are NaN."""
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
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class PartialOutput:
    """Append batches and failures, and `commit`. One process at a time; used as `with`.

    Attributes:
        rows: Complete rows, failed ones included.
        failed: Those of them without a vector.
        fingerprint: The space and the precision of the vectors, empty before the first and where no server tells it.
    """

    def __init__(self, output: Path, failures: Path, job: Mapping[str, Any]) -> None:
        """`job` identifies the work: an unfinished one of another job is refused when this is opened."""
        self.data_path = output.with_name(f"{output.name}.partial")
        self.journal_path = output.with_name(f"{output.name}.journal")
        self.failures_path = failures
        self.rows = self.failed = 0
        self.fingerprint = ""
        self._job = dict(job)
        self._lock: int | None = None
        self._data: BinaryIO
        self._failures: BinaryIO
        self._has_schema = False

    def __enter__(self) -> Self:
        """Lock the files, and go on after the last commit.

        Raises:
            Refused: another process writes this output, or an unfinished one of another job is there.
            InvalidConfig: the folder cannot be written.
        """
        try:
            self._lock = lock_file(self.data_path)
        except OSError as error:
            raise InvalidConfig(f"{self.data_path}: {error.strerror}") from error
        if self._lock is None:
            raise Refused(f"{self.data_path}: another process is writing it")
        try:
            done = self._journal()
        except BaseException:
            os.close(self._lock)
            raise
        self.rows, self.failed = done.get("rows", 0), done.get("failed", 0)
        self.fingerprint = done.get("fingerprint", "")
        self._data = _opened_at(self.data_path, done.get("data_bytes", 0))
        self._failures = _opened_at(self.failures_path, done.get("failure_bytes", 0))
        self._has_schema = self._data.tell() > 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()
        self._failures.close()
        assert self._lock is not None
        os.close(self._lock)

    def append(self, batch: pa.RecordBatch, failures: Iterator[Mapping[str, Any]]) -> None:
        """Add complete rows and, of those without a vector, what the file of failures shall have."""
        if not self._has_schema:
            self._data.write(batch.schema.serialize())
            self._has_schema = True
        self._data.write(batch.serialize())
        for failure in failures:
            self._failures.write(json.dumps(failure, ensure_ascii=False).encode() + b"\n")
            self.failed += 1
        self.rows += batch.num_rows

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
        """Make what was appended survive a kill and a power failure."""
        for file in (self._data, self._failures):
            file.flush()
            os.fsync(file.fileno())
        done = {
            **{"version": _VERSION, "job": self._job, "rows": self.rows, "failed": self.failed},
            **{"data_bytes": self._data.tell(), "failure_bytes": self._failures.tell()},
            **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
        }
        write_atomically(self.journal_path, json.dumps(done, indent=1).encode(), durable=True)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All committed batches, one at a time."""
        if self._has_schema:
            # The end of the stream is not in the journal: a resumed run writes over it.
            self._data.write(_END_OF_STREAM)
            self._data.flush()
            with self.data_path.open("rb") as file:
                yield from pa.ipc.open_stream(file)

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
        if done.get("version") != _VERSION or done["job"] != self._job:
            keys = sorted(key for key in {*done["job"], *self._job} if done["job"].get(key) != self._job.get(key))
            raise Refused(
                f"{self.journal_path}: an unfinished run of another job ({', '.join(keys)} differ); finish that one,"
                " or start over with --restart"
            )
        return done


def _opened_at(path: Path, size: int) -> BinaryIO:
    """The file, cut to `size` bytes and positioned there."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def discard(output: Path, failures: Path) -> None:
    """Delete what an unfinished run left."""
    for path in (output.with_name(f"{output.name}.journal"), output.with_name(f"{output.name}.partial"), failures):
        path.unlink(missing_ok=True)
