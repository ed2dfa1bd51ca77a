"""msgpack in pieces gives the values and refusals of one call of the library."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from teimgr.errors import InvalidInput
from teimgr.wire import msgpack_pieces
from teimgr.wire.json_scan import MAX_CONTAINERS

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
    assert msgpack_pieces.loads(memoryview(body)) == msgpack.unpackb(body, raw=False, strict_map_key=False)


@pytest.mark.parametrize("body", [b"", b"\x92\x01", b"\x01\x01", b"\xc1", b"\xa1\xff", b"\x91" * 5000])
def test_what_is_no_msgpack_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"incomplete|extra data|Format|codec|too nested|^$"):
        msgpack_pieces.loads(body)


def test_lists_are_counted_and_announced_lengths_are_bounded() -> None:
    with pytest.raises(InvalidInput, match=f"more than {MAX_CONTAINERS} lists"):
        msgpack_pieces.loads(msgpack.packb([[[0]] * 60_000, [[0]] * 60_000]))
    for header in (b"\xdd", b"\xdf"):
        with pytest.raises(ValueError, match="exceeds max_"):
            msgpack_pieces.loads(header + (MAX_CONTAINERS + 1).to_bytes(4) + bytes(4_000_000))
