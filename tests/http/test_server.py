"""Binding, TLS files, and leaving the address of the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from teimgr.errors import InvalidConfig, PortConflict
from teimgr.http import server as http_server
from teimgr.http.connection_gate import ConnectionGate, Phase
from teimgr.http.direct import Answer, DirectReply, DirectRequest
from teimgr.http.http2.requests import protocol
from teimgr.http.server import bind, serving
from teimgr.http.unix_listener import bind_unix
from tests.http.garbage import left_in_cycles
from tests.support.credentials import Authority, needs_openssl
from tests.support.http_peers import Echo, answered, answered_at, connected, hello
from tests.support.polling import eventually, on_uvloop


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


async def test_a_unix_socket_is_served_beside_the_port(tmp_path: Path) -> None:
    path, sock = tmp_path / "api.sock", bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    listener = bind_unix(path, 0o600, "api_socket")
    waiting = asyncio.create_task(answered_at(path))  # until connections are accepted

    async with serving(hello, sock, unix=listener) as running, asyncio.timeout(30):
        assert (await waiting).startswith(b"HTTP/1.1 200")
        assert await answered(port)
        kept = await asyncio.open_unix_connection(path)
        kept[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # one without a request may be silent for 20 s
        assert (await kept[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await eventually(lambda: running.connections == 1)
    assert await kept[0].read() == b""
    kept[1].close()

    assert not path.exists()
    assert listener.sock.fileno() == -1


async def test_a_server_without_connections_ends_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    pause = asyncio.sleep

    async def noted(seconds: float) -> None:
        paused.append(seconds)
        await pause(seconds)

    async with serving(hello, bind("127.0.0.1", 0)):
        monkeypatch.setattr(asyncio, "sleep", noted)
    assert not [seconds for seconds in paused if seconds > 0]


@needs_openssl
@pytest.mark.parametrize("is_secure", [False, True])
@on_uvloop
async def test_connections_without_a_request_do_not_delay_the_end(
    is_secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_CLOSE_GRACE_S", 600)
    cert, key = (authority := Authority(tmp_path / "authority")).sign("server")
    client = ssl.create_default_context(cafile=authority.ca)
    tls = {"ssl_certfile": cert, "ssl_keyfile": key} if is_secure else {}
    sock, gate = bind("127.0.0.1", 0), ConnectionGate()
    address = sock.getsockname()[:2]

    def connected(sent: bytes, *, handshake: bool = is_secure) -> socket.socket:
        """Of a client that does nothing more, so that it sees no end of the connection either."""
        opened = socket.create_connection(address, timeout=30)
        if handshake:
            opened = client.wrap_socket(opened, server_hostname="localhost")
        opened.sendall(sent)
        return opened

    with contextlib.ExitStack() as kept:
        async with asyncio.timeout(30), serving(hello, sock, h2=protocol, gate=gate, **tls):
            for sent in (b"", b"GET / HT", GET, H2_START, H2_START[:9]):
                kept.enter_context(await asyncio.to_thread(connected, sent))
            kept.enter_context(await asyncio.to_thread(connected, b"", handshake=False))
            await eventually(lambda: len(gate.lines[Phase.IDLE].tickets) == 1 and gate.count == 6)
            kept.enter_context(await asyncio.to_thread(connected, b"", handshake=False))  # accepted at the end


async def test_a_taken_port_is_a_conflict() -> None:
    owner = rf"in use by process {os.getpid()} \(.+\); choose another `api_port`"
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(PortConflict, match=owner):
        bind("127.0.0.1", stranger.getsockname()[1], "api_port")


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


def test_an_address_that_is_not_ours_is_no_conflict() -> None:
    with pytest.raises(InvalidConfig, match=r"cannot listen on 192\.0\.2\.1:4"):
        bind("192.0.2.1", 4000)


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


async def test_who_leaves_passes_on_connections_without_a_request_and_the_others_after_theirs() -> None:
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

    sock = bind("127.0.0.1", 0)
    async with serving(app(b"A"), sock.dup(), Echo) as leaves, asyncio.timeout(30):
        kept, silent, slow = [await connected(sock) for _ in range(20)], await connected(sock), await connected(sock)
        assert [await ask(each) for each in kept] == [(False, b"A")] * len(kept)
        answer = asyncio.create_task(ask(slow, b"/slow"))
        await waiting.wait()
        await eventually(lambda: leaves.connections == 22)
        async with serving(app(b"B"), sock.dup(), Echo) as stays:
            leaves.leave(stays.take)

            assert [await ask(each) for each in (*kept, silent)] == [(False, b"B")] * 21
            release.set()
            assert await answer == (False, b"A"), "a call that began before is answered, and its connection moves"
            assert [await ask(each) for each in (*kept, slow)] == [(False, b"B")] * 21, "they go on"
            assert (leaves.connections, stays.connections) == (0, 22)
    for _, writer in (*kept, silent, slow):
        writer.close()
    sock.close()


@on_uvloop
async def test_the_end_of_a_server_that_leaves_closes_no_connection_that_can_be_passed_on() -> None:
    """It ends while an answer is on its way to the kernel, and while half of a request has come."""
    gate, sock = ConnectionGate(), bind("127.0.0.1", 0)
    has_answered = asyncio.Event()

    async def answering(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        if scope["type"] == "http":
            leaves.leave(stays.take)
            has_answered.set()

    async with asyncio.timeout(30), contextlib.AsyncExitStack() as other:
        async with serving(answering, sock.dup(), protocol, gate=gate) as leaves:
            begun, kept = await connected(sock), await connected(sock)
            begun[1].write(GET[:9])
            await eventually(lambda: len(gate.lines[Phase.HEAD].tickets) == 2 and gate.held_bytes == 9)
            stays = await other.enter_async_context(serving(hello, sock.dup(), protocol))
            kept[1].write(GET)
            await has_answered.wait()
            begun[1].write(GET[9:])
        for reader, writer in (begun, kept):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "by the other one"
            writer.close()
    sock.close()


@needs_openssl
@on_uvloop
async def test_requests_on_kept_connections_are_answered_for_a_moment_where_none_can_be_passed_on(
    tmp_path: Path,
) -> None:
    """With TLS: a client that sends all the time learns by an answer that the connection ends."""
    authority = Authority(tmp_path / "authority")
    cert, key = authority.sign("server")
    client = ssl.create_default_context(cafile=authority.ca)
    sock = bind("127.0.0.1", 0)
    tls = {"ssl_certfile": cert, "ssl_keyfile": key}
    async with asyncio.timeout(30), serving(hello, sock, protocol, **tls) as leaves:
        port = sock.getsockname()[1]
        busy, idle = [await asyncio.open_connection("127.0.0.1", port, ssl=client) for _ in range(2)]
        for reader, writer in (busy, idle):
            writer.write(GET)
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        leaves.leave(quiet_s=2)
        asyncio.get_running_loop().call_later(0.2, busy[1].write, GET)  # while the server ends
    assert b"connection: close" in await busy[0].readuntil(b"\r\n\r\n")
    assert await busy[0].read() == await idle[0].read() == b""
    for _, writer in (busy, idle):
        writer.close()


def test_the_kernel_probes_accepted_connections() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 300


CLIENTS = 20
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
H2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
REQUESTS = {
    "silent": (b"", Phase.HEAD),
    "half a head": (b"GET / HT", Phase.HEAD),
    "answered": (GET, Phase.IDLE),
    "several": (GET * 3, Phase.IDLE),
    "answered before its body": (POST + b"1000000\r\n\r\n{", Phase.DISCARD),
    "malformed": (b"\0\0\r\n\r\n", None),
    "answered directly": (POST + b"2\r\n\r\n{}", Phase.IDLE),
    "lost while answered directly": (POST + b"5\r\n\r\nnever", Phase.ANSWER),
    "lost in a body": (POST + b"5\r\n\r\nne", Phase.BODY),
    "half of HTTP/2's preface": (H2_START[:9], Phase.HEAD),
    "HTTP/2": (H2_START, Phase.HEAD),
    "HTTP/2, answered": (H2_START + b"\0\0\6\1\5\0\0\0\1\x82\x84\x86\x41\1x", Phase.IDLE),
    "HTTP/2, answered before its body": (H2_START + b"\0\0\6\1\4\0\0\0\1\x83\x84\x86\x41\1x", Phase.IDLE),
    "HTTP/2, malformed": (H2_START + b"\0\0\1\1\5\0\0\0\1\x82", Phase.IDLE),
}
"""What clients send before they close, and the phase in which they close; None if the server closes."""


def direct(method: bytes, target: bytes) -> Answer | None:
    return answer if method == b"POST" else None


async def answer(request: DirectRequest) -> DirectReply:
    if request.headers.get(b"content-length") not in (b"2", b"5"):
        return DirectReply(400, {}, b"")
    body = bytearray()
    while part := await request.body.read_some():
        body += part
    if body == b"never":
        await asyncio.Event().wait()
    return DirectReply(200, {}, b"")


async def check_freed(sent: bytes, phase: Phase | None, client: ssl.SSLContext | None, **tls: Any) -> None:
    gate, sock = ConnectionGate(), bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def connect_and_close() -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port, ssl=client) for _ in range(CLIENTS)]
        for _, writer in opened:
            writer.write(sent)
        if phase is not None:
            await eventually(lambda: len(gate.lines[phase].tickets) == CLIENTS)
        else:
            for reader, _ in opened:
                await reader.read()
        for _, writer in opened:
            writer.close()

    async with serving(hello, sock, h2=protocol, gate=gate, direct=direct, **tls), asyncio.timeout(30):
        left = await left_in_cycles(connect_and_close, lambda: eventually(lambda: gate.count == 0))

    assert not left


@pytest.mark.parametrize(("sent", "phase"), REQUESTS.values(), ids=REQUESTS)
@on_uvloop
async def test_closed_connections_are_freed_without_a_garbage_collection(sent: bytes, phase: Phase | None) -> None:
    """A collection over the objects of ten thousand connections would hold the event loop for all of its time."""
    await check_freed(sent, phase, None)


@needs_openssl
@on_uvloop
async def test_closed_tls_connections_are_freed_without_a_garbage_collection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = authority.sign("server")
    client = ssl.create_default_context(cafile=authority.ca)
    for name in ("answered", "answered before its body", "HTTP/2, answered"):
        await check_freed(*REQUESTS[name], client, ssl_certfile=cert, ssl_keyfile=key)
    await check_freed(GET, None, None, ssl_certfile=cert, ssl_keyfile=key)  # no handshake
