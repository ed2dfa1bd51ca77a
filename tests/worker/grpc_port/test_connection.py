"""Bounds of an HTTP/2 connection: control frames, bytes received and not read, clients that stall."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from tests.support.h2_peer import LIMIT_S, Peer, connecting, framed, head
from tests.support.polling import eventually
from tests.worker.test_dispatcher import FakeEngine

from teimgr import http_protocol
from teimgr.engine.engine import Engine
from teimgr.http_server import bind, serving
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.spec import WorkerSpec
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port import connection, port, rpc_stream
from teimgr.worker.grpc_port.port import GrpcPort

MESSAGE = 256 * 1024
HEAD, STREAM_HEAD = head("/tei.v1.Embed/Embed"), head("/tei.v1.Embed/EmbedStream")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """No test sends HTTP/1."""


Connect = Callable[[], Awaitable[Peer]]


@pytest.fixture
async def dispatcher() -> Dispatcher:
    dispatcher = Dispatcher(WorkerSpec(name="a", model_id="m", port=1, max_message_bytes=MESSAGE))
    dispatcher._engine = cast(Engine, FakeEngine())
    return dispatcher


@pytest.fixture
async def address(dispatcher: Dispatcher) -> AsyncIterator[tuple[str, int]]:
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of its connections: what is not read shows early
    async with serving(hello, sock, GrpcPort(dispatcher).protocol):
        yield sock.getsockname()


@pytest.fixture
async def connect(address: tuple[str, int]) -> AsyncIterator[Connect]:
    async with connecting(*address) as connect:
        yield connect


@pytest.mark.parametrize("kind", ["ping", "settings", "reset", "empty data"])
async def test_a_flood_of_control_frames_ends_the_connection(kind: str, connect: Connect) -> None:
    peer = await connect()
    stream = peer.open(STREAM_HEAD) if kind == "empty data" else 0

    for _ in range(connection._CONTROL_BURST * 2):
        if kind == "ping":
            peer.h2.ping(b"12345678")
        elif kind == "settings":
            peer.h2.update_settings({})
        elif kind == "reset":
            peer.h2.reset_stream(peer.open(HEAD))
        else:
            peer.h2.send_data(stream, b"")
    peer.flush()

    ended = await peer.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM


async def test_pings_of_a_client_that_does_not_read_fill_no_buffer(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONTROL_BURST", 10**9)
    monkeypatch.setattr(connection, "_CONTROL_PER_S", 1e9)
    monkeypatch.setattr(http_protocol, "STALL_S", 0.5)
    held: list[int] = []
    received = connection.Connection.data_received

    def measured(self: connection.Connection, data: bytes) -> None:
        received(self, data)
        if not self.connection.is_closing():
            held.append(self._transport.get_write_buffer_size())

    monkeypatch.setattr(connection.Connection, "data_received", measured)
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.connect(address)
    _, writer = await asyncio.open_connection(sock=own)
    writer.transport.pause_reading()
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    pings = b"\0\0\10\6\0\0\0\0\0pingpong" * 50_000

    async def flood() -> None:
        for _ in range(60):  # 51 MB
            writer.write(pings)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(flood(), LIMIT_S)
    writer.close()

    assert max(held) < 2**20


async def test_bytes_of_messages_that_arrive_are_bounded_over_all_connections(
    dispatcher: Dispatcher, connect: Connect
) -> None:
    peers = [await connect() for _ in range(8)]
    left = {(peer, peer.open(HEAD)): framed(b"x" * (MESSAGE - 1), MESSAGE) for peer in peers for _ in range(20)}
    progress = True
    while progress:
        progress = False
        for (peer, stream), data in left.items():
            sent = peer.send(stream, data)
            left[peer, stream] = data[sent:]
            progress |= sent > 0
        for peer in peers:
            await peer.settled()

    sent = sum(MESSAGE + 4 - len(data) for data in left.values())
    assert sent <= dispatcher.port_budget.limit_bytes + len(peers) * (1 << 20)  # and each connection's window
    assert dispatcher.port_budget.taken_bytes <= dispatcher.port_budget.limit_bytes
    for peer in peers:
        peer.writer.close()
    await eventually(lambda: not dispatcher.port_budget.taken_bytes)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/tei.v1.Embed/Embed", b""),
        ("/tei.v1.Embed/Embed", framed(b"x" * 100, 200)),
        ("/tei.v1.Embed/EmbedStream", b""),
        ("/grpc.health.v1.Health/Check", b""),
    ],
)
async def test_a_message_that_does_not_come_ends_the_call(
    path: str, sent: bytes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_stream, "MESSAGE_S", 0.2)
    monkeypatch.setattr(port, "MESSAGE_S", 0.2)
    monkeypatch.setattr(port, "STREAM_PAUSE_S", 0.2)
    peer = await connect()
    stream = peer.open(head(path))
    peer.send(stream, sent)

    await peer.until(h2.events.StreamEnded)
    answers = [
        event for event in peer.events if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived)
    ]
    headers = dict(answers[-1].headers)

    assert headers["grpc-status"] == "4"
    assert "0.2" in headers["grpc-message"]


async def test_replies_are_held_until_read_and_a_client_that_does_not_read_is_cut_off(
    dispatcher: Dispatcher, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_stream, "STALL_S", 0.5)
    reader = await connect()
    reader.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})  # it never lets a reply through
    reader.flush()
    await reader.settled()
    stream = reader.open(head("/tei.v1.Info/Info"))
    reader.h2.send_data(stream, framed(tei_pb2.InfoRequest().SerializeToString()), end_stream=True)
    reader.flush()
    await reader.settled()

    assert dispatcher.port_budget.taken_bytes > 0
    trailers = dict((await reader.until(h2.events.TrailersReceived)).headers)

    assert trailers["grpc-status"] == "1"
    await eventually(lambda: not dispatcher.port_budget.taken_bytes)


async def test_too_many_open_rpcs_are_refused_unprocessed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_RPCS", 3)
    peer = await connect()
    for _ in range(5):
        peer.open(HEAD)

    refused = await peer.until(h2.events.StreamReset)

    assert refused.error_code == ErrorCodes.REFUSED_STREAM
