"""FrameProtocol over real sockets: whatever way the bytes are cut, the frames come out whole."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.credentials import Authority, needs_openssl
from tests.support.measures import watch_turns
from tests.support.polling import eventually, on_uvloop

from teimgr.errors import Code, TeimgrError, error_from_code
from teimgr.http.tls import TlsTransport
from teimgr.wire.frames import (
    HEADER,
    MAX_HEAD_BYTES,
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    HttpReply,
    HttpRequest,
    Method,
    Received,
    Timings,
    pack_header,
    read_reply,
    read_request,
    reply_head,
    request_head,
    split_timings,
    unpack_error,
)

LIMIT = 4 * 1024 * 1024


@dataclass
class End(FrameProtocol):
    """One end that keeps what it gets."""

    frames: asyncio.Queue[tuple[Header, Received]] = field(default_factory=asyncio.Queue)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__(LIMIT)

    def frame_received(self, header: Header, payload: Received) -> None:
        self.frames.put_nowait((header, payload))

    def link_lost(self, error: Exception | None) -> None:
        self.lost.set()

    async def payloads(self, count: int) -> list[Received]:
        return [(await self.frames.get())[1] for _ in range(count)]


@dataclass
class Pair:
    """An end under test and the raw socket on the other side."""

    end: End
    peer: socket.socket

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.peer, data)

    async def read(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        got = b""
        while len(got) < count:
            got += await loop.sock_recv(self.peer, count - len(got))
        return got


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, end = await asyncio.get_running_loop().create_unix_connection(End, sock=ours)
    yield Pair(end, theirs)
    theirs.close()
    end.close()
    await end.lost.wait()


def frame(payload: bytes, id: int = 1) -> bytes:
    return pack_header(len(payload), FrameType.REQUEST, Method.EMBED, id) + payload


async def test_a_frame_cut_at_every_byte_arrives_whole(pair: Pair) -> None:
    data = frame(b"hello", 7)

    for cut in range(1, len(data)):
        await pair.write(data[:cut])
        await asyncio.sleep(0)
        await pair.write(data[cut:])
        header, payload = await pair.end.frames.get()

        assert (header.id, header.method, payload) == (7, Method.EMBED, b"hello")


async def test_many_frames_in_one_write_arrive_in_order(pair: Pair) -> None:
    sent = [bytes([number % 256]) * (number % 300) for number in range(2_000)]

    await pair.write(b"".join(frame(payload) for payload in sent))

    assert await pair.end.payloads(len(sent)) == sent


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 262_120, 262_144, 3_000_000])
async def test_payloads_around_the_buffer_sizes_arrive_between_small_neighbours(pair: Pair, size: int) -> None:
    large = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    await pair.write(frame(b"before") + frame(large) + frame(b"after") + frame(large) + frame(b"end"))

    assert await pair.end.payloads(5) == [b"before", large, b"after", large, b"end"]


async def test_a_large_payload_is_in_memory_once(pair: Pair) -> None:
    """No copy of it is made, which would hold the loop for a millisecond per MB."""
    context, size = b"context", 3_000_000
    head = pack_header(len(context) + size, FrameType.REQUEST, Method.EMBED, 7, 0, 0, len(context)) + context
    data = head + bytes(size)
    for cut in (HEADER.size, HEADER.size + 3, len(head)):
        tracemalloc.start()
        await pair.write(data[:cut])
        await asyncio.sleep(0)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await pair.write(memoryview(data)[cut:])
        header, payload = await pair.end.frames.get()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert (header.context, len(payload), bytes(payload)) == (context, size, bytes(size))
        assert most - before < 1.2 * size


async def test_the_timings_of_a_large_reply_are_split_off_without_a_copy() -> None:
    timings, payload = Timings(1, 2, 3, 4, 5, 6), bytearray(3_000_000)
    found, rest = split_timings(timings.pack() + payload)
    assert (found, len(rest)) == (timings, len(payload))
    assert isinstance(rest, memoryview)


async def test_a_payload_is_sent_in_two_parts(pair: Pair) -> None:
    pair.end.send(FrameType.REPLY, Method.HTTP, 3, memoryview(b"body"), before=b"head ", context=b"x")

    data = await pair.read(HEADER.size + 10)
    assert data == pack_header(10, FrameType.REPLY, Method.HTTP, 3, 0, 0, 1) + b"xhead body"


async def test_frames_of_one_tick_leave_in_one_write(pair: Pair) -> None:
    writes: list[int] = []
    transport = pair.end._transport
    assert transport is not None
    original = transport.writelines
    transport.writelines = lambda parts: (writes.append(len(list(parts))), original(parts))[1]  # type: ignore[method-assign]

    for number in range(3):
        pair.end.send(FrameType.REPLY, Method.EMBED, number, b"abc", flags=Flag.TIMINGS, deadline_ms=5)
    data = await pair.read(3 * (HEADER.size + 3))

    assert writes == [6]
    assert data == b"".join(
        pack_header(3, FrameType.REPLY, Method.EMBED, number, Flag.TIMINGS, 5) + b"abc" for number in range(3)
    )


async def test_frames_that_may_linger_leave_together_and_with_the_next_that_may_not(pair: Pair) -> None:
    frame_bytes = HEADER.size + 1

    pair.end.send(FrameType.REQUEST, Method.EMBED, 1, b"a", linger=True)
    await asyncio.sleep(0)
    pair.end.send(FrameType.REQUEST, Method.EMBED, 2, b"b", linger=True)
    assert pair.end.unsent_bytes == 2 * frame_bytes
    pair.end.send(FrameType.REQUEST, Method.EMBED, 3, b"c")
    assert await pair.read(3 * frame_bytes) == b"".join(
        pack_header(1, FrameType.REQUEST, Method.EMBED, id) + letter for id, letter in ((1, b"a"), (2, b"b"), (3, b"c"))
    )

    pair.end.send(FrameType.REQUEST, Method.EMBED, 4, b"d", linger=True)
    assert (await pair.read(frame_bytes)).endswith(b"d")


@pytest.mark.parametrize("linger", [False, True])
async def test_many_frames_of_one_tick_do_not_wait_for_its_end(pair: Pair, linger: bool) -> None:
    for id in range(100):
        pair.end.send(FrameType.REQUEST, Method.EMBED, id, b"x", linger=linger)
        assert pair.end.unsent_bytes < 16 * (HEADER.size + 1)

    data = await pair.read(100 * (HEADER.size + 1))
    assert data == b"".join(pack_header(1, FrameType.REQUEST, Method.EMBED, id) + b"x" for id in range(100))


async def test_views_and_bytearrays_are_sent_as_they_are(pair: Pair) -> None:
    pair.end.send(FrameType.REPLY, Method.EMBED, 1, memoryview(b"abcdef")[2:4])
    pair.end.send(FrameType.REPLY, Method.EMBED, 1, bytearray(b"xy"))

    data = await pair.read(2 * (HEADER.size + 2))

    assert data[HEADER.size : HEADER.size + 2] == b"cd"
    assert data.endswith(b"xy")


async def test_a_frame_over_the_limit_breaks_the_link_before_it_is_read(pair: Pair) -> None:
    await pair.write(frame(b"fine") + pack_header(LIMIT + 1, FrameType.REQUEST, Method.EMBED, 2))

    await pair.end.lost.wait()

    assert await pair.end.payloads(1) == [b"fine"]
    assert not pair.end.is_open


async def test_a_peer_that_closes_is_noticed_and_sending_then_is_harmless(pair: Pair) -> None:
    pair.peer.close()

    await pair.end.lost.wait()
    pair.end.send(FrameType.REQUEST, Method.EMBED, 1, b"late")

    assert pair.end.unsent_bytes == 0


async def test_unsent_bytes_tell_what_the_peer_has_not_taken(pair: Pair) -> None:
    size = 3_000_000

    pair.end.send(FrameType.REPLY, Method.EMBED, 1, b"x" * size)

    assert pair.end.unsent_bytes == size + HEADER.size
    await pair.read(size + HEADER.size)


async def test_close_sends_what_is_queued_first(pair: Pair) -> None:
    pair.end.send(FrameType.REPLY, Method.EMBED, 1, b"last words")
    pair.end.close()

    assert (await pair.read(HEADER.size + 10)).endswith(b"last words")


@needs_openssl
@on_uvloop
async def test_a_large_frame_over_tls_holds_neither_loop_for_long(tmp_path: Path) -> None:
    """What uvloop encrypts for a client in one call: 40 MiB take 50 to 115 ms."""

    @dataclass
    class LargeEnd(End):
        def __post_init__(self) -> None:
            FrameProtocol.__init__(self, 64 * 2**20)

    authority = Authority(tmp_path / "authority")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("server"))
    loop, ends, held = asyncio.get_running_loop(), list[LargeEnd](), [0.0]

    def accepted() -> LargeEnd:
        ends.append(LargeEnd())
        return ends[-1]

    listener = await loop.create_server(lambda: TlsTransport(context, accepted), "127.0.0.1", 0)
    trust = ssl.create_default_context(cafile=authority.ca)
    port = listener.sockets[0].getsockname()[1]
    _, end = await loop.create_connection(LargeEnd, "127.0.0.1", port, ssl=trust, server_hostname="localhost")
    large = bytes(range(256)) * (40 * 2**12)
    await eventually(lambda: bool(ends))
    watching = asyncio.create_task(watch_turns(held))
    for sender, receiver in ((end, ends[0]), (ends[0], end)):
        sender.send(FrameType.REQUEST, Method.EMBED, 1, large)
        sender.send(FrameType.REQUEST, Method.EMBED, 2, b"small")
        assert [len(payload) for payload in await receiver.payloads(2)] == [len(large), 5]
    watching.cancel()
    end.send(FrameType.REQUEST, Method.EMBED, 3, large)
    end.close()
    assert not end.is_open
    end.send(FrameType.REQUEST, Method.EMBED, 4, b"never")
    assert await ends[0].payloads(1) == [large]
    await ends[0].lost.wait()
    assert ends[0].frames.empty()
    listener.close()
    await end.lost.wait()
    assert max(held) < 0.03


def test_timings_survive_the_frame() -> None:
    timings = Timings(1, 2, 3, 4, 5, 6)

    assert split_timings(timings.pack() + b"rest") == (timings, b"rest")


def test_an_unknown_code_of_a_newer_peer_is_internal() -> None:
    assert error_from_code(250, "new").code is Code.INTERNAL_ERROR
    assert isinstance(unpack_error(b""), TeimgrError)


# Payloads of Method.HTTP

TEXT = st.text(max_size=20)


@given(TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=3), st.binary(max_size=50))
def test_what_is_packed_is_read_again(path: str, query: str, headers: dict[str, str], body: bytes) -> None:
    request = HttpRequest("openai", "POST", path, query, headers, body)
    read = read_request(request_head(request) + body)
    assert read._replace(body=bytes(read.body)) == request
    reply = HttpReply(200, headers, body)
    told = read_reply(reply_head(reply) + body)
    assert told._replace(body=bytes(told.body)) == reply


@given(st.binary(max_size=80))
def test_nonsense_is_a_value_error(payload: bytes) -> None:
    for read in (read_request, read_reply):
        with pytest.raises(ValueError):  # noqa: PT011  which sentence depends on the bytes
            read(payload)


def test_a_head_is_bounded() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        request_head(HttpRequest("openai", "POST", "/" * MAX_HEAD_BYTES))
    with pytest.raises(ValueError, match="in a payload of"):
        read_request((MAX_HEAD_BYTES + 1).to_bytes(4, "little") + b" " * 2 * MAX_HEAD_BYTES)
