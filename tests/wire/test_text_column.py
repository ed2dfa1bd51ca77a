"""A column of texts is a sequence of them, and its arrays are those texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.measures import held_s

from teimgr.wire import text_column
from teimgr.wire.text_column import SharedTexts, TextColumn

TEXTS = st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), max_size=12)


@given(TEXTS, st.integers(-13, 13), st.integers(-13, 13))
def test_it_is_the_sequence_of_its_texts(texts: list[str | None], begin: int, stop: int) -> None:
    column = TextColumn.of(texts)

    assert list(column) == texts == [column[row] for row in range(len(column))]
    assert list(column[begin:stop]) == texts[begin:stop]
    assert list(column[begin:][: stop - begin]) == texts[begin:][: stop - begin]
    assert column.characters == sum(len(text or "") for text in texts)
    assert column[begin:stop].characters == sum(len(text or "") for text in texts[begin:stop])
    assert column.lengths.tolist() == [len((text or "").encode()) for text in texts]
    if texts:
        assert column[-1] == texts[-1]


@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 3))
def test_joined_columns_have_all_rows_in_order(parts: list[list[str | None]], skipped: int) -> None:
    joined = TextColumn.joined([TextColumn.of(part)[skipped:] for part in parts])

    assert list(joined) == [text for part in parts for text in part[skipped:]]
    assert joined.lengths.sum() == joined.offsets[-1] - joined.offsets[0]


def test_one_column_is_not_copied_and_neither_is_a_slice() -> None:
    column = TextColumn.of(["fog", "rain"])

    assert TextColumn.joined([column]) is column
    assert column[1:].data is column.data


def test_characters_are_counted_over_the_borders_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_column, "_COUNTED_BYTES", 3)

    assert TextColumn.of(["naïve", "东京", "fog"]).characters == 10


def test_what_is_outside_is_an_index_error_and_steps_are_refused() -> None:
    column = TextColumn(np.zeros(0, np.uint8), np.zeros(1, np.int64))

    assert list(column) == []
    with pytest.raises(IndexError):
        column[0]
    with pytest.raises(ValueError, match="must not have a step"):
        column[::2]


def test_a_text_of_megabytes_is_decoded_in_parts() -> None:
    """The largest text, 8 MiB of Chinese, held the GIL of the worker for 33 ms."""
    text = "".join(chr(0x4E00 + n % 20_000) for n in range(2_700_000))
    column = TextColumn.of([text])
    ends = column.offsets[1:]
    shared = SharedTexts(column.data, column.offsets[:-1], ends, np.zeros(1, np.bool_))
    assert column[0] == shared[0] == next(iter(column)) == text
    assert held_s(lambda: column[0], 3) < held_s(lambda: column.data.tobytes().decode(), 3) / 2
