"""Packing is arithmetic, checked over many shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teimgr.engine.batch import Encoded, pack

TEXTS = st.lists(st.lists(st.integers(0, 30_000), min_size=1, max_size=12), min_size=1, max_size=20)


def arrays(texts: list[list[int]], **given: list[Any]) -> list[Encoded]:
    """`given` has a list for a field of `Encoded`, one value per text."""
    values = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)] or [{}] * len(texts)
    return [Encoded(np.array(ids, dtype=np.int32), **v) for ids, v in zip(texts, values, strict=True)]


@given(TEXTS)
def test_every_text_is_found_again_where_the_batch_says(texts: list[list[int]]) -> None:
    batch = pack(arrays(texts))
    borders = batch.cu_seqlens.tolist()

    assert sorted(batch.order.tolist()) == list(range(len(texts)))
    for row, source in enumerate(batch.order.tolist()):
        assert batch.ids[borders[row] : borders[row + 1]].tolist() == texts[source]
        assert batch.position_ids[borders[row] : borders[row + 1]].tolist() == list(range(len(texts[source])))
    assert batch.max_seqlen == max(map(len, texts))
    assert (batch.texts, batch.tokens) == (len(texts), sum(map(len, texts)))
    assert (batch.cu_seqlens.dtype, batch.ids.dtype) == (np.int32, np.int64)


@given(TEXTS)
def test_runs_cover_the_row_in_ascending_length(texts: list[list[int]]) -> None:
    runs = pack(arrays(texts)).runs

    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == sum(map(len, texts))
    assert [run.length for run in runs] == sorted({len(ids) for ids in texts})
    assert sum(run.texts for run in runs) == len(texts)


def test_prompt_lengths_follow_their_texts_and_leave_a_token_each() -> None:
    batch = pack(arrays([[1, 2, 3, 4], [5], [6, 7, 8]], prompt_tokens=[2, 3, 0]))

    assert batch.prompt_lens is not None
    assert batch.prompt_lens.tolist() == [0, 0, 2]
    assert pack(arrays([[1], [2]], prompt_tokens=[0, 0])).prompt_lens is None


def test_type_ids_keys_and_roles_follow_their_texts() -> None:
    types = [np.array([0, 1, 1], dtype=np.uint8), None, np.array([1], dtype=np.uint8)]
    batch = pack(arrays([[1, 2, 3], [4, 5], [6]], type_ids=types, keys=[2, None, None], query=[True, False, False]))

    assert batch.type_ids is not None
    assert batch.keys is not None
    assert batch.queries is not None
    assert batch.type_ids.tolist() == [1, 0, 0, 0, 1, 1]
    assert batch.keys.tolist() == [1, 2, 2]
    assert batch.queries.tolist() == [False, False, True]
    plain = pack(arrays([[1, 2, 3]]))
    assert (plain.type_ids, plain.keys, plain.queries) == (None, None, None)


def test_the_keys_of_a_run_are_told_where_not_all_are_seen() -> None:
    batch = pack(arrays([[1, 2], [3, 4, 5], [6, 7], [8, 9, 9]], keys=[None, 1, None, 3])).rounded_up()

    assert [None if keys is None else keys.tolist() for keys in map(batch.keys_of, batch.runs)] == [None, [1, 3], None]
    assert batch.type_ids is None


@given(TEXTS)
def test_idle_tokens_come_last_and_belong_to_no_text(texts: list[list[int]]) -> None:
    batch = pack(arrays(texts))
    filled = batch.rounded_up()

    assert len(filled.ids) % 8 == 0
    assert len(filled.ids) - batch.tokens < 32
    assert (filled.tokens, filled.texts) == (batch.tokens, batch.texts)
    assert filled.ids[: batch.tokens].tolist() == batch.ids.tolist()
    assert filled.runs[-1].stop == len(filled.ids) == len(filled.position_ids)


def test_rows_have_few_different_lengths() -> None:
    rows = {len(pack(arrays([[1] * tokens])).rounded_up().ids) for tokens in range(1, 2049)}

    assert len(rows) == 16 + (2048 - 128) // 32
