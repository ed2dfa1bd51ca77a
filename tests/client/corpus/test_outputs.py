"""Rows written in part: an interruption at any line, a disk that refuses, files that do not fit their journal."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from teimgr.client.corpus import outputs
from teimgr.client.corpus.outputs import PartialOutput, write_output
from teimgr.errors import InvalidConfig

BATCH, ROWS = 5, 15


def opened(folder: Path) -> PartialOutput:
    return PartialOutput(folder / "v.parquet", folder / "v.parquet.failed.jsonl", {"job": 1})


def append(partial: PartialOutput) -> None:
    """The next batch, of which two rows fail."""
    first = partial.rows
    vectors = pa.array([[float(row)] if row % 5 > 1 else None for row in range(first, first + BATCH)])
    batch = pa.record_batch({"row": pa.array(range(first, first + BATCH)), "embedding": vectors})
    partial.append(batch, ({"row": row, "error": "x" * 500} for row in (first, first + 1)))


def finish(folder: Path) -> None:
    """The same job to its end; each row and each failure is there once, in order."""
    with opened(folder) as partial:
        while partial.rows < ROWS:
            append(partial)
        partial.commit()
        table = pa.Table.from_batches(list(partial.batches()))
    assert table["row"].to_pylist() == list(range(ROWS))
    assert [row and row[0] for row in table["embedding"].to_pylist()] == [
        row if row % 5 > 1 else None for row in range(ROWS)
    ]
    failures = [json.loads(line)["row"] for line in partial.failures_path.read_text().splitlines()]
    assert failures == [0, 1, 5, 6, 10, 11]
    assert partial.failed == len(failures)


def interrupting(at: int) -> tuple[Callable[..., Any], list[str]]:
    """A trace that raises KeyboardInterrupt before the line number `at` of those that the module runs."""
    left, lines = at, []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != outputs.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    return trace, lines


def test_an_interruption_at_any_line_leaves_whole_batches(tmp_path: Path) -> None:
    seen = set()
    for at in range(1, 200):
        folder = tmp_path / str(at)
        folder.mkdir()
        trace, lines = interrupting(at)
        with suppress(KeyboardInterrupt), opened(folder) as partial:
            append(partial)
            try:
                sys.settrace(trace)
                append(partial)
                partial.commit()
                append(partial)
            finally:
                sys.settrace(None)
                partial.commit()
        finish(folder)
        seen.update(lines)
        if not lines:
            break
    assert not lines, "not all lines were reached"
    assert {line.partition(":")[0] for line in seen} >= {"append", "_write_at", "commit"}
    assert len(seen) > 15


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [600, 1100, 1500, 2100])
def test_a_write_that_the_disk_refuses_is_named_and_the_rows_before_it_stay(size: int, tmp_path: Path) -> None:
    def run() -> None:
        with opened(tmp_path) as partial, file_limit(size):
            try:
                for _ in range(ROWS // BATCH):
                    append(partial)
            finally:
                partial.commit()

    with pytest.raises(InvalidConfig, match=r"v\.parquet\.\S+: File too large; the same command goes on"):
        run()
    finish(tmp_path)


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as partial:
        append(partial)
        partial.commit()
    with (
        opened(tmp_path) as partial,
        pytest.raises(InvalidConfig, match=r"its columns are row: int64, .*, and those to add .*--restart"),
    ):
        partial.append(pa.record_batch({"row": pa.array([5])}), ())
    finish(tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".npy"])
def test_an_output_that_the_disk_refuses_is_named(suffix: str, tmp_path: Path) -> None:
    output = tmp_path / f"v{suffix}"
    with opened(tmp_path) as partial:
        for _ in range(200):
            append(partial)
        vectors = [batch.set_column(1, "embedding", fixed(batch)) for batch in partial.batches()]
        with file_limit(100), pytest.raises(InvalidConfig, match=rf"v{suffix}\.tmp: "):
            write_output(output, iter(vectors), partial.rows)
    assert not output.exists()


def fixed(batch: pa.RecordBatch) -> pa.Array:
    return batch.column("embedding").cast(pa.list_(pa.float64(), 1))


def test_files_that_do_not_fit_their_journal_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as partial:
        append(partial)
        append(partial)
        partial.commit()
    data, failures = partial.data_path.read_bytes(), partial.failures_path.read_bytes()
    journal = json.loads(partial.journal_path.read_bytes())
    for changes, content, lines, why in (
        ({}, data[:-1], failures, "shorter than its journal"),
        ({}, data, failures[:-1], "shorter than its journal"),
        ({"rows": 5}, data, failures, "damaged"),
        ({"rows": 11}, data, failures, "damaged"),
        ({"data_bytes": len(data) - 8}, data, failures, "damaged"),
    ):
        partial.journal_path.write_text(json.dumps(journal | changes))
        partial.data_path.write_bytes(content)
        partial.failures_path.write_bytes(lines)
        with pytest.raises(InvalidConfig, match=f"{why}.*--restart"), opened(tmp_path):
            pass


def test_a_run_that_did_nothing_leaves_nothing(tmp_path: Path) -> None:
    with suppress(ValueError), opened(tmp_path) as partial:
        partial.commit()
        raise ValueError
    assert list(tmp_path.iterdir()) == []
    partial.journal_path.write_text(json.dumps({"version": 1, "job": {"another": 1}, "rows": 0}))
    finish(tmp_path)
