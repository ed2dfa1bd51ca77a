"""Packing is arithmetic, checked over many shapes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teimgr.engine.batch import pack

TEXTS = st.lists(st.lists(st.integers(0, 30_000), min_size=1, max_size=12), min_size=1, max_size=20)


def arrays(texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in texts]


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
    batch = pack(arrays([[1, 2, 3, 4], [5], [6, 7, 8]]), [2, 3, 0])

    assert batch.prompt_lens is not None
    assert batch.prompt_lens.tolist() == [0, 0, 2]
    assert pack(arrays([[1], [2]]), [0, 0]).prompt_lens is None


@given(TEXTS)
def test_idle_tokens_come_last_and_belong_to_no_text(texts: list[list[int]]) -> None:
    batch = pack(arrays(texts))
    filled = batch.filled()

    assert len(filled.ids) % 8 == 0
    assert len(filled.ids) - batch.tokens < 32
    assert (filled.tokens, filled.texts) == (batch.tokens, batch.texts)
    assert filled.ids[: batch.tokens].tolist() == batch.ids.tolist()
    assert filled.runs[-1].stop == len(filled.ids) == len(filled.position_ids)


def test_rows_have_few_different_lengths() -> None:
    rows = {len(pack(arrays([[1]] * tokens)).filled().ids) for tokens in range(1, 2049)}

    assert len(rows) == 16 + (2048 - 128) // 32
