"""Tables of texts: what clients send is read, and what is broken or too large once decoded is refused first."""

from __future__ import annotations

import struct
import time
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teimgr.errors import DeadlineExceeded, InvalidInput, TeimgrError, TooLarge
from teimgr.wire.arrow_inputs import read_inputs, read_texts
from teimgr.wire.arrow_limits import MAX_BATCHES, MAX_COLUMNS, MAX_SCHEMA_BYTES, Outline, read_outline, stream_size
from teimgr.wire.arrow_tables import write_vectors
from teimgr.wire.quantisation import Precision

LIMIT = 1 << 24


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def texts_batch(texts: list[str | None], kind: pa.DataType | None = None, name: str = "text") -> pa.RecordBatch:
    return pa.record_batch([pa.array(texts, kind or pa.string())], names=[name])


def string_of_one(stop: int, data: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, stop)), pa.py_buffer(data)])


@pytest.mark.clause("M1.8-input", "N-input")
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_string_type_and_codec_is_read(kind: pa.DataType, compression: str | None) -> None:
    array = pa.array(["eins", None, "zwei"] * 50)
    array = array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)
    batch = pa.record_batch([array], names=["text"])

    texts, rows = read_texts(stream(batch, compression=compression), LIMIT)

    assert list(texts) == ["eins", None, "zwei"] * 50
    assert rows == [150]


@pytest.mark.clause("M1.8-batches")
def test_all_batches_are_read_and_counted() -> None:
    texts, rows = read_texts(stream(texts_batch(["a", "b"]), texts_batch([]), texts_batch(["c"])), LIMIT)

    assert (list(texts), rows) == (["a", "b", "c"], [2, 0, 1])


@pytest.mark.clause("M1.8-column")
def test_the_column_named_text_wins_over_an_earlier_string_column() -> None:
    batch = pa.record_batch([pa.array([1]), pa.array(["id-1"]), pa.array(["hello"])], names=["n", "id", "text"])

    assert list(read_texts(stream(batch), LIMIT)[0]) == ["hello"]


@pytest.mark.clause("M1.8-column")
def test_without_a_column_named_text_the_first_string_column_is_taken() -> None:
    batch = pa.record_batch([pa.array([1]), pa.array(["hello"]), pa.array(["other"])], names=["n", "a", "b"])

    assert list(read_texts(stream(batch), LIMIT)[0]) == ["hello"]


@pytest.mark.clause("M1.8-bad-input")
@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\xff" * 64, b"ARROW1\0\0" + b"\0" * 64, b"\0" * 4096])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"Invalid Arrow IPC|No RecordBatch"):
        read_texts(garbage, LIMIT)


@pytest.mark.clause("M1.8-bad-input")
def test_a_stream_without_a_batch_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])):
        pass

    with pytest.raises(InvalidInput, match="No RecordBatch in stream"):
        read_texts(sink.getvalue().to_pybytes(), LIMIT)


@pytest.mark.clause("M1.8-bad-input")
def test_a_stream_without_a_string_column_is_refused_naming_what_it_has() -> None:
    batch = pa.record_batch([pa.array([1, 2])], names=["numbers"])

    with pytest.raises(InvalidInput, match=r"numbers.*StringArray"):
        read_texts(stream(batch), LIMIT)


def test_a_column_text_that_has_no_strings_is_refused_and_no_other_is_taken() -> None:
    for column, kind in ((pa.array([b"fog"]), "binary"), (pa.array([1]), "int64"), (pa.nulls(1), "null")):
        batch = pa.record_batch([pa.array(["7"]), column], names=["id", "text"])
        for read in (read_texts, read_inputs):
            with pytest.raises(InvalidInput, match=f"Column `text` must be of strings, not {kind}"):
                read(stream(batch), LIMIT)


def test_broken_utf8_is_refused() -> None:
    column = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")]
    )

    with pytest.raises(InvalidInput, match="Invalid Arrow IPC"):
        read_texts(stream(pa.record_batch([column], names=["text"])), LIMIT)


def test_offsets_outside_the_data_are_refused() -> None:
    honest = stream(pa.record_batch([string_of_one(stop=77, data=b"a" * 77)], names=["text"]))
    lying = honest.replace(struct.pack("<ii", 0, 77), struct.pack("<ii", 0, 900))
    assert lying != honest

    with pytest.raises(InvalidInput, match="Invalid Arrow IPC"):
        read_texts(lying, LIMIT)


def test_a_small_body_that_would_decode_to_more_than_the_limit_is_refused_unread() -> None:
    bomb = stream(texts_batch(["a" * 5_000_000]), compression="zstd")
    assert len(bomb) < 100_000

    with pytest.raises(TooLarge, match="the limit is 1000000 bytes"):
        read_texts(bomb, 1_000_000)


def test_rows_that_share_one_long_text_count_for_each_row() -> None:
    long = pa.array(["a" * 100_000])
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int32()), long)
    request = stream(pa.record_batch([shared], names=["text"]))
    assert len(request) < 110_000

    with pytest.raises(TooLarge, match="5000000 bytes of text, the limit is 1000000 bytes"):
        read_texts(request, 1_000_000)


def test_views_of_one_long_buffer_count_for_each_row() -> None:
    viewed = pa.array(["b" * 100_000] * 50, pa.string_view())

    with pytest.raises(TooLarge, match="bytes"):
        read_texts(stream(pa.record_batch([viewed], names=["text"])), 1_000_000)


def test_columns_that_share_the_bytes_of_a_body_count_for_each() -> None:
    """A reply that repeats such columns has the bytes once for each: 1 MB became 210 MB."""
    size, columns = 1_234_567, 20
    names = ["text", "long", *(f"k{number}" for number in range(columns))]
    batch = pa.record_batch([pa.array([text]) for text in ("rain", "x" * size, *"y" * columns)], names=names)
    ipc = bytearray(stream(batch))
    at = ipc.index(struct.pack("<q", size)) - 24  # offset and length of the long text's offsets, then of its bytes
    for number in range(1, columns + 1):  # a column has three buffers: validity, offsets and bytes
        ipc[at + 48 * number : at + 48 * number + 32] = ipc[at : at + 32]
    keys = names[1:]

    with pytest.raises(TooLarge, match=r"decodes to 25\d+ bytes"):
        read_inputs(bytes(ipc), LIMIT, key_columns=keys)
    assert len(read_inputs(stream(batch), LIMIT, key_columns=keys).keys.fields) == columns + 1


def test_decoded_size_of_plain_and_compressed_streams_agree_within_padding() -> None:
    batch = texts_batch(["some text"] * 1000)

    plain, compressed = stream_size(stream(batch)), stream_size(stream(batch, compression="lz4"))

    assert abs(plain.decoded_bytes - compressed.decoded_bytes) <= 256
    assert compressed.decoded_bytes >= 9000
    assert (plain.rows, plain.batches) == (compressed.rows, compressed.batches) == (1000, 1)


def struct_of(depth: int, width: int) -> pa.DataType:
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.struct([pa.field(str(at), kind) for at in range(width)])
    return kind


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("text", pa.string()), *((f"c{at}", pa.int8()) for at in range(MAX_COLUMNS))]),
        pa.schema([pa.field("text", pa.string())] * (MAX_COLUMNS + 1)),
        pa.schema([("text", pa.string()), ("deep", struct_of(5, 4))]),
        pa.schema([("text", pa.string()), ("wide", struct_of(1, MAX_COLUMNS))]),
    ],
    ids=["columns", "columns of one name", "a tree", "a wide struct"],
)
def test_a_schema_of_too_many_columns_is_refused_unread(schema: pa.Schema) -> None:
    request = stream(pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema))

    for read in (read_texts, read_inputs):
        with pytest.raises(TooLarge, match="more than 1024 columns"):
            read(request, LIMIT)


def test_forty_thousand_columns_cost_no_more_than_their_count() -> None:
    """They once held a thread for minutes: the names of all were read for each."""
    schema = pa.schema([*(pa.field(f"column {at}", pa.string()) for at in range(40_000)), ("text", pa.string())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    began = time.monotonic()

    with pytest.raises(TooLarge):
        read_texts(sink.getvalue(), LIMIT)

    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "field",
    [
        pa.field("n" * MAX_SCHEMA_BYTES, pa.int8()),
        pa.field("n", pa.timestamp("s", "z" * MAX_SCHEMA_BYTES)),
        pa.field("n", pa.int8(), metadata={"k": "v" * MAX_SCHEMA_BYTES}),
    ],
    ids=["a name", "a time zone", "metadata"],
)
def test_a_schema_of_megabytes_is_refused_unread(field: pa.Field) -> None:
    """A name of 16 MB was decoded several times, each time in one call that held the worker."""
    schema = pa.schema([("text", pa.string()), field])
    request = stream(pa.record_batch([pa.array(["x"]), pa.nulls(1, field.type)], schema=schema))

    for read in (read_texts, read_inputs):
        with pytest.raises(TooLarge, match=r"schema has 10[0-9]+ bytes, the limit is 1048576 bytes"):
            read(request, LIMIT)


def test_a_schema_within_the_bound_is_read() -> None:
    names = [f"c{at}" for at in range(MAX_COLUMNS - 1)]
    batch = pa.record_batch([pa.array(["x"])] * MAX_COLUMNS, names=[*names, "text"])

    assert list(read_texts(stream(batch), LIMIT)[0]) == ["x"]
    assert list(read_inputs(stream(batch), LIMIT).inputs) == ["x"]


def test_too_many_batches_are_refused_unread() -> None:
    batch = texts_batch([])
    head, one = stream(batch)[:-8], stream(batch, batch)[len(stream(batch)) - 8 : -8]

    assert stream_size(head + one * (MAX_BATCHES - 1)).batches == MAX_BATCHES
    with pytest.raises(TooLarge, match="more than 10000 batches"):
        read_texts(head + one * MAX_BATCHES, LIMIT)


def test_a_dictionary_that_many_batches_share_counts_for_each() -> None:
    """It is validated for each: a few thousand batches would make a large one hours of work."""
    values = pa.array(["a" * 100_000])
    batch = pa.record_batch([pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), values)], names=["text"])

    assert len(read_texts(stream(*[batch] * 50), 1_000_000)[0]) == 50
    with pytest.raises(TooLarge, match=r"dictionaries .* too large for its 100 batches"):
        read_texts(stream(*[batch] * 100), 1_000_000)


def test_a_dictionary_that_grows_counts_again_each_time() -> None:
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    values = [f"{at:01000}" for at in range(400)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("text", pa.dictionary(pa.int32(), pa.string()))]), options=options) as out:
        for at in range(1, 401):
            rows = pa.array([at - 1], pa.int32())
            out.write_batch(pa.record_batch([pa.DictionaryArray.from_arrays(rows, pa.array(values[:at]))], ["text"]))
    request = sink.getvalue().to_pybytes()

    assert stream_size(request).read_bytes > 400 * 400 * 1000 / 2
    assert list(read_texts(request, 2**24)[0]) == values
    with pytest.raises(TooLarge, match="dictionaries"):
        read_texts(request, 1_000_000)


def test_rows_are_counted_before_they_are_decoded() -> None:
    def check(rows: int) -> None:
        raise TooLarge(f"{rows} rows")

    undecodable = bytearray(stream(texts_batch(["a"] * 30), texts_batch(["b"] * 12)))
    undecodable[-100:-20] = b"\xff" * 80
    with pytest.raises(TooLarge, match="42 rows"):
        read_texts(bytes(undecodable), LIMIT, check)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_rows_of_a_dictionary_share_its_bytes(compression: str) -> None:
    """10,000 rows of one text with an emoji were 1.1 GiB of strings, from 14 kB."""
    value = "x" * 30_000 + "😀"
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 9_999 + [None], pa.int32()), pa.array([value]))
    request = stream(pa.record_batch([rows], names=["text"]), compression=compression)
    tracemalloc.start()
    try:
        texts, _ = read_texts(request, 400_000_000)
        assert texts.characters == 9_999 * len(value)
        part = texts[5_000:5_200]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 20_000_000
    assert set(part) == {value}
    assert (texts[0], texts[9_999]) == (value, None)


def test_work_that_nobody_waits_for_is_given_up_between_batches() -> None:
    calls = 0

    def go_on() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DeadlineExceeded

    with pytest.raises(DeadlineExceeded):
        read_texts(stream(*[texts_batch(["a"])] * 1000), LIMIT, go_on=go_on)
    assert calls == 3


def test_a_long_name_or_type_is_cut_in_the_refusal() -> None:
    batch = pa.record_batch([pa.array([1])] * 1000, names=[f"{at}" * 200 for at in range(1000)])

    with pytest.raises(InvalidInput, match=r"\(1000 columns\)") as refused:
        read_texts(stream(batch), LIMIT)
    assert len(refused.value.message) < 3000
    with pytest.raises(InvalidInput) as refused:
        read_inputs(stream(pa.record_batch([pa.array([{"n" * 100_000: 1}])], ["text"])), LIMIT)
    assert len(refused.value.message) < 3000


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_corrupted_stream_is_read_or_refused_and_never_worse(position: int, noise: bytes) -> None:
    intact = bytearray(stream(texts_batch(["eins", None, "drei"] * 20), compression="lz4"))
    position %= len(intact)
    intact[position : position + len(noise)] = noise

    try:
        read_texts(bytes(intact), LIMIT)
    except TeimgrError as error:
        assert isinstance(error, InvalidInput | TooLarge)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_the_outline_refuses_nothing_that_can_be_read(position: int, noise: bytes) -> None:
    stirred = bytearray(stream(texts_batch(["eins", None, "drei"]), compression="lz4"))
    position %= len(stirred)
    stirred[position : position + len(noise)] = noise

    try:
        outline = read_outline(stirred)
    except ValueError:
        with pytest.raises((InvalidInput, TooLarge)):
            read_texts(bytes(stirred), LIMIT)
    else:
        if outline != Outline(has_text=True, has_batch=True):
            with pytest.raises((InvalidInput, TooLarge)):
                read_texts(bytes(stirred), LIMIT)


def test_the_outline_of_a_long_stream_looks_at_its_beginning() -> None:
    head = stream(*[texts_batch(["a"])] * 200)[:-8]

    assert read_outline(head + b"no arrow any more") == Outline(has_text=True, has_batch=True)


@pytest.mark.clause("M1.8-batches")
def test_vectors_come_back_as_rows_with_the_batches_of_the_request() -> None:
    vectors = np.arange(15, dtype=np.float32).reshape(5, 3)

    with pa.ipc.open_stream(write_vectors(vectors, {}, [2, 0, 3])) as reader:
        batches = list(reader)

    assert [batch.num_rows for batch in batches] == [2, 0, 3]
    assert batches[0].schema.field("embeddings").type == pa.list_(pa.field("item", pa.float32(), nullable=False), 3)
    assert batches[0].schema.names == ["embeddings", "error"]
    assert np.array_equal(np.concatenate([_values(batch) for batch in batches]).reshape(5, 3), vectors)


@pytest.mark.clause("M1.8-rows", "N-columns")
def test_a_failed_row_is_null_with_its_reason_and_keeps_its_place() -> None:
    vectors = np.ones((3, 2), np.float32)

    with pa.ipc.open_stream(write_vectors(vectors, {1: InvalidInput("too long")}, [3])) as reader:
        batch = reader.read_next_batch()

    assert batch.column("embeddings").to_pylist() == [[1, 1], None, [1, 1]]
    assert batch.column("error").to_pylist() == [None, "too long", None]


@pytest.mark.clause("M1.8-no-rows")
def test_no_rows_still_carry_the_dimension() -> None:
    with pa.ipc.open_stream(write_vectors(np.empty((0, 384), np.float32), {}, [0])) as reader:
        assert reader.schema.field("embeddings").type.list_size == 384
        assert reader.read_next_batch().num_rows == 0


@pytest.mark.clause("N-dtype", "N-compression")
@pytest.mark.parametrize("lz4", [False, True])
def test_half_precision_and_compression_are_as_asked(lz4: bool) -> None:
    vectors = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)

    with pa.ipc.open_stream(write_vectors(vectors, {}, [3], precision=Precision.FLOAT16, lz4=lz4)) as reader:
        batch = reader.read_next_batch()

    assert batch.schema.field("embeddings").type.value_type == pa.float16()
    assert np.allclose(_values(batch).reshape(3, 4), vectors, atol=1e-3)


def _values(batch: pa.RecordBatch) -> np.ndarray:
    return batch.column("embeddings").flatten().to_numpy(zero_copy_only=False)
