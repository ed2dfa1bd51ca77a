"""Vectors as a finished file: Parquet, Arrow IPC or NumPy, written batch by batch and then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from teimgr.files import write_atomically

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
