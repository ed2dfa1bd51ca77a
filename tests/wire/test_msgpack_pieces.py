"""msgpack in pieces gives the values and refusals of one call of the library."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.support.measures import held_s

from teimgr.errors import InvalidInput
from teimgr.wire import msgpack_pieces
from teimgr.wire.json_scan import MAX_CONTAINERS, MAX_TEXT_BYTES, MAX_VALUES
from teimgr.wire.msgpack_pieces import MAX_BINARY_BYTES

VALUES: tuple[Any, ...] = (
    {"items": [{"text": "ä" * 300_000, "id": "x"}, {"text": b"\x00" * 70_000}], 7: [1.5, None, True, -(2**40)]},
    ["text"] * 50_000,
    {"a": {"b": [[], {}, [[1]]]}},
    {"at": msgpack.Timestamp(1, 2), "ext": msgpack.ExtType(5, b"x" * 70_000)},
    "",
)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("piece", [1, 7, 64 * 1024])
def test_pieces_give_the_value_of_one_call(value: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgpack.packb(value)
    if piece < 100 and len(body) > 1000:
        piece *= 997
    monkeypatch.setattr(msgpack_pieces, "_PIECE_BYTES", piece)
    expected = msgpack.unpackb(body, raw=False, strict_map_key=False)
    assert msgpack_pieces.loads(memoryview(body)) == expected
    assert msgpack_pieces.loads_small(memoryview(body)) == expected


@pytest.mark.parametrize("body", [b"", b"\x92\x01", b"\x01\x01", b"\xc1", b"\xa1\xff", b"\x91" * 5000])
def test_what_is_no_msgpack_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"incomplete|extra data|Format|codec|too nested|^$"):
        msgpack_pieces.loads(body)


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ([[[0]] * (MAX_CONTAINERS // 2), [[0]] * (MAX_CONTAINERS // 2)], f"more than {MAX_CONTAINERS} lists"),
        ([[0] * (MAX_VALUES // 2), [0] * (MAX_VALUES // 2)], f"more than {MAX_VALUES} values"),
        (dict.fromkeys(range(MAX_CONTAINERS + 1), 0), f"more than {MAX_CONTAINERS} members"),
        (
            {"items": [{}, {"text": "a" * (MAX_TEXT_BYTES + 2 * 2**16)}]},
            f"a text of more than {MAX_TEXT_BYTES} bytes in `items.1.text`: in base64 a file may have 6 MiB",
        ),
        (
            {"items": [{"images": [{"data": bytes(MAX_BINARY_BYTES + 2 * 2**16)}]}]},
            f"bytes of more than {MAX_BINARY_BYTES} in `items.0.images.0.data`",
        ),
    ],
    ids=["lists", "values", "members", "text", "bytes"],
)
def test_what_takes_long_to_free_or_to_join_is_refused(value: Any, refusal: str) -> None:
    with pytest.raises(InvalidInput, match=refusal):
        msgpack_pieces.loads(msgpack.packb(value))


def test_the_bytes_of_a_file_may_be_longer_than_a_text() -> None:
    value = {"data": bytes(MAX_BINARY_BYTES)}
    assert msgpack_pieces.loads(msgpack.packb(value)) == value


@pytest.mark.parametrize("loads", [msgpack_pieces.loads, msgpack_pieces.loads_small])
@pytest.mark.parametrize("head", [b"\xdd\x00\x01\x00\x00", b"\xdc\xff\xff", b"\xdf\x00\x00\x80\x00"])
def test_lists_that_announce_more_than_follows_allocate_nothing(loads: Any, head: bytes) -> None:
    body = b"\x81\xa5items" + head * 900 + bytes(60_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="incomplete"):
            loads(body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # 470 MB before
    finally:
        tracemalloc.stop()


def test_reading_many_items_lets_other_threads_run() -> None:
    body = msgpack.packb([{"text": f"rain {n}"} for n in range(MAX_CONTAINERS - 1)])
    whole = held_s(lambda: msgpack.unpackb(body), 3)
    assert held_s(lambda: msgpack_pieces.loads(body), 3) < max(0.06, whole)


ROWS = np.arange(40_000, dtype=np.float32).reshape(2, 20_000)


@pytest.mark.parametrize(
    "value",
    [
        {"model": "m", "items": [{"id": "a", "dense": {"dims": 3, "values": np.arange(3)}}] * 600, "usage": {"n": 1}},
        {"items": [{"values": ROWS}, {"values": ROWS[:, :1]}, {"values": ROWS.T}], "timing": None},
        {"items": [{"values": [1.5, "a", None, [ROWS[0], {"b": ROWS[:0]}]]}], "empty": [], "none": {}},
        [],
        ROWS.astype("<f2"),
        "text",
    ],
    ids=["small rows", "large rows", "nested", "no row", "array", "text"],
)
def test_what_is_written_in_pieces_is_what_one_call_writes(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_pieces, "_COPIED_BYTES", 1000)
    assert msgpack_pieces.dumps(value) == msgpack.packb(value, default=msgpack_pieces._array, use_bin_type=True)
