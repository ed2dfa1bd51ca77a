"""Bytes of a stream: exact reads, HTTP/2's flow control, and the three ways to end."""

import asyncio

import pytest

from teimgr.errors import InvalidInput, Unavailable
from teimgr.worker.grpc_port.rpc_stream import ReceiveBuffer


async def test_reads_do_not_care_how_the_bytes_came() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    for part in (b"ab", b"", b"cdef"):
        buffer.add(part, len(part))
    buffer.eof()

    assert [await buffer.read(3), await buffer.read(2), await buffer.read(1), await buffer.read(5)] == [
        b"abc",
        b"de",
        b"f",
        b"",
    ]


async def test_the_client_may_send_more_only_when_somebody_waits() -> None:
    allowed: list[int] = []
    buffer = ReceiveBuffer(allowed.append)
    buffer.add(b"x" * 100, 110)
    await buffer.read(60)
    assert sum(allowed) == 0

    reading = asyncio.create_task(buffer.read(60))
    await asyncio.sleep(0)
    assert sum(allowed) == 110
    buffer.add(b"x" * 20, 20)

    assert len(await reading) == 60
    assert buffer.unacked_size() == 20
    assert buffer.unacked_size() == 0


async def test_an_end_inside_a_message_is_invalid() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    buffer.add(b"abc", 3)
    buffer.eof()

    with pytest.raises(InvalidInput, match="ends inside"):
        await buffer.read(4)


async def test_what_was_sent_before_a_failure_is_still_read() -> None:
    buffer = ReceiveBuffer(lambda size: None)
    buffer.add(b"abc", 3)
    buffer.fail(Unavailable("stopping"))

    assert await buffer.read(3) == b"abc"
    with pytest.raises(Unavailable, match="stopping"):
        await buffer.read(1)
