"""Bytes of a stream: exact reads, HTTP/2's flow control, and the three ways to end."""

import asyncio

import pytest

from teimgr.errors import InvalidInput, Unavailable
from teimgr.worker.grpc_port.exchange import ReceiveBuffer


async def test_reads_do_not_care_how_the_bytes_came() -> None:
    inbox = ReceiveBuffer(lambda size: None)
    for part in (b"ab", b"", b"cdef"):
        inbox.add(part, len(part))
    inbox.eof()

    assert [await inbox.read(3), await inbox.read(2), await inbox.read(1), await inbox.read(5)] == [
        b"abc",
        b"de",
        b"f",
        b"",
    ]


async def test_the_client_may_send_more_only_when_somebody_waits() -> None:
    allowed: list[int] = []
    inbox = ReceiveBuffer(allowed.append)
    inbox.add(b"x" * 100, 110)
    await inbox.read(60)
    assert sum(allowed) == 0

    reading = asyncio.create_task(inbox.read(60))
    await asyncio.sleep(0)
    assert sum(allowed) == 110
    inbox.add(b"x" * 20, 20)

    assert len(await reading) == 60
    assert inbox.unacked_size() == 20
    assert inbox.unacked_size() == 0


async def test_an_end_inside_a_message_is_invalid() -> None:
    inbox = ReceiveBuffer(lambda size: None)
    inbox.add(b"abc", 3)
    inbox.eof()

    with pytest.raises(InvalidInput, match="ends inside"):
        await inbox.read(4)


async def test_what_was_sent_before_a_failure_is_still_read() -> None:
    inbox = ReceiveBuffer(lambda size: None)
    inbox.add(b"abc", 3)
    inbox.fail(Unavailable("stopping"))

    assert await inbox.read(3) == b"abc"
    with pytest.raises(Unavailable, match="stopping"):
        await inbox.read(1)
