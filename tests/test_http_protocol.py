"""The protocol of the HTTP server over real connections: HTTP/2 detection, upgrades, limits, request bodies."""

from __future__ import annotations

import asyncio
import random
import socket
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from teimgr import http_protocol
from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import Overloaded
from teimgr.http_protocol import HeldResponse, SlowClient, read_body
from teimgr.http_server import bind, serving
from tests.support.http_connections import Echo, answered, connected, hello
from tests.support.polling import eventually


async def test_an_offer_of_h2c_is_not_heard_and_the_body_arrives() -> None:
    """Java's HttpClient makes this offer with every request on plain HTTP."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append((await receive())["body"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with serving(app, sock), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        writer.write(head + b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Length: 2\r\n\r\n{}")
        status = await reader.readline()
        writer.close()

    assert status.startswith(b"HTTP/1.1 204")
    assert seen == [b"{}"]


SMUGGLED = b"POST /smuggled HTTP/1.1\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: %s\r\n"
LENGTH, CHUNKED = b"Content-Length: %d\r\n\r\n%s", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"


def requests(rng: random.Random, count: int) -> tuple[list[tuple[str, bytes]], bytes]:
    """Path and body of pipelined requests, and their bytes: offers of an upgrade, bodies that look like requests."""
    expected, sent = [], []
    for number in range(count):
        body = rng.choice([b"", b"{}", SMUGGLED, SMUGGLED * 3, b"\r\nupgrade: h2c\r\n\r\n"])
        offer = rng.choice([b"", UPGRADE % b"h2c", UPGRADE % b"websocket", UPGRADE % b"x, h2c", b"upgrade: h2c\r\n"])
        framed = rng.choice([LENGTH, CHUNKED]) % (len(body), body) if body else rng.choice([b"\r\n", LENGTH % (0, b"")])
        expected.append((f"/{number}", body))
        sent.append(b"POST /%d HTTP/1.1\r\nHost: x\r\n%s%s" % (number, offer, framed))
    sent.append(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return [*expected, ("/last", b"")], b"".join(sent)


@pytest.mark.parametrize("seed", range(20))
async def test_no_body_is_taken_for_a_request_or_edited_whatever_upgrade_its_head_offers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request smuggling: behind a proxy, bytes of one client's body would become the next client's request."""
    seen: list[tuple[str, bytes]] = []
    arrived = asyncio.Queue[int]()
    received = http_protocol.HttpProtocol.data_received

    def counted(self: http_protocol.HttpProtocol, data: bytes) -> None:
        received(self, data)
        arrived.put_nowait(len(data))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message["more_body"]
            seen.append((scope["path"], body))
            await hello(scope, receive, send)

    monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", counted)
    rng = random.Random(seed)
    expected, data = requests(rng, 12)
    borders = sorted(rng.sample(range(1, len(data)), rng.choice([0, 5, 40])))
    sock = bind("127.0.0.1", 0)
    async with serving(app, sock), asyncio.timeout(20):
        reader, writer = await connected(sock)
        for start, end in pairwise([0, *borders, len(data)]):
            writer.write(data[start:end])
            left = end - start
            while left:
                left -= await arrived.get()
        answered = await reader.read()
        writer.close()

    assert seen == expected
    assert answered.count(b"HTTP/1.1 200") == len(expected)


async def test_connect_is_refused() -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")

        answered = await reader.read()

        assert answered.startswith(b"HTTP/1.1 400")
        assert answered.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("pieces", [[b"PRI * HTTP/2.0\r\n\r\n"], [b"P", b"RI *", b" HTTP/2.", b"0\r\n\r\n"]])
async def test_what_begins_as_http2_is_handed_over_with_every_byte(pieces: list[bytes]) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, Echo), asyncio.timeout(30):
        reader, writer = await connected(sock)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)

        assert await reader.readexactly(18) == b"PRI * HTTP/2.0\r\n\r\n"
        writer.write(b"more")
        assert await reader.readexactly(4) == b"more"

    assert await reader.read() == b""  # the end of the server is the end of the connection
    writer.close()


@pytest.mark.parametrize("first", [b"P", b"PR", b"PRI * HTTP/2", b"G"])
async def test_what_does_not_begin_as_http2_is_http(first: bytes) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, Echo), asyncio.timeout(30):
        reader, writer = await connected(sock)
        writer.write(first)
        await writer.drain()
        await asyncio.sleep(0.005)
        writer.write(b"X / HTTP/1.1\r\nhost: x\r\n\r\n" if first != b"G" else b"ET / HTTP/1.1\r\nhost: x\r\n\r\n")

        assert (await reader.readline()).startswith(b"HTTP/1.1 200" if first == b"G" else b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize("said", [b"", b"PRI *"])
async def test_a_connection_that_does_not_say_what_it_wants_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_FIRST_BYTES_S", 0.05)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, Echo), asyncio.timeout(30):
        reader, writer = await connected(sock)
        writer.write(said)

        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("h2", [None, lambda _: asyncio.Protocol()])
async def test_a_connection_too_many_is_closed_and_leaves_room_when_another_goes(
    h2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 2)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async with serving(hello, sock, h2), asyncio.timeout(30):
        inside = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in inside:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await answered(port) is False

        writer = inside[0][1]
        writer.close()
        await writer.wait_closed()
        while not await answered(port):
            pass
        inside[1][1].close()


@pytest.mark.parametrize("h2", [None, Echo])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n",
    ],
)
async def test_a_request_head_that_does_not_end_closes_the_connection(
    sent: bytes, h2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_FIRST_BYTES_S", 0.05)
    monkeypatch.setattr(http_protocol, "HEAD_LIMIT_S", 0.05, raising=False)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, h2), asyncio.timeout(3):
        reader, writer = await connected(sock)
        writer.write(sent)

        assert (await reader.read()).count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
        writer.close()


async def test_a_request_head_that_grows_without_end_is_refused() -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        head = b"GET / HTTP/1.1\r\nhost: x\r\nx: "
        # One byte too many: bytes that the server has not read as it closes would reset the connection.
        writer.write(head + b"y" * (http_protocol._MAX_HEAD_BYTES + 1 - len(head)))

        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_head_behind_a_slow_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_LIMIT_S", 0.02)
    late, release = asyncio.Semaphore(0), asyncio.Event()
    is_late = http_protocol.HttpProtocol._on_head_late

    def noted(protocol: http_protocol.HttpProtocol) -> None:
        is_late(protocol)
        late.release()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await release.wait()
        await hello(scope, receive, send)

    monkeypatch.setattr(http_protocol.HttpProtocol, "_on_head_late", noted)
    sock = bind("127.0.0.1", 0)
    async with serving(slow, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n")
        for _ in range(3):
            await late.acquire()
        writer.write(b"host: x\r\nconnection: close\r\n\r\n")
        await writer.drain()
        release.set()

        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()


class Body:
    """An endpoint that answers with `size` bytes."""

    def __init__(self, size: int, budget: ByteBudget) -> None:
        self._size, self._budget = size, budget

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await HeldResponse(bytes(self._size), 200, {}, self._budget)(scope, receive, send)


async def asked(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a small receive buffer, on which GET was sent and nothing is read."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, sock.getsockname())
    reader, writer = await asyncio.open_connection(sock=own, limit=4096)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return reader, writer


async def test_a_client_that_does_not_read_is_cut_off_and_its_reply_charged_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    budget = ByteBudget(1)
    sock = bind("127.0.0.1", 0)
    async with serving(Body(50 * 2**20, budget), sock):
        reader, writer = await asked(sock)
        await eventually(lambda: budget.taken_bytes == 50 * 2**20)

        await eventually(lambda: budget.taken_bytes == 0)

        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(50 * 2**20)
        writer.close()


async def test_a_client_that_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.3)
    monkeypatch.setattr(http_protocol, "LEAST_READ_BYTES", 1)
    size = 8 * 2**20
    sock = bind("127.0.0.1", 0)
    async with serving(Body(size, ByteBudget(1)), sock), asyncio.timeout(30):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < size:
            received += len(await reader.read(size // 64))
            await asyncio.sleep(0.01)
        writer.close()

    assert received == size


def upload(budget: ByteBudget, limit: int) -> Any:
    """An application that reads a body and answers with its length, or with what went wrong."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        charge = Charge(budget)
        try:
            body = await read_body(Request(scope, receive), limit, charge)
            text = "too large" if body is None else str(len(body))
        except (SlowClient, Overloaded) as error:
            text = type(error).__name__
        finally:
            charge.release()
        await Response(text)(scope, receive, send)

    return app


UPLOAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_body_without_a_length_is_charged_as_it_comes() -> None:
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(upload(budget, 900), sock), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(UPLOAD + b"64\r\n" + b"x" * 100 + b"\r\n")
        await eventually(lambda: budget.taken_bytes == 100)
        writer.write(b"0\r\n\r\n")

        assert (await reader.read()).endswith(b"100")
        assert budget.taken_bytes == 0
        writer.close()


async def test_a_body_that_finds_no_room_is_refused_and_one_that_does_not_come_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "_BUDGET_WAIT_S", 0.1)
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.3)
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(upload(budget, 900), sock), asyncio.timeout(20):
        slow, slow_writer = await asyncio.open_connection(*sock.getsockname())
        slow_writer.write(UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 800") + b"x")
        await eventually(lambda: budget.taken_bytes == 800)
        other, other_writer = await asyncio.open_connection(*sock.getsockname())
        other_writer.write(UPLOAD + b"190\r\n" + b"x" * 400 + b"\r\n0\r\n\r\n")

        assert (await other.read()).endswith(b"Overloaded")
        assert (await slow.read()).endswith(b"SlowClient")
        assert budget.taken_bytes == 0
        slow_writer.close()
        other_writer.close()
