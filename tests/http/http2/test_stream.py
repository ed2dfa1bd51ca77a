"""Bytes of a stream: exact reads, HTTP/2's flow control, and the three ways to end."""

from __future__ import annotations

import asyncio

import pytest

from teimgr.errors import Unavailable
from teimgr.http.http2.stream import ReceiveBuffer


async def test_reads_do_not_care_how_the_bytes_came() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    for part in (b"ab", b"", b"cdef"):
        buffer.add(part)
    buffer.end()

    assert [await buffer.read(3), await buffer.read(2), await buffer.read(1), await buffer.read(5)] == [
        b"abc",
        b"de",
        b"f",
        b"",
    ]


async def test_the_client_may_send_more_only_when_a_reader_waits() -> None:
    allowed: list[int] = []
    buffer = ReceiveBuffer(allowed.append)
    buffer.add(b"x" * 100)
    await buffer.read(60)
    assert sum(allowed) == 0

    reading = asyncio.create_task(buffer.read(60))
    await asyncio.sleep(0)
    assert sum(allowed) == 100
    buffer.add(b"x" * 20)

    assert len(await reading) == 60
    assert buffer.unacknowledged() == 20
    assert buffer.unacknowledged() == 0


async def test_what_was_sent_before_a_failure_is_still_read() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    buffer.add(b"abc")
    buffer.fail(Unavailable("stopping"))

    assert await buffer.read(3) == b"abc"
    with pytest.raises(Unavailable, match="stopping"):
        await buffer.read(1)


async def test_at_the_end_what_is_left_is_read_and_then_nothing() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    buffer.add(b"abc")
    buffer.end()

    assert [await buffer.read(4), await buffer.read(4), await buffer.read_some()] == [b"abc", b"", b""]
