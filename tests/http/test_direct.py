"""Requests that are answered without ASGI: what clients get, and what happens when they leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from teimgr.http.byte_budget import ByteBudget
from teimgr.http.direct import PART_BYTES, Answer, DirectReply, DirectRequest
from teimgr.http.http1 import HttpProtocol
from teimgr.http.server import Listener, bind, serving
from tests.support.polling import eventually

WAIT_S = 30.0
HUGE = 2**25  # more than the buffers of a connection hold
BUFFERED = 2**20  # more than a connection's transport holds


@dataclass
class Echo:
    """Answers /echo with its body, and counts who was cancelled; other targets are left to ASGI."""

    seen: list[DirectRequest] = field(default_factory=list)
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(HUGE))
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, method: bytes, target: bytes) -> Answer | None:
        if target == b"/refuse":
            return self.refuse
        return self.answer if target == b"/echo" else None

    async def refuse(self, request: DirectRequest) -> DirectReply:
        return DirectReply(401, {}, b"no")

    async def answer(self, request: DirectRequest) -> DirectReply:
        self.seen.append(request)
        body = bytearray()
        self.begun.set()
        try:
            while part := await request.body.read_some():
                body += part
            if body == b"hang":
                await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            self.left.set()
            raise
        if body == b"raise":
            raise RuntimeError("a defect")
        if body == b"split":
            return DirectReply(200, {"x-a": "b\r\nx-c: d"}, b"")
        if body == b"huge":
            return DirectReply(200, {}, b"x" * HUGE, self.budget)
        if body == b"large":
            return DirectReply(200, {}, b"x" * (2 * PART_BYTES + 1))
        return DirectReply(200, {"content-type": "text/plain"}, body)


async def application(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (5 + len(body)))]}
    )
    await send({"type": "http.response.body", "body": b"asgi " + body})


class Reads:
    """Counts the bytes that clients sent, and that the server has processed, while the block runs."""

    def __init__(self) -> None:
        self.sent = 0
        self._count = 0
        self._changed = asyncio.Condition()

    async def reach(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= count)

    @contextmanager
    def counted(self) -> Iterator[None]:
        process = HttpProtocol.data_received

        def counting(protocol: HttpProtocol, data: bytes) -> None:
            process(protocol, data)
            self._count += len(data)
            self._tasks = asyncio.ensure_future(self._notify())

        with patch.object(HttpProtocol, "data_received", counting):
            yield

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Connection:
    """A client's connection, which sends bytes as they are given."""

    def __init__(self, reads: Reads, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._reads = reads

    async def send(self, *parts: bytes) -> None:
        """Send the parts one by one; the server has read one before the next comes."""
        for part in parts:
            self._reads.sent += len(part)
            self.writer.write(part)
            await self._reads.reach(self._reads.sent)

    async def response(self) -> tuple[bytes, bytes]:
        """Head and body of the next response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return head, await self.reader.readexactly(length)


@dataclass
class Served:
    """A server with `Echo` before `application`, and a connection to it."""

    echo: Echo
    connection: Connection
    listener: Listener
    address: tuple[str, int]

    async def another(self) -> Connection:
        """One more connection to it, which reads nothing by itself."""
        reader, writer = await asyncio.open_connection(*self.address, limit=2**16)
        return Connection(self.connection._reads, reader, writer)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    echo, sock, reads = Echo(), bind("127.0.0.1", 0), Reads()
    async with asyncio.timeout(WAIT_S), serving(application, sock, direct=echo) as listener:
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        with reads.counted():
            yield Served(echo, Connection(reads, reader, writer), listener, sock.getsockname())
        writer.close()


def post(body: bytes, target: bytes = b"/echo", more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: a\r\n%scontent-length: %d\r\n\r\n%s" % (target, more, len(body), body)


async def test_a_request_is_answered_with_date_length_and_the_headers_of_the_answer() -> None:
    async with served() as there:
        await there.connection.send(post(b"hello", more=b"X-Key: first\r\nx-key: second\r\n"))
        head, body = await there.connection.response()

    assert body == b"hello"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert {line.partition(b":")[0] for line in lines[1:] if line} == {b"date", b"content-type", b"content-length"}
    assert there.echo.seen[0].headers[b"x-key"] == b"first"


@pytest.mark.parametrize(
    "parts",
    [
        (post(b"hello")[:-5], b"hello"),
        (post(b"hello")[:-3], b"l", b"lo"),
        (b"POST /echo HTTP/1.1\r\n", post(b"hello").partition(b"\r\n")[2]),
        (b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",),
    ],
)
async def test_a_body_may_come_in_parts(parts: tuple[bytes, ...]) -> None:
    async with served() as there:
        for _ in range(2):
            await there.connection.send(*parts)
            assert (await there.connection.response())[1] == b"hello"
    assert len(there.echo.seen) == 2


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"hello", b"/other"),
        post(b"x" * 2**20),
        b"PUT" + post(b"hello")[4:],
        post(b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(b"hello", more=b"connection: upgrade\r\nupgrade: h2c\r\n"),
    ],
)
async def test_only_the_target_decides_what_is_left_to_asgi(request_bytes: bytes) -> None:
    async with served() as there:
        await there.connection.send(request_bytes)
        (_, body), sent = await there.connection.response(), request_bytes.partition(b"\r\n\r\n")[2]
    is_asgis = b"/other" in request_bytes
    assert body == (b"asgi " + sent if is_asgis else sent)
    assert len(there.echo.seen) == (not is_asgis)


async def test_a_client_that_awaits_100_continue_gets_it_once_its_body_is_wanted() -> None:
    async with served() as there:
        whole = post(b"hello", more=b"expect: 100-continue\r\n")
        await there.connection.send(whole[:-5])
        assert await there.connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await there.connection.send(b"hello")
        assert (await there.connection.response())[1] == b"hello"
        await there.connection.send(whole.replace(b"/echo", b"/refuse")[:-5])
        assert (await there.connection.response())[0].startswith(b"HTTP/1.1 401")


async def test_what_follows_an_early_answer_is_discarded_and_the_connection_kept() -> None:
    async with served() as there:
        whole = post(b"x" * 2**17, b"/refuse")
        await there.connection.send(whole[: 2**16])
        assert (await there.connection.response())[0].startswith(b"HTTP/1.1 401")
        await there.connection.send(whole[2**16 :], post(b"hello"))
        assert (await there.connection.response())[1] == b"hello"


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with served() as there:
        await there.connection.send(post(b"one") + post(b"two") + post(b"three", b"/other"))
        bodies = [(await there.connection.response())[1] for _ in range(3)]
    assert [body.removeprefix(b"asgi ") for body in bodies] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("sent", [post(b"hang"), post(b"hello")[:-3], post(b"x" * 2**20)[: 2**19]])
async def test_the_answering_of_a_client_that_left_is_cancelled(sent: bytes) -> None:
    async with served() as there:
        await there.connection.send(sent)
        await there.echo.begun.wait()
        there.connection.writer.close()
        await there.echo.left.wait()


async def test_a_defect_and_a_split_header_are_500_and_end_the_connection() -> None:
    async with served() as there:
        await there.connection.send(post(b"raise"))
        head, body = await there.connection.response()
        assert (head.split()[1], b"connection: close" in head, body) == (b"500", True, b"Internal Server Error")
        assert await there.connection.reader.read() == b""
    async with served() as there:
        await there.connection.send(post(b"split"))
        assert await there.connection.reader.read() == b""


async def test_a_long_response_is_whole() -> None:
    async with served() as there:
        await there.connection.send(post(b"large"))
        assert len((await there.connection.response())[1]) == 2 * PART_BYTES + 1


async def test_a_long_response_is_charged_to_its_budget_until_its_client_has_read_it_or_left() -> None:
    async with served() as there:
        budget = there.echo.budget
        first, second = await there.another(), await there.another()
        await first.send(post(b"huge"))
        await second.send(post(b"huge"))  # whether or not it fits
        await eventually(lambda: budget.taken_bytes == 2 * (HUGE - PART_BYTES))
        assert len((await first.response())[1]) == HUGE
        await eventually(lambda: budget.taken_bytes == HUGE - PART_BYTES)
        second.writer.transport.abort()
        await eventually(lambda: budget.taken_bytes == 0)
        first.writer.close()


async def test_connection_close_is_obeyed_and_sent_by_a_server_that_leaves() -> None:
    async with served() as there:
        await there.connection.send(post(b"hello", more=b"connection: close\r\n"))
        head, _ = await there.connection.response()
        assert b"connection: close" in head
        assert await there.connection.reader.read() == b""
    async with served() as there:
        await there.connection.send(post(b"hello"))
        await there.connection.response()
        there.listener.leave()
        await there.connection.send(post(b"hello"))
        assert (await there.connection.response())[0].count(b"connection: close") == 1
        assert await there.connection.reader.read() == b""


async def test_a_server_that_ends_answers_a_request_whose_body_is_on_its_way() -> None:
    whole = post(b"hello")
    async with served() as there:
        await there.connection.send(whole[:-3])
        for each in tuple(there.listener._server.server_state.connections):
            each.shutdown()
        await there.connection.send(whole[-3:])
        assert (await there.connection.response())[1] == b"hello"
