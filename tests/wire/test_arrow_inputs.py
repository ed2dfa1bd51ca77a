"""Tables of inputs: texts, pairs or token ids by the names of columns, and keys that come back as they went in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teimgr.errors import InvalidInput, TeimgrError, TooLarge
from teimgr.wire.arrow_inputs import InputKind, read_inputs
from teimgr.wire.arrow_tables import Keys, error_column, write_table
from teimgr.wire.json_scan import MAX_TEXT_BYTES

LIMIT = 1 << 24
MAX_ID = 2**31 - 1


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def table(**columns: object) -> bytes:
    arrays = {name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()}
    return stream(pa.record_batch(arrays))


def plain(item: object) -> object:
    return item.tolist() if isinstance(item, np.ndarray) else item


def test_texts_are_the_column_of_that_name_and_nothing_else() -> None:
    read = read_inputs(table(other=["x", "y"], text=["a", None]), LIMIT)

    assert list(read.inputs) == ["a", None]
    with pytest.raises(InvalidInput, match=r"No column is named `text`: \['other'\]"):
        read_inputs(table(other=["x"]), LIMIT)


def test_a_text_that_one_call_would_decode_for_too_long_is_refused_by_its_row() -> None:
    longest = "." * MAX_TEXT_BYTES
    limit = 4 * MAX_TEXT_BYTES
    assert [len(text or "") for text in read_inputs(table(text=["a", longest]), limit).inputs] == [1, MAX_TEXT_BYTES]
    dictionary = pa.array(["a", longest + "."]).dictionary_encode()
    for column in (["a", longest + "."], dictionary):
        with pytest.raises(InvalidInput, match=r"Row 1 has a text of 8388609 bytes, the limit is 8388608 bytes"):
            read_inputs(table(text=column), limit)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_texts_of_sliced_columns_and_of_all_batches_are_one_column(kind: pa.DataType) -> None:
    whole = pa.record_batch({"text": pa.array(["naïve", None, "", "東京", "e"], kind)})
    batches = [whole.slice(1, 3), whole.slice(4), whole.slice(0, 0), whole]

    read = read_inputs(stream(*batches), LIMIT)

    assert list(read.inputs) == [None, "", "東京", "e", "naïve", None, "", "東京", "e"]
    assert read.rows == [3, 1, 0, 5]


def test_the_bytes_of_a_null_are_no_text() -> None:
    """A null may have any bytes in Arrow."""
    offsets, data = np.array([0, 3, 6, 7], np.int32), b"fog" + b"\xff\xff\xff" + b"a"
    column = pa.Array.from_buffers(
        pa.string(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(offsets), pa.py_buffer(data)], null_count=1
    )

    assert list(read_inputs(table(text=column), LIMIT).inputs) == ["fog", None, "a"]


@pytest.mark.parametrize(
    ("columns", "pairs"),
    [
        ({"text": ["a", "b"], "text_pair": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"text": ["a", "b"], "query": ["c", "d"]}, [("c", "a"), ("d", "b")]),
        ({"text": ["a", None], "text_pair": [None, "d"]}, [None, None]),
    ],
    ids=["text and text_pair", "query and text", "nulls"],
)
def test_pairs_are_two_columns_and_a_null_in_either_is_a_null_row(
    columns: dict[str, list[str]], pairs: list[tuple[str, str]]
) -> None:
    assert read_inputs(table(**columns), LIMIT).inputs == pairs


def test_three_columns_are_no_pair() -> None:
    with pytest.raises(InvalidInput, match="all three"):
        read_inputs(table(text=["a"], query=["b"], text_pair=["c"]), LIMIT)


def test_what_the_inputs_are_can_be_said_over_the_names() -> None:
    ipc = table(text=["a"], text_pair=["b"], input_ids=[[1, 2]])

    assert plain(read_inputs(ipc, LIMIT).inputs[0]) == [1, 2]
    assert read_inputs(ipc, LIMIT, kind=InputKind.PAIR).inputs == [("a", "b")]
    assert list(read_inputs(ipc, LIMIT, kind=InputKind.TEXT).inputs) == ["a"]
    with pytest.raises(InvalidInput, match="No column is named `input_ids`"):
        read_inputs(table(text=["a"]), LIMIT, kind=InputKind.IDS)


@pytest.mark.parametrize("item", [pa.uint32(), pa.int32(), pa.int64()], ids=str)
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list], ids=["list", "large list"])
def test_token_ids_are_int32_rows_whatever_they_came_as(kind: object, item: pa.DataType) -> None:
    ids = pa.array([[5], [], None, [7, MAX_ID]], kind(item))

    read = read_inputs(table(input_ids=ids), LIMIT)

    assert [plain(row) for row in read.inputs] == [[5], [], None, [7, MAX_ID]]
    assert {row.dtype for row in read.inputs if row is not None} == {np.dtype(np.int32)}
    assert not read.refused


def test_token_ids_of_a_sliced_column_are_those_of_the_slice() -> None:
    ids = pa.array([[1], [2, 3], None, [4]], pa.list_(pa.int64())).slice(1)

    assert [plain(row) for row in read_inputs(table(input_ids=ids), LIMIT).inputs] == [[2, 3], None, [4]]


def test_token_ids_may_be_of_one_length_by_type() -> None:
    ids = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))

    assert [plain(row) for row in read_inputs(table(input_ids=ids), LIMIT).inputs] == [[1, 2], None, [3, 4]]


def test_a_row_with_a_number_that_is_no_token_id_is_refused_alone() -> None:
    first = pa.array([[1], [-4, -5], [2]], pa.list_(pa.int64()))
    second = pa.array([[], [MAX_ID + 1], [None, 3], [4]], pa.list_(pa.int64()))
    ipc = stream(*(pa.record_batch({"input_ids": ids}) for ids in (first, second)))

    read = read_inputs(ipc, LIMIT)

    assert [plain(row) for row in read.inputs] == [[1], None, [2], [], None, None, [4]]
    assert {row: error.message for row, error in read.refused.items()} == {
        1: "Input validation error: `input_ids` has -4, and token ids are 0 to 2147483647",
        4: "Input validation error: `input_ids` has 2147483648, and token ids are 0 to 2147483647",
        5: "Input validation error: `input_ids` has a null, and token ids are 0 to 2147483647",
    }


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": [1]}, "Column `text` must be of strings, not int64"),
        ({"text": [["a"]]}, "Column `text` must be of strings"),
        ({"text": ["a"], "text_pair": [2]}, "Column `text_pair` must be of strings"),
        ({"query": ["a"]}, "No column is named `text`"),
        ({"input_ids": [1, 2]}, "Column `input_ids` must be a list of uint32, int32 or int64, not int64"),
        ({"input_ids": pa.array([[0.5]])}, "must be a list"),
        ({"input_ids": pa.array([[1]], pa.list_view(pa.int32()))}, "must be a list"),
    ],
)
def test_a_column_of_another_type_is_refused_by_name(columns: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_inputs(table(**columns), LIMIT)


def test_a_name_that_is_there_twice_is_refused() -> None:
    batch = pa.record_batch([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])

    with pytest.raises(InvalidInput, match="Several columns are named `text`"):
        read_inputs(stream(batch), LIMIT)


KEYS = {
    "id": pa.array([1, None, 3], pa.int64()),
    "when": pa.array([0, 1, None], pa.timestamp("us", tz="UTC")),
    "label": pa.array(["a", "b", "a"]).dictionary_encode(),
    "nested": pa.array([{"x": [1]}, {"x": []}, None], pa.struct([("x", pa.list_(pa.int8()))])),
    "view": pa.array(["a long text that is no inline view", None, "s"], pa.string_view()),
    "money": pa.array([None, 1, 2], pa.decimal128(20, 2)),
}


@pytest.mark.parametrize("lz4", [False, True])
def test_keys_of_every_type_come_back_as_they_were_given(lz4: bool) -> None:
    batch = pa.record_batch({"text": pa.array(["a", "b", "c"]), **KEYS})
    sent = stream(batch, batch.slice(1, 1), batch.slice(3), compression="zstd")

    read = read_inputs(sent, LIMIT, key_columns=list(KEYS))
    reply = pa.ipc.open_stream(write_table([error_column(4, {})], read.rows, read.keys, lz4=lz4))

    given = pa.ipc.open_stream(sent).read_all().select(list(KEYS))
    answered = list(reply)
    assert read.rows == [batch.num_rows for batch in answered] == [3, 1, 0]
    assert pa.Table.from_batches(answered).drop(["error"]).equals(given)


def test_keys_come_in_the_order_they_are_named_and_a_missing_one_is_refused() -> None:
    ipc = table(a=[1], text=["x"], b=[2])

    assert [field.name for field in read_inputs(ipc, LIMIT, key_columns=["b", "a"]).keys.fields] == ["b", "a"]
    with pytest.raises(InvalidInput, match="No column is named `c`"):
        read_inputs(ipc, LIMIT, key_columns=["c"])


def test_a_dictionary_that_changes_between_batches_changes_in_the_reply_too() -> None:
    batches = [
        pa.record_batch({"text": pa.array(["x"]), "label": pa.array([word]).dictionary_encode()}) for word in "ab"
    ]

    read = read_inputs(stream(*batches), LIMIT, key_columns=["label"])
    reply = pa.ipc.open_stream(write_table([error_column(2, {})], read.rows, read.keys)).read_all()

    assert reply["label"].to_pylist() == ["a", "b"]


def test_a_bomb_in_a_key_column_is_refused_unread() -> None:
    batch = pa.record_batch({"text": pa.array(["x"]), "key": pa.array([b"a" * 5_000_000])})

    with pytest.raises(TooLarge, match="the limit is 1000000 bytes"):
        read_inputs(stream(batch, compression="zstd"), 1_000_000, key_columns=["key"])


def test_the_number_of_rows_can_be_refused() -> None:
    def at_most_two(rows: int) -> None:
        if rows > 2:
            raise TooLarge(f"{rows} rows")

    with pytest.raises(TooLarge, match="3 rows"):
        read_inputs(table(text=["a", "b", "c"]), LIMIT, check_rows=at_most_two)


def test_without_keys_a_table_has_its_columns_alone() -> None:
    reply = pa.ipc.open_stream(write_table([error_column(2, {})], [1, 1], Keys([], [[], []]))).read_all()

    assert reply.column_names == ["error"]


COLUMN_NAMES = st.sampled_from(["text", "text_pair", "query", "input_ids", "key", "error"])
COLUMNS = st.sampled_from(
    [
        pa.array(["a", None]),
        pa.array(["a", "b"], pa.large_string()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array([1, 2]),
        pa.array([[1, -2], None], pa.list_(pa.int64())),
        pa.array([[1], []], pa.list_(pa.uint32())),
        pa.array([[1], []], pa.list_(pa.uint64())),
        pa.array([None, None]),
        pa.array([[["a"]], []]),
        pa.array([b"\xff", b""]),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    columns=st.lists(st.tuples(COLUMN_NAMES, COLUMNS), max_size=5),
    kind=st.sampled_from([None, *InputKind]),
    keys=st.lists(COLUMN_NAMES, max_size=3, unique=True),
)
def test_any_table_is_read_to_as_many_rows_or_refused(
    columns: list[tuple[str, pa.Array]], kind: InputKind | None, keys: list[str]
) -> None:
    batch = pa.record_batch([array for _, array in columns], names=[name for name, _ in columns])

    try:
        read = read_inputs(stream(batch), LIMIT, kind=kind, key_columns=keys)
    except InvalidInput as error:
        assert "column" in error.message.lower()
    else:
        assert len(read.inputs) == sum(read.rows) == 2
        assert all(read.inputs[row] is None for row in read.refused)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_corrupted_table_is_read_or_refused_and_what_is_read_can_be_sent_back(position: int, noise: bytes) -> None:
    batch = pa.record_batch({"input_ids": pa.array([[1, 2], None, [3]] * 5), "label": pa.array(["a"] * 15)})
    stirred = bytearray(stream(batch))
    position %= len(stirred)
    stirred[position : position + len(noise)] = noise

    try:
        read = read_inputs(bytes(stirred), LIMIT, key_columns=["label"])
    except TeimgrError as error:
        assert isinstance(error, InvalidInput | TooLarge)
    else:
        reply = write_table([error_column(sum(read.rows), {})], read.rows, read.keys)
        assert pa.ipc.open_stream(reply).read_all().num_rows == len(read.inputs)
