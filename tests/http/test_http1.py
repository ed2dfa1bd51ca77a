"""The protocol of the HTTP server over real connections: HTTP/2 detection, upgrades, limits, request bodies."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import socket
import struct
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import Response

from teimgr.errors import Overloaded
from teimgr.http import bodies as http_bodies
from teimgr.http import connection_gate
from teimgr.http import http1 as http_protocol
from teimgr.http.bodies import SlowClient, read_body
from teimgr.http.byte_budget import ByteBudget, Charge
from teimgr.http.connection_gate import ConnectionGate, Phase
from teimgr.http.direct import PART_BYTES, Direct, DirectReply, DirectRequest
from teimgr.http.server import bind, serving
from teimgr.http.turns import TURN_UNITS
from tests.support.http_peers import Echo, answered, connected, hello, within
from tests.support.polling import eventually, on_uvloop

MAX_HEAD_BYTES = http_protocol._MAX_HEAD_BYTES
PIECE_BYTES = http_protocol._PIECE_BYTES
CONNECTIONS = 8


async def upload_all(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body, and answers with its length."""
    if scope["type"] == "http":
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            size, more = size + len(message["body"]), message["more_body"]
        await Response(str(size))(scope, receive, send)


async def answer_at_once(request: DirectRequest) -> DirectReply:
    return DirectReply(200, {}, b"hello")


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes, or resets since it has not read all that was sent."""
    received = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            received += data
    return received


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
async def test_a_connection_that_does_not_say_what_it_wants_is_closed(said: bytes) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, Echo, gate=within({Phase.HEAD: 0.05})), asyncio.timeout(30):
        reader, writer = await connected(sock)
        writer.write(said)

        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("h2", [None, lambda *_: asyncio.Protocol()])
async def test_a_connection_too_many_is_closed_and_leaves_room_when_another_is_answered(h2: Any) -> None:
    release = asyncio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") == "/slow":
            await release.wait()
        await hello(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with serving(slow, sock, h2, gate=ConnectionGate(2)), asyncio.timeout(30):
        inside = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in inside:
            writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        while await answered(port):  # until both are being answered
            pass

        release.set()
        for reader, _ in inside:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await answered(port)  # instead of the one that was idle for longest
        for _, writer in inside:
            writer.close()


@pytest.mark.parametrize("h2", [None, Echo])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" + b"GET / HTTP/1.1\r\nhost: x\r\n",
    ],
)
async def test_a_request_head_that_does_not_end_closes_the_connection(sent: bytes, h2: Any) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, h2, gate=within({Phase.HEAD: 0.05})), asyncio.timeout(3):
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


CHUNKED_POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
READS_BODY, ANSWERS_AT_ONCE = upload_all, hello


@pytest.mark.parametrize("app", [READS_BODY, ANSWERS_AT_ONCE])
@pytest.mark.parametrize("line", [b"a: b\r\n", b"c" * 4096, b"d: " + b"e" * 4096])
async def test_trailers_are_dropped_and_bounded_like_a_head(app: Any, line: bytes) -> None:
    """They were collected without a limit, and appended to the headers of a request that had passed authentication."""
    sock = bind("127.0.0.1", 0)
    async with serving(app, sock) as listener, asyncio.timeout(20):
        reader, writer = await connected(sock)
        writer.write(CHUNKED_POST + b"2\r\nhi\r\n0\r\n")
        sent = 0
        while sent < 2 * MAX_HEAD_BYTES:
            writer.write(line)
            sent += len(line)
        answer = await until_closed(reader)

        assert answer.endswith(b"The head of the request is over %d bytes." % MAX_HEAD_BYTES) or not answer
        await eventually(lambda: listener.connections == 0)
        writer.close()


async def test_short_trailers_end_a_request_and_are_no_headers_of_it() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive())["more_body"]:
                pass
            seen.append(dict(scope["headers"]))
            await hello(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    async with serving(app, sock), asyncio.timeout(20):
        reader, writer = await connected(sock)
        for piece in (CHUNKED_POST + b"2\r\nhi\r\n0\r\nAuthorization: Bearer k\r\n", b"x: y\r\n\r", b"\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\nhost: y\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()

    assert seen == [{b"host": b"x", b"transfer-encoding": b"chunked"}, {b"host": b"y", b"connection": b"close"}]


@pytest.mark.parametrize("rest", [b"0\r\n", b"0\r\nx: y\r\n", b"2\r\nhi\r\n0\r\nx"])
async def test_trailers_that_do_not_end_close_the_connection(rest: bytes) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(upload_all, sock, gate=within({Phase.HEAD: 0.1})), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(CHUNKED_POST + rest)

        assert await until_closed(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "sent", [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx", CHUNKED_POST + b"5\r\nab"]
)
async def test_what_an_answered_client_still_sends_is_discarded_within_a_time(sent: bytes) -> None:
    """A byte of the body behind the answer switched off the only timer of the connection."""
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, gate=within({Phase.DISCARD: 0.3})) as listener, asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(sent)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"c")

        assert await until_closed(reader) == b""
        await eventually(lambda: listener.connections == 0)
        writer.close()


async def test_what_an_answered_client_still_sends_is_discarded_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_MAX_DISCARDED_BYTES", 2**20)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        with suppress(ConnectionError):
            for _ in range(50):
                writer.write(bytes(2**20))
                await writer.drain()

        assert await until_closed(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n",
        b"POST / HTTP/1.0\r\nContent-Length: 8000000\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a b\r\n\r\n",
    ],
    ids=["last of its connection", "HTTP/1.0", "refused by the parser"],
)
@pytest.mark.parametrize("direct", [None, lambda method, target: answer_at_once], ids=["ASGI", "direct"])
async def test_an_answer_arrives_that_closes_the_connection_before_the_body_has_come(
    head: bytes, direct: Direct | None
) -> None:
    """The kernel resets a connection that is closed with bytes to be read; urllib's calls are all of this kind."""
    sock, gate = bind("127.0.0.1", 0), ConnectionGate()
    async with serving(hello, sock, gate=gate, direct=direct), asyncio.timeout(20):
        reader, writer = await connected(sock)
        writer.write(head)
        writer.write(bytes(8_000_000))
        await writer.drain()

        answer = await reader.read()

        assert answer.startswith(b"HTTP/1.1 400" if b"a b" in head else b"HTTP/1.1 200")
        writer.close()
        await eventually(lambda: gate.count == 0)


async def test_a_connection_closed_behind_an_answer_is_held_within_a_time_and_bytes() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000000000\r\n\r\nx"
    sock, gate = bind("127.0.0.1", 0), within({Phase.DISCARD: 0.3})
    async with serving(hello, sock, gate=gate), asyncio.timeout(20):
        reader, writer = await connected(sock)
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        await eventually(lambda: gate.count == 0)
        writer.close()

    sock, gate = bind("127.0.0.1", 0), ConnectionGate()
    async with serving(hello, sock, gate=gate), asyncio.timeout(20):
        reader, writer = await connected(sock)
        writer.write(head)
        sent = 0
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(2**20))
                await writer.drain()
                sent += 1
        assert 32 < sent < 100, "megabytes"
        await eventually(lambda: gate.count == 0)


async def test_without_a_descriptor_to_keep_it_open_a_connection_just_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    sock, gate = bind("127.0.0.1", 0), ConnectionGate()
    async with serving(hello, sock, gate=gate) as listener, asyncio.timeout(20):
        monkeypatch.setattr(os, "dup", refuse)
        reader, writer = await connected(sock)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9\r\n\r\nx")
        await until_closed(reader)
        await eventually(lambda: gate.count == 0 == listener.connections)
        writer.close()


async def test_the_rest_of_an_answered_request_may_come_and_another_one_behind_it() -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, gate=within({Phase.DISCARD: 60.0})), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"x" * 100 + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_answered_clients_that_still_send_make_room_on_a_full_port() -> None:
    sock, gate = bind("127.0.0.1", 0), ConnectionGate(20)
    async with serving(hello, sock, gate=gate), asyncio.timeout(10):
        pairs = [await connected(sock) for _ in range(50)]
        for _, writer in pairs:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
        await eventually(lambda: len(gate.lines[Phase.DISCARD].tickets) == 20)

        assert await answered(sock.getsockname()[1])
        for _, writer in pairs:
            writer.close()


async def test_few_pipelined_requests_wait_and_the_rest_is_not_parsed_before() -> None:
    """Each took 2 KiB, so that 256 KiB of them in one read took 30 MiB."""
    release, waiting = asyncio.Event(), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await release.wait()
            (protocol,) = running._server.server_state.connections
            waiting.append(len(cast(http_protocol.HttpProtocol, protocol).pipeline))
            await hello(scope, receive, send)

    count = 5000
    sock = bind("127.0.0.1", 0)
    gate = ConnectionGate()
    async with serving(app, sock, gate=gate) as running, asyncio.timeout(60):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * count)
        await eventually(lambda: gate.held_bytes > 50_000)
        release.set()
        for _ in range(count):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert len(waiting) == count
        assert max(waiting) <= 4
        assert gate.held_bytes == 0
        writer.close()


async def test_bytes_that_wait_are_bounded_over_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "HELD_BYTES", 100_000)
    gate = ConnectionGate()
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, gate=gate), asyncio.timeout(20):
        slow = [await connected(sock) for _ in range(8)]
        for _, writer in slow:
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 30_000)
        await eventually(lambda: gate.count == 3)

        assert 0 < gate.held_bytes <= 100_000
        assert await answered(sock.getsockname()[1])
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize(
    ("called", "start", "repeated", "most"),
    [
        ("on_chunk_header", CHUNKED_POST, b"1\r\na\r\n", TURN_UNITS + PIECE_BYTES // 6),
        ("on_header", b"GET / HTTP/1.1\r\n", b"a:\r\n", TURN_UNITS + PIECE_BYTES // 4),
    ],
    ids=["chunks", "fields"],
)
async def test_chunks_of_one_byte_and_heads_of_many_fields_leave_turns_to_others(
    called: str, start: bytes, repeated: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each calls back. Every connection had 5 ms of each turn, and a call takes a dozen turns."""
    count, parsed = 0, getattr(http_protocol.HttpProtocol, called)

    def counted(*given: Any) -> None:
        nonlocal count
        count += 1
        parsed(*given)

    monkeypatch.setattr(http_protocol.HttpProtocol, called, counted)
    sock = bind("127.0.0.1", 0)
    async with serving(upload_all, sock), asyncio.timeout(60):
        clients = [await connected(sock) for _ in range(CONNECTIONS)]
        for _, writer in clients:
            writer.write(start + repeated * 40_000 + b"0\r\n\r\n")
        answers = asyncio.gather(*(reader.readline() for reader, _ in clients))
        worst = before = 0
        while not answers.done():
            await asyncio.sleep(0)
            worst, before = max(worst, count - before), count

        assert {answer[9:12] for answer in answers.result()} == {b"200" if called == "on_chunk_header" else b"400"}
        assert worst <= most
        for _, writer in clients:
            writer.close()


async def test_http_10_has_no_chunks() -> None:
    """RFC 9112, 6.1: a message of HTTP/1.0 with a transfer coding is framed wrong."""
    sock = bind("127.0.0.1", 0)
    async with serving(upload_all, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(CHUNKED_POST.replace(b"1.1", b"1.0") + b"2\r\nhi\r\n0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        *(b"Host: %s\r\n" % host for host in (b"[", b"[]", b"[::g]", b"]", b"a@b", b"a/b", b"a b", b"x:y", b"x:65536")),
        b"Host: x\r\nHost: y\r\n",
        b"Host: x\r\nHost: x\r\n",
        b"",
        b"X-Forwarded-Host: x\r\n",
        b"Host: x\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n",
        b"Host: x\r\nX-API-Key: a\r\nX-API-Key: a\r\n",
        *(b"Host: x\r\nTransfer-Encoding: %s, chunked\r\n" % coding for coding in (b"gzip", b"deflate", b"chunked")),
    ],
)
async def test_a_head_that_parts_of_a_server_could_read_differently_is_refused(head: bytes) -> None:
    """`Host: [` was answered 500; of two keys one port read the first, another the last."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response(Request(scope).url.path)(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    async with serving(app, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\n" + head + b"\r\n")

        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize("host", [b"", b"x", b"x_y.example:80", b"[::1]", b"[fe80::1%25eth0]:9000", b"127.0.0.1:"])
async def test_hosts_with_and_without_a_port_are_served(host: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response(Request(scope).url.path)(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    async with serving(app, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host)

        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_request_of_http_10_needs_no_host() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response(Request(scope).url.path)(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    async with serving(app, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")

        assert (await reader.readline()).endswith(b" 200 OK\r\n")
        writer.close()


@pytest.mark.parametrize(
    ("head", "is_refused"),
    [(b"x: y\r\n" * 200, False), (b"x: y\r\n" * 300, True)],
)
async def test_the_number_of_headers_is_bounded(head: bytes, is_refused: bool) -> None:
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")

        assert (await reader.readline()).startswith(b"HTTP/1.1 400" if is_refused else b"HTTP/1.1 200")
        writer.close()


async def test_a_head_behind_a_slow_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late, release = asyncio.Semaphore(0), asyncio.Event()
    on_expired = http_protocol.HttpProtocol.on_expired

    def noted(protocol: http_protocol.HttpProtocol, phase: Phase) -> None:
        assert phase is Phase.ANSWER
        on_expired(protocol, phase)
        late.release()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await release.wait()
        await hello(scope, receive, send)

    monkeypatch.setattr(http_protocol.HttpProtocol, "on_expired", noted)
    sock = bind("127.0.0.1", 0)
    async with serving(slow, sock, gate=within({Phase.HEAD: 0.02, Phase.ANSWER: 0.02})), asyncio.timeout(10):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n")
        for _ in range(3):
            await late.acquire()
        writer.write(b"host: x\r\nconnection: close\r\n\r\n")
        await writer.drain()
        release.set()

        assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()


def sending(size: int, budget: ByteBudget) -> Direct:
    """Answers with `size` bytes."""

    async def answer(request: DirectRequest) -> DirectReply:
        return DirectReply(200, {}, bytes(size), budget)

    return lambda method, target: answer


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
    monkeypatch.setattr(connection_gate, "STALL_S", 0.2)
    budget = ByteBudget(1)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=sending(50 * 2**20, budget)):
        reader, writer = await asked(sock)
        await eventually(lambda: budget.taken_bytes == 50 * 2**20 - PART_BYTES)

        await eventually(lambda: budget.taken_bytes == 0)

        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(50 * 2**20)
        writer.close()


async def test_a_client_that_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "STALL_S", 0.3)
    monkeypatch.setattr(connection_gate, "MIN_READ_BYTES", 1)
    size = 8 * 2**20
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=sending(size, ByteBudget(1))), asyncio.timeout(30):
        reader, writer = await connected(sock)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < size:
            received += len(await reader.read(size // 64))
            await asyncio.sleep(0.01)
        writer.close()

    assert received == size


def upload(budget: ByteBudget, limit: int) -> Direct:
    """Reads a body and answers with its length, or with what went wrong."""

    async def answer(request: DirectRequest) -> DirectReply:
        charge = Charge(budget)
        try:
            body = await read_body(request, limit, charge)
            text = "too large" if body is None else str(len(body))
        except (SlowClient, Overloaded) as error:
            text = type(error).__name__
        finally:
            charge.release()
        return DirectReply(200, {}, text.encode())

    return lambda method, target: answer


UPLOAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_body_without_a_length_is_charged_as_it_comes() -> None:
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=upload(budget, 900)), asyncio.timeout(20):
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
    monkeypatch.setattr(http_bodies, "_BUDGET_WAIT_S", 0.1)
    monkeypatch.setattr(http_bodies, "BODY_TIMEOUT_S", 0.3)
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=upload(budget, 900)), asyncio.timeout(20):
        slow, slow_writer = await asyncio.open_connection(*sock.getsockname())
        slow_writer.write(UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 900") + b"x" * 700)
        await eventually(lambda: budget.taken_bytes == 700)
        other, other_writer = await asyncio.open_connection(*sock.getsockname())
        other_writer.write(UPLOAD + b"190\r\n" + b"x" * 400 + b"\r\n0\r\n\r\n")

        assert (await other.read()).endswith(b"Overloaded")
        assert (await slow.read()).endswith(b"SlowClient")
        assert budget.taken_bytes == 0
        slow_writer.close()
        other_writer.close()


async def test_announced_lengths_alone_hold_nothing() -> None:
    """492 kB of requests that announced bodies and sent none held the whole budget for 30 s."""
    announced = UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 100000000")
    budget = ByteBudget(10 * 2**20)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=upload(budget, 10**9)), asyncio.timeout(20):
        silent = [await asyncio.open_connection(*sock.getsockname()) for _ in range(20)]
        for _, writer in silent:
            writer.write(announced + b"x" * 10)
        await eventually(lambda: budget.taken_bytes == 200)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        size = 9 * 2**20
        writer.write(UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % size) + b"x" * size)

        assert (await reader.read()).endswith(b"%d" % size)
        for _, each in [*silent, (reader, writer)]:
            each.close()


async def test_bodies_that_come_slowly_do_not_keep_what_is_reserved_for_them() -> None:
    budget, size = ByteBudget(10 * 2**20), 9 * 2**20
    sized = UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % size)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=upload(budget, 10**9)), asyncio.timeout(20):
        slow, slow_writer = await asyncio.open_connection(*sock.getsockname())
        slow_writer.write(sized + b"x" * 2**17)
        await eventually(lambda: budget.taken_bytes >= 2**17)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(sized + b"x" * size)

        assert (await reader.read()).endswith(b"%d" % size)
        slow_writer.write(b"x" * (size - 2**17))  # and is read to its end all the same
        assert (await slow.read()).endswith(b"%d" % size)
        assert budget.taken_bytes == 0
        for each in (slow_writer, writer):
            each.close()


async def test_more_bodies_than_fit_are_read_one_after_the_other() -> None:
    """Charged as they come alone, all would be read in part, and wait for each other."""
    budget, size = ByteBudget(3 * 2**20), 2 * 2**20
    sized = UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % size)
    sock = bind("127.0.0.1", 0)
    async with serving(hello, sock, direct=upload(budget, 10**9)), asyncio.timeout(30):

        async def sent() -> bytes:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(sized + b"x" * size)
            answer = await reader.read()
            writer.close()
            return answer

        assert all(answer.endswith(b"%d" % size) for answer in await asyncio.gather(*(sent() for _ in range(12))))
        assert budget.taken_bytes == 0


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_many_connections_whose_requests_come_at_once_or_that_end_at_once_leave_turns_to_others(
    is_reset: bool,
) -> None:
    """Thousands in one turn hold the event loop for a third of a second, and every other client waits for that."""
    begun = 0

    async def count(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        if scope["type"] == "http":
            begun += 1
            await hello(scope, receive, send)

    sock, gate, many = bind("127.0.0.1", 0), ConnectionGate(), 200
    async with serving(count, sock, Echo, gate=gate), asyncio.timeout(30):
        clients = [socket.create_connection(sock.getsockname()) for _ in range(many)]
        await eventually(lambda: gate.count == many)
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # no turn of the loop meanwhile
        most_begun, before = 0, 0
        while begun < many:
            await asyncio.sleep(0)
            most_begun, before = max(most_begun, begun - before), begun
        for client in clients:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        for client in clients:
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            else:
                client.shutdown(socket.SHUT_WR)
        most_ended, left = 0, gate.count
        while gate.count:
            await asyncio.sleep(0)
            most_ended, left = max(most_ended, left - gate.count), gate.count
        for client in clients:
            client.close()

    assert 0 < most_begun <= connection_gate._BEGINNINGS_PER_TURN
    assert 0 < most_ended <= connection_gate._ENDS_PER_TURN


@pytest.mark.parametrize("kind", ["ASGI", "direct", "body"])
@on_uvloop
async def test_an_answer_to_one_of_many_clients_that_are_gone_is_not_written(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many that reset at once, most learn of it in a later turn; uvloop raised as they wrote their answers."""
    begun, told, many, unretrieved = 0, asyncio.Event(), 64, list[object]()

    async def wait() -> None:
        nonlocal begun
        begun += 1
        try:
            await told.wait()
        except asyncio.CancelledError:
            told.set()
            raise

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            waiting = asyncio.create_task(wait())
            await asyncio.wait((waiting, leaving := asyncio.create_task(receive())), return_when="FIRST_COMPLETED")
            told.set()
            leaving.cancel()
            await hello(scope, None, send)

    async def answer(request: DirectRequest) -> DirectReply:
        await wait()
        if kind == "body":
            await request.body.read_some()
        return DirectReply(200, {}, b"hello")

    expected = b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unretrieved.append(context))
    sock, gate = bind("127.0.0.1", 0), ConnectionGate()
    direct: Direct | None = (lambda method, target: answer) if kind != "ASGI" else None
    async with serving(app, sock, gate=gate, direct=direct), asyncio.timeout(30):
        clients = [socket.create_connection(sock.getsockname()) for _ in range(many)]
        for client in clients:
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n" + (expected if kind == "body" else b"\r\n"))
        await eventually(lambda: begun == many)
        for client in clients:  # no turn of the loop meanwhile
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        await eventually(lambda: gate.count == 0)
    gc.collect()

    assert [record.getMessage() for record in caplog.records] == []
    assert unretrieved == []


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "head then body"])
async def test_many_requests_that_come_at_once_on_open_connections_leave_turns_to_others(is_split: bool) -> None:
    """A head of one piece cost nothing: 500 open connections held the loop for as long as all their requests took."""
    begun = 0

    async def count(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        if scope["type"] == "http":
            begun += 1
            await receive()
            await hello(scope, receive, send)

    head, body, many = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", b"{}", 300
    sock = bind("127.0.0.1", 0)
    async with serving(count, sock), asyncio.timeout(30):
        clients = [await connected(sock) for _ in range(many)]
        for reader, writer in clients:
            writer.write(head + body)
            await reader.readuntil(b"\r\n\r\n")
        begun = 0
        for _, writer in clients:
            connection: socket.socket = writer.get_extra_info("socket")
            for part in (head, body) if is_split else (head + body,):
                socket.socket.send(cast(Any, connection)._sock, part)  # no turn of the loop meanwhile
        most_begun = before = 0
        while begun < many:
            await asyncio.sleep(0)
            most_begun, before = max(most_begun, begun - before), begun
        for reader, writer in clients:
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

    assert 1 < most_begun <= TURN_UNITS // http_protocol._REQUEST_UNITS + 1


async def test_a_request_before_pipelined_ones_learns_that_its_connection_was_lost() -> None:
    """uvicorn told the last one alone: the one that had begun wrote its response to a closed transport."""
    learned: list[str] = []

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert (await receive())["type"] == "http.request"
            learned.append((await receive())["type"])

    sock = bind("127.0.0.1", 0)
    async with serving(waiting, sock, Echo), asyncio.timeout(5):
        _, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"\0\r\n\r\n")  # which closes the connection
        await eventually(lambda: learned)
        writer.close()

    assert learned == ["http.disconnect"]
