"""Messages of one JSON object each: lines, and objects behind their length."""

from __future__ import annotations

import asyncio

import pytest

from teimgr.wire.json_messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, line, pack, read_line, unpack, unpack_length


def stream(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=64)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_lines_are_read_until_the_end_of_the_stream_which_may_come_within_one() -> None:
    reader = stream(line({"op": "a"}) + line({"text": "é\n"}) + b'{"op": "half')

    assert await read_line(reader) == {"op": "a"}
    assert await read_line(reader) == {"text": "é\n"}
    assert await read_line(reader) is None


@pytest.mark.parametrize("data", [b"[1]\n", b"\xff{]\n", b"\n", b"x" * 100 + b"\n"])
async def test_a_line_that_is_no_object_or_too_long_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        await read_line(stream(data))


def test_a_message_behind_its_length_has_a_bound() -> None:
    message = pack({"op": "logs"})

    assert unpack_length(message[:LENGTH_BYTES]) == len(message) - LENGTH_BYTES
    assert unpack(message[LENGTH_BYTES:]) == {"op": "logs"}
    with pytest.raises(ValueError, match="a message of"):
        unpack_length((MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES))
