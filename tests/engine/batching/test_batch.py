"""Packing is arithmetic, checked over many shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teimgr.engine.batching.batch import Encoded, TokenizedTexts, pack, pack_as_given
from teimgr.errors import EmptyInput, TeimgrError

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


def test_a_text_by_itself_has_what_it_has_among_others() -> None:
    """Packed behind a shorter one, and by itself."""
    one = Encoded(np.array([7, 8, 9], np.int32), np.array([0, 1, 1], np.uint8), keys=2, prompt_tokens=3, query=True)
    alone, second = pack([one]), pack([one, Encoded(np.array([5], np.int32))])

    assert (alone.cu_seqlens.tolist(), alone.max_seqlen, alone.runs) == ([0, 3], 3, ((0, 1, 3),))
    assert alone.order.tolist() == [0]
    for name in ("ids", "position_ids", "type_ids", "prompt_lens", "keys", "queries"):
        found, among = getattr(alone, name), getattr(second, name)
        assert found.dtype == among.dtype
        assert found.tolist() == among[1:].tolist()
    plain = pack([Encoded(one.ids)])
    assert (plain.prompt_lens, plain.type_ids, plain.keys, plain.queries) == (None, None, None, None)


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


@given(TEXTS)
def test_inputs_of_equal_length_are_packed_as_one_by_one(texts: list[list[int]]) -> None:
    """Grouped by length in the order of their first, as the queue has them."""
    grouped: dict[int, list[list[int]]] = {}
    for ids in texts:
        grouped.setdefault(len(ids), []).append(ids)
    groups = [Encoded(np.array(rows, dtype=np.int32)) for rows in grouped.values()]
    one_by_one = arrays([ids for rows in grouped.values() for ids in rows])

    for way in (pack, pack_as_given):
        ours, theirs = way(groups), way(one_by_one)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.cu_seqlens.tolist() == theirs.cu_seqlens.tolist()
        assert ours.order.tolist() == theirs.order.tolist()
        assert ours.position_ids.tolist() == theirs.position_ids.tolist()
        assert (ours.runs, ours.max_seqlen) == (theirs.runs, theirs.max_seqlen)


def test_the_settings_of_a_group_are_those_of_each_of_its_texts() -> None:
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    types = np.ones((2, 3), dtype=np.uint8)
    batch = pack([Encoded(ids, types, keys=2, prompt_tokens=1, query=True), *arrays([[9, 9, 9]])])

    assert [field.tolist() for field in (batch.prompt_lens, batch.keys, batch.queries) if field is not None] == [
        [1, 1, 0],
        [2, 2, 3],
        [True, True, False],
    ]
    assert batch.type_ids is not None
    assert batch.type_ids.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]


def tokenized_of(texts: list[list[int]], typed: bool) -> TokenizedTexts:
    """Those texts in arrays; a text of no ids failed, one that begins with 0 is another input with a setting."""
    others: dict[int, Encoded | TeimgrError] = {}
    for row, text in enumerate(texts):
        if not text:
            others[row] = EmptyInput()
        elif text[0] == 0:
            others[row] = Encoded(np.array(text, dtype=np.int32), keys=1)
    kept = [[] if row in others else text for row, text in enumerate(texts)]
    ids = np.array([id for text in kept for id in text], dtype=np.int32)
    lengths = np.array([len(text) for text in kept], dtype=np.int64)
    types = (ids % 2).astype(np.uint8) if typed else None
    return TokenizedTexts(ids, np.cumsum(lengths) - lengths, lengths, types, 3, others)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=60),
    st.integers(0, 30),
    st.integers(0, 30),
    st.booleans(),
)
def test_groups_of_equal_length_have_every_input_once(
    texts: list[list[int]], skipped: int, left: int, typed: bool
) -> None:
    tokenized = tokenized_of(texts, typed)
    begin = min(skipped, len(texts))
    stop = max(begin, len(texts) - left)
    found: dict[int, list[int] | None] = {}
    for places, result in tokenized.by_length(begin, stop):
        if isinstance(result, TeimgrError):
            assert places.shape == (1,)
            found[int(places[0])] = None
            continue
        assert result.texts == len(places)
        rows = result.ids.reshape(len(places), -1)
        for place, ids in zip(places.tolist(), rows.tolist(), strict=True):
            assert place not in found
            found[place] = ids
        assert (result.keys, result.prompt_tokens) in ((1, 0), (None, 3))
        if typed and result.keys is None:
            assert result.type_ids is not None
            assert result.type_ids.tolist() == (result.ids % 2).tolist()

    assert found == {row: text or None for row, text in enumerate(texts[begin:stop])}


def test_groups_come_in_the_order_of_their_first_input() -> None:
    tokenized = tokenized_of([[1] * length for length in [3, 1, 3, 2] * 6], typed=False)

    assert [(int(places[0]), result.length) for places, result in tokenized.by_length(0, 24)] == [
        (0, 3),
        (1, 1),
        (3, 2),
    ]


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=12), st.booleans())
def test_missing_inputs_can_be_given_later(texts: list[list[int]], typed: bool) -> None:
    whole = tokenized_of(texts, typed)
    early = TokenizedTexts.without_ids(len(texts), {row: EmptyInput() for row in range(0, len(texts), 2)})
    rows = early.missing()
    assert rows == list(range(1, len(texts), 2))

    early.replace(rows, tokenized_of(texts[1::2], typed))
    assert early.missing() == []
    for row in rows:
        ours, theirs = early[row], whole[row]
        if isinstance(theirs, TeimgrError):
            assert isinstance(ours, TeimgrError)
            continue
        assert isinstance(ours, Encoded)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.type_ids is None) == (theirs.type_ids is None)
