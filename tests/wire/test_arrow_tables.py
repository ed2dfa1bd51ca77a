"""Every output as a typed column: exact types, failed rows null, batches cut as they came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teimgr.errors import InvalidInput
from teimgr.wire.arrow_tables import (
    Column,
    Keys,
    error_column,
    failed_rows,
    matrix_column,
    number_column,
    sparse_column,
    vector_column,
    write_sparse,
    write_table,
)
from teimgr.wire.quantisation import Precision, converted


def read(columns: list[Column], rows: list[int]) -> pa.Table:
    table = pa.ipc.open_stream(write_table(columns, rows)).read_all()
    table.validate(full=True)
    return table


def sparse(*entries: tuple[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([index for index, _ in entries], np.uint32), np.array([value for _, value in entries], np.float32)


ENTRY = pa.struct([pa.field("index", pa.uint32(), nullable=False), pa.field("value", pa.float32(), nullable=False)])


@pytest.mark.clause("M1.9-schema", "N-columns")
def test_the_sparse_reply_has_the_contracts_schema() -> None:
    vectors = [sparse((3, 0.5), (9, 2.0)), None, sparse()]

    table = pa.ipc.open_stream(write_sparse(vectors, {1: InvalidInput("too long")}, [2, 1])).read_all()

    assert table.schema == pa.schema(
        [
            pa.field("sparse_embeddings", pa.list_(pa.field("item", ENTRY, nullable=False))),
            pa.field("error", pa.string()),
        ]
    )
    assert table["sparse_embeddings"].to_pylist() == [
        [{"index": 3, "value": 0.5}, {"index": 9, "value": 2.0}],
        None,
        [],
    ]
    assert table["error"].to_pylist() == [None, "too long", None]
    assert [len(chunk) for chunk in table["error"].chunks] == [2, 1]


def test_no_rows_have_the_types_too() -> None:
    table = read(
        [sparse_column("s", []), matrix_column("m", [], 4), number_column("n", np.zeros(0, np.float32), None)], [0]
    )

    assert table.num_rows == 0
    assert table.schema.field("s").type.value_type == ENTRY
    assert table.schema.field("m").type.value_type.list_size == 4


@pytest.mark.parametrize("precision", list(Precision))
def test_vectors_have_the_elements_that_were_asked_for(precision: Precision) -> None:
    vectors = np.linspace(-1, 1, 36, dtype=np.float32).reshape(3, 12)
    failed = failed_rows(3, {1: InvalidInput("no")})

    table = read([vector_column("v", vectors, failed, precision, {"precision": precision.value})], [1, 2])

    field = table.schema.field("v")
    assert field.type.value_type == pa.from_numpy_dtype(precision.dtype)
    assert field.type.list_size == precision.elements(12)
    assert field.metadata == {b"precision": precision.value.encode()}
    rows = converted(vectors, precision).tolist()
    assert table["v"].to_pylist() == [rows[0], None, rows[2]]


@pytest.mark.parametrize("precision", list(Precision))
def test_vectors_per_token_are_lists_of_rows(precision: Precision) -> None:
    one, two = np.full((1, 9), 0.25, np.float32), np.linspace(-1, 1, 18, dtype=np.float32).reshape(2, 9)
    matrices = [two, None, np.zeros((0, 9), np.float32), one]

    table = read([matrix_column("m", matrices, 9, precision)], [3, 1])

    assert table["m"].to_pylist() == [
        converted(two, precision).tolist(),
        None,
        [],
        converted(one, precision).tolist(),
    ]


def test_a_score_per_row_is_a_plain_number() -> None:
    failed = failed_rows(2, {0: InvalidInput("no")})

    table = read([number_column("n", np.array([0.5, 2.0], np.float32), failed)], [2])

    assert table["n"].type == pa.float32()
    assert table["n"].to_pylist() == [None, 2.0]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.one_of(st.none(), st.lists(st.integers(0, 2**32 - 1), max_size=6)), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_batches_put_together_are_the_whole_whatever_the_cuts(rows: list[list[int] | None], cuts: list[int]) -> None:
    vectors = [None if row is None else sparse(*((index, 1.0) for index in row)) for row in rows]
    matrices = [None if row is None else np.zeros((len(row), 3), np.float32) for row in rows]
    bounds = sorted(min(cut, len(rows)) for cut in cuts)
    counts = np.diff([0, *bounds, len(rows)]).tolist()
    errors = {at: InvalidInput(f"row {at}") for at, row in enumerate(rows) if row is None}

    columns = [sparse_column("s", vectors), matrix_column("m", matrices, 3), error_column(len(rows), errors)]
    table = read(columns, counts)

    found = table["s"].to_pylist()
    assert [None if row is None else [entry["index"] for entry in row] for row in found] == rows
    assert [None if row is None else len(row) for row in table["m"].to_pylist()] == [
        None if row is None else len(row) for row in rows
    ]
    assert table["error"].to_pylist() == [None if row is not None else f"row {at}" for at, row in enumerate(rows)]


def test_a_batch_carries_its_own_rows_and_not_the_whole_column() -> None:
    matrices = [np.ones((50, 32), np.float32)] * 20

    sizes = [len(write_table([matrix_column("m", matrices, 32)], rows)) for rows in ([20], [1] * 20)]

    assert sizes[1] < sizes[0] * 1.2


@pytest.mark.parametrize("lz4", [False, True])
@pytest.mark.parametrize("width", [4, 384])
def test_a_stream_is_the_same_behind_a_head_of_its_size_and_in_a_measured_buffer(width: int, lz4: bool) -> None:
    vectors = np.random.default_rng(0).standard_normal((500, width), np.float32)
    words = pa.array(["a", "b"] * 250).dictionary_encode()  # batches of dictionaries count too
    keys = Keys([pa.field("key", words.type)], [[words[:200]], [words[200:]]])
    columns = [vector_column("v", vectors, None), error_column(500, {7: InvalidInput("no")})]

    def head(size: int) -> bytes:
        return f"{size} bytes:".encode()

    stream = bytes(write_table(columns, [200, 300], keys, lz4))
    assert bytes(write_table(columns, [200, 300], keys, lz4, head)) == head(len(stream)) + stream
    read = pa.ipc.open_stream(stream).read_all()
    read.validate(full=True)
    assert read["key"].to_pylist() == ["a", "b"] * 250
    np.testing.assert_array_equal(np.stack(read["v"].to_numpy()), vectors)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_a_large_stream_lies_in_huge_pages() -> None:
    vectors, before = np.zeros((25_000, 384), np.float32), pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # as in a worker
    try:
        stream = write_table([vector_column("embeddings", vectors, None)], [len(vectors)])
    finally:
        pa.set_memory_pool(before)

    middle = np.frombuffer(stream, np.uint8).ctypes.data + len(stream) // 2
    assert "hg" in _flags_at(middle)


def _flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that an address is in."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_there = begin <= address < end
        elif is_there and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has it")
