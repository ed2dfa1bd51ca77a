"""The record of a batch, its windows, and sets of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.api.batches.batch_record import Batch, BatchFault, BatchProgress, ResultPart, RowSet, Status, window_s
from teimgr.errors import ObjectInUse, ValidationError


@given(st.lists(st.sets(st.integers(0, 500)), max_size=4))
def test_a_set_of_rows_has_what_was_added(parts: list[set[int]]) -> None:
    rows = RowSet()
    for part in parts:
        rows = rows.with_rows(part)
    rows = RowSet.from_text(rows.to_text())
    assert {row for row in range(600) if row in rows} == set().union(*parts)


def batch(**values: object) -> Batch:
    return Batch("batch_1", "key", "/v1/embeddings", "file-1", "24h", 10.5, 86410.5, **values)  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written() -> None:
    done = RowSet().with_rows([0, 9])
    progress = BatchProgress(ResultPart("file-2", 1, 20), ResultPart("file-3", 1, 30), done, tokens=77)
    before = batch(metadata={"a": "b"}, faults=[BatchFault("x", "y", 3, "z")], progress=progress, total=12)
    before.enter(Status.IN_PROGRESS, 11.9)

    after = Batch.from_record(before.to_record())

    assert after.as_object() == before.as_object()
    assert (after.progress.output, after.progress.error) == (progress.output, progress.error)
    assert [row for row in range(12) if row in after.progress.done] == [0, 9]
    assert after.as_object()["in_progress_at"] == 11
    assert after.as_object()["usage"]["total_tokens"] == 77
    assert after.as_object()["completed_at"] is None


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86400), ("7d", 604800), ("1s", 1), ("90m", 5400)])
def test_windows(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "-1h", "8d", "1.5h", "24h ", "9999999d"])
def test_other_windows_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="completion_window: must be a time such as 24h"):
        window_s(text)


def test_an_ended_batch_cannot_be_cancelled() -> None:
    ended = batch(status=Status.COMPLETED)
    with pytest.raises(ObjectInUse, match="Cannot cancel a batch with status 'completed'"):
        ended.check_can_be_cancelled()
