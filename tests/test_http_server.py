"""Listening, TLS, HTTP/2 detection and bounded request bodies of the HTTP server."""

from __future__ import annotations

import asyncio
import random
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from teimgr import http_server
from teimgr.byte_budget import ByteBudget
from teimgr.errors import InvalidConfig, PortConflict
from teimgr.http_messages import HeldResponse
from teimgr.http_server import bind, serving
from tests.support.polling import eventually


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def test_connections_are_taken_from_the_first_line_of_the_body() -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async with serving(hello, sock), asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_port_is_a_conflict() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(PortConflict):
        bind("127.0.0.1", stranger.getsockname()[1])


async def test_a_port_taken_after_it_was_bound_is_a_conflict_too() -> None:
    """Two sockets may be bound to one address while neither listens."""
    sock = bind("127.0.0.1", 0)
    with bind("127.0.0.1", sock.getsockname()[1]) as stranger:
        stranger.listen()
        with pytest.raises(PortConflict):
            async with serving(hello, sock):
                pytest.fail("the body must not run")

    assert sock.fileno() == -1


async def test_certificates_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    bad = str(tmp_path / "bad.pem")

    with pytest.raises(OSError, match=r"PEM|SSL"):
        async with serving(hello, bind("127.0.0.1", 0), ssl_certfile=bad, ssl_keyfile=bad):
            pytest.fail("the body must not run")


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
    received = http_server.HttpProtocol.data_received

    def counted(self: http_server.HttpProtocol, data: bytes) -> None:
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

    monkeypatch.setattr(http_server.HttpProtocol, "data_received", counted)
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


def test_an_address_that_is_not_ours_is_no_conflict() -> None:
    with pytest.raises(InvalidConfig, match=r"cannot listen on 192\.0\.2\.1:4"):
        bind("192.0.2.1", 4000)


class Echo(asyncio.Protocol):
    """Stands for HTTP/2: sends back whatever comes."""

    def __init__(self, books: Any) -> None:
        self._books = books

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._books.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._books.connections.discard(self)

    def shutdown(self) -> None:
        self._transport.close()


async def connected(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*sock.getsockname())


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
    monkeypatch.setattr(http_server, "_FIRST_BYTES_S", 0.05)
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
    monkeypatch.setattr(http_server, "max_connections", lambda: 2)
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
    monkeypatch.setattr(http_server, "_FIRST_BYTES_S", 0.05)
    monkeypatch.setattr(http_server, "HEAD_LIMIT_S", 0.05, raising=False)
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
        writer.write(head + b"y" * (http_server._MAX_HEAD_BYTES + 1 - len(head)))

        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_head_behind_a_slow_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_LIMIT_S", 0.02)
    late, release = asyncio.Semaphore(0), asyncio.Event()
    is_late = http_server.HttpProtocol._on_head_late

    def noted(protocol: http_server.HttpProtocol) -> None:
        is_late(protocol)
        late.release()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await release.wait()
        await hello(scope, receive, send)

    monkeypatch.setattr(http_server.HttpProtocol, "_on_head_late", noted)
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


async def answered(port: int) -> bool:
    """Whether a new connection gets an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return bool(await reader.read())
    except ConnectionError:
        return False
    finally:
        writer.close()


async def test_who_leaves_ends_connections_with_their_next_answer_and_others_take_the_new_ones() -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock.dup(), Echo) as stays, asyncio.timeout(30):
        async with serving(hello, sock.dup(), Echo) as leaves:
            kept = [await connected(sock) for _ in range(8)]
            while stays.connections + leaves.connections < len(kept):  # noqa: ASYNC110
                await asyncio.sleep(0)
            leaves.leave()
            for reader, writer in kept:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                if b"connection: close" in head:
                    assert await reader.read() == b""
            while leaves.connections:  # noqa: ASYNC110
                await asyncio.sleep(0)
            fresh = [await connected(sock) for _ in range(8)]
            for reader, writer in fresh:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
            assert leaves.connections == 0
        for _, writer in (*kept, *fresh):
            writer.close()
    sock.close()


async def test_who_leaves_passes_on_connections_without_a_request_and_the_others_end_with_theirs() -> None:
    release, waiting = asyncio.Event(), asyncio.Event()

    def app(name: bytes) -> http_server.AsgiApp:
        async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                if scope["path"] == "/slow":
                    waiting.set()
                    await release.wait()
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
                await send({"type": "http.response.body", "body": name})

        return answer

    async def ask(pair: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: bytes = b"/") -> tuple[bool, bytes]:
        """Whether the connection ends, and who answered."""
        reader, writer = pair
        writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
        head = await reader.readuntil(b"\r\n\r\n")
        return b"connection: close" in head, await reader.readexactly(1)

    sock, taken = bind("127.0.0.1", 0), set()
    async with serving(app(b"A"), sock.dup(), Echo) as leaves, asyncio.timeout(30):
        kept, silent, slow = [await connected(sock) for _ in range(20)], await connected(sock), await connected(sock)
        assert [await ask(each) for each in kept] == [(False, b"A")] * len(kept)
        answer = asyncio.create_task(ask(slow, b"/slow"))
        await waiting.wait()
        await eventually(lambda: leaves.connections == 22)
        async with serving(app(b"B"), sock.dup(), Echo) as stays:
            leaves.leave(lambda connection: taken.add(asyncio.create_task(stays.take(connection))))

            assert [await ask(each) for each in (*kept, silent)] == [(False, b"B")] * 21
            release.set()
            assert await answer == (True, b"A"), "a call that began before is answered, and the client told to move"
            assert await slow[0].read() == b""
            assert [await ask(each) for each in kept] == [(False, b"B")] * len(kept), "they go on"
            assert (leaves.connections, stays.connections) == (0, 21)
    for _, writer in (*kept, silent, slow):
        writer.close()
    sock.close()


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
    monkeypatch.setattr(http_server, "STALL_S", 0.2)
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
    monkeypatch.setattr(http_server, "STALL_S", 0.3)
    monkeypatch.setattr(http_server, "LEAST_READ_BYTES", 1)
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
