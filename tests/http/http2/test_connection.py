"""Bounds of an HTTP/2 connection: control frames, streams, idleness; its end; data in turns."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import h2.events
import h2.settings
import pytest
from h2.errors import ErrorCodes
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from tests.fuzz.http2 import frames_of
from tests.http.http2.test_framing import frame
from tests.support.http_peers import LIMIT_S, Peer, connecting, request, within
from tests.support.polling import eventually

from teimgr.http import connection_gate
from teimgr.http.byte_budget import ByteBudget
from teimgr.http.connection_gate import ConnectionGate, Phase, Ticket
from teimgr.http.http1 import ListenerState, ServerConnections
from teimgr.http.http2 import connection
from teimgr.http.http2 import stream as http2_stream
from teimgr.http.http2.frame_reader import Payload
from teimgr.http.http2.framing import Framing
from teimgr.http.http2.headers import HeaderDecoder
from teimgr.http.http2.requests import HttpStreams, protocol
from teimgr.http.http2.stream import Stream
from teimgr.http.server import Listener, bind, serving

HEAD = request("/hang")
SETTINGS = 4
LARGE = 1 << 20
DATA, HEADERS, RST_STREAM, GOAWAY = 0, 1, 3, 7
Connect = Callable[[], Awaitable[Peer]]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """`/hang` waits for the client to leave, `/large` answers with a MiB, others at once."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/hang":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * LARGE if scope["path"] == "/large" else b"answer"})


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> ConnectionGate:
    """With the time limits of the test's parameters."""
    return within(getattr(request, "param", {}))


@pytest.fixture
async def server(gate: ConnectionGate) -> AsyncIterator[tuple[Listener, tuple[str, int]]]:
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of its connections: what is not read shows early
    async with serving(application, sock, protocol, gate=gate) as listener:
        yield listener, sock.getsockname()


@pytest.fixture
def listener(server: tuple[Listener, tuple[str, int]]) -> Listener:
    return server[0]


@pytest.fixture
def address(server: tuple[Listener, tuple[str, int]]) -> tuple[str, int]:
    return server[1]


@pytest.fixture
async def connect(address: tuple[str, int]) -> AsyncIterator[Connect]:
    async with connecting(*address) as connect:
        yield connect


@pytest.mark.parametrize("kind", ["ping", "settings", "many settings", "reset", "empty data", "window"])
async def test_a_flood_of_control_frames_ends_the_connection(kind: str, connect: Connect) -> None:
    peer = await connect()
    stream = peer.open(HEAD) if kind == "empty data" else 0

    for _ in range(connection._CONTROL_BURST * 2):
        if kind == "ping":
            peer.h2.ping(b"12345678")
        elif kind == "settings":
            peer.h2.update_settings({})
        elif kind == "many settings":
            peer.writer.write(frame(SETTINGS, 0, 0, bytes(6 * 2730)))
        elif kind == "reset":
            peer.h2.reset_stream(peer.open(HEAD))
        elif kind == "window":
            peer.h2.increment_flow_control_window(1)
        else:
            peer.h2.send_data(stream, b"")
    peer.flush()

    ended = await peer.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_flood_of_malformed_requests_ends_the_connection(connect: Connect) -> None:
    peer = await connect()
    for number in range(connection._CONTROL_BURST * 2):
        peer.writer.write(frame(1, 5, 2 * number + 1, b"\x82"))

    received = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(LIMIT_S):
            while data := await peer.reader.read(LARGE):
                received += data
    goaway = received[received.rindex(frame(GOAWAY, 0, 0, b"")[3:]) + 6 :]
    assert int.from_bytes(goaway[4:8], "big") == ErrorCodes.ENHANCE_YOUR_CALM


async def test_window_updates_that_answers_explain_are_free(connect: Connect) -> None:
    peer = await connect()
    for _ in range(4):
        stream = peer.open(request("/large"), end=True)
        for _ in range(connection._CONTROL_BURST // 4):  # of its MiB
            peer.h2.increment_flow_control_window(2048)
            peer.h2.increment_flow_control_window(2048, stream)
        peer.flush()
        _, _, body = await peer.response(stream)
        assert len(body) == LARGE
    await peer.settled()


@pytest.mark.parametrize(
    "begun",
    [
        frame(SETTINGS, 0, 0, bytes(600))[:300],
        frame(1, 0, 1, b"\x82"),
        struct.pack(">BHBBI", 4, 0, DATA, 0, 1) + b"x" * 100,
        b"\0\0",
    ],
    ids=["a frame", "a header block", "DATA", "a part of a frame's head"],
)
async def test_a_frame_that_does_not_end_ends_its_connection(
    begun: bytes, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_FRAME_S", 0.1)
    async with connecting(*address) as connect:
        peer = await connect()
        if begun[3:4] == b"\0" and len(begun) > 2:
            peer.open(HEAD)
        peer.writer.write(begun)
        ended = await peer.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.PROTOCOL_ERROR


async def test_a_frame_that_comes_slowly_but_steadily_is_awaited(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_FRAME_S", 0.2)
    monkeypatch.setattr(connection, "MIN_READ_BYTES", 1)
    async with connecting(*address) as connect:
        peer = await connect()
        stream = peer.open(request("/large", "POST"))
        loop = asyncio.get_running_loop()
        whole, began = frame(DATA, 1, stream, b"x" * 60), loop.time()
        for at in range(0, len(whole), 4):
            peer.writer.write(whole[at : at + 4])
            await asyncio.sleep(0.03)
        assert loop.time() - began > 0.2
        assert (await peer.response(stream))[0] == 200


async def test_a_client_with_heavy_headers_holds_up_others_for_a_block_at_a_time(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 KiB of Huffman strings take some milliseconds to decode, and a read may bring 16 of them and more."""
    decoded: list[float] = []
    decode = HeaderDecoder.decode

    def measured(self: HeaderDecoder, block: bytes) -> Any:
        decoded.append(len(block))
        return decode(self, block)

    monkeypatch.setattr(HeaderDecoder, "decode", measured)
    monkeypatch.setattr(connection, "_CONTROL_BURST", 10**6)
    text = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(b"0" * 15_000)
    length = encode_integer(len(text), 7)
    length[0] |= 0x80
    field = b"\0\1x" + bytes(length) + text
    block = bytes.fromhex("828684010178") + field
    async with connecting(*address) as connect:
        heavy, light = await connect(), await connect()
        heavy.writer.write(b"".join(frame(1, 5, number, block) for number in range(1, 2 * 40, 2)))
        turns = 0
        while sum(size > 5000 for size in decoded) < 40:
            before = sum(decoded)
            await asyncio.sleep(0)
            assert sum(decoded) - before < 2 * len(block) + 200
            turns += 1
        assert turns >= 20
        await light.settled()


@pytest.mark.parametrize("many", [1, 40])
async def test_the_streams_of_lost_connections_end_a_few_in_each_turn(
    many: int, address: tuple[str, int], listener: Listener, gate: ConnectionGate
) -> None:
    """The tasks of a thousand calls learned it in one turn, which was long for everybody else."""
    async with connecting(*address) as connect:
        peers = [await connect() for _ in range(many)]
        for peer in peers:
            for _ in range(200 // many):
                peer.open(HEAD)
            peer.flush()
        tasks = listener._server.server_state.tasks
        await eventually(lambda: len(tasks) == 200)
        for peer in peers:
            peer.writer.transport.abort()
        most, left = 0, (200, many)
        while tasks or gate.count:
            await asyncio.sleep(0)
            now = len(tasks), gate.count
            most, left = max(most, *(before - after for before, after in zip(left, now, strict=True))), now

    assert 0 < most <= connection_gate._ENDS_PER_TURN


async def test_pings_of_a_client_that_does_not_read_fill_no_buffer(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONTROL_BURST", 10**9)
    monkeypatch.setattr(connection, "_CONTROL_PER_S", 1e9)
    monkeypatch.setattr(connection_gate, "STALL_S", 0.5)
    held: list[int] = []
    received = connection.Connection.data_received

    def measured(self: connection.Connection, data: bytes) -> None:
        received(self, data)
        if not self.transport.is_closing():
            held.append(self.transport.get_write_buffer_size())

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


async def test_too_many_open_streams_are_refused_unprocessed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_TASKS", 3)
    peer = await connect()
    for _ in range(5):
        peer.open(HEAD)

    refused = await peer.until(h2.events.StreamReset)

    assert refused.error_code == ErrorCodes.REFUSED_STREAM


async def test_one_caller_opens_a_half_of_the_streams_on_all_its_connections(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_TASKS", 4)
    first, second = await connect(), await connect()
    first.open(HEAD)
    first.open(request("/"), end=True)
    await first.until(h2.events.StreamEnded)  # its place is free again
    first.open(HEAD)
    second.open(HEAD)

    refused = await second.until(h2.events.StreamReset)

    assert refused.error_code == ErrorCodes.REFUSED_STREAM


@pytest.mark.parametrize("gate", [{Phase.HEAD: 0.05}], indirect=True)
async def test_a_connection_without_a_request_is_closed_by_goaway(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_GOAWAY_S", 0.05)
    async with connecting(*address) as connect:
        peer = await connect()
        ended = await peer.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.NO_ERROR
        while not peer.is_closed:
            await peer.take()


@pytest.mark.parametrize("gate", [{Phase.HEAD: 30.0, Phase.IDLE: 0.05}], indirect=True)
async def test_a_connection_is_kept_between_requests_for_a_time(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_GOAWAY_S", 0.05)
    peer = await connect()
    peer.open(request("/"), end=True)
    await peer.until(h2.events.StreamEnded)

    await peer.until(h2.events.ConnectionTerminated)


def kept(state: ServerConnections, ticket: Ticket) -> connection.Connection:
    """The protocol of connections that stay open, as those of gRPC do."""
    return connection.Connection(HttpStreams(state).serve, state, ticket, stays_open=True)


@pytest.mark.parametrize("gate", [{Phase.HEAD: 30.0, Phase.ANSWER: 0.05, Phase.IDLE: 0.1}], indirect=True)
@pytest.mark.parametrize("unused_s", [0.3, 60.0])
async def test_a_connection_that_stays_open_is_closed_without_streams_later_once_it_had_one(
    unused_s: float, gate: ConnectionGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_UNUSED_S", unused_s)
    monkeypatch.setattr(connection, "_GOAWAY_S", 0.05)
    sock = bind("127.0.0.1", 0)
    async with (
        serving(application, sock, kept, gate=gate),
        connecting(*sock.getsockname()) as connect,
    ):
        used, idle = await connect(), await connect()
        await used.ask(request("/"))
        await idle.until(h2.events.ConnectionTerminated)
        if unused_s < 1:
            await used.until(h2.events.ConnectionTerminated)
        else:
            assert (await used.ask(request("/")))[0] == 200
            await used.settled()


@pytest.mark.parametrize("grace_s", [0.1, 60.0])
async def test_a_call_that_is_open_at_the_greatest_age_has_the_grace(
    grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_GOAWAY_S", 0.05)
    release = asyncio.Event()

    async def serve(stream: Stream) -> None:
        await release.wait()
        await stream.send_headers([(b":status", b"200")], end=True)

    def aging(state: ServerConnections, ticket: Ticket) -> connection.Connection:
        return connection.Connection(serve, state, ticket, max_age=connection.MaxAge(0.1, grace_s))

    sock = bind("127.0.0.1", 0)
    async with serving(application, sock, aging), connecting(*sock.getsockname()) as connect:
        peer = await connect()
        asked = peer.open(request("/"), end=True)
        await peer.until(h2.events.ConnectionTerminated)
        if grace_s > 1:
            release.set()
        async with asyncio.timeout(LIMIT_S):
            frames = frames_of(await peer.reader.read(-1))
        assert [kind for kind, _, stream, _ in frames if stream == asked] == ([HEADERS] if grace_s > 1 else [])


async def test_bytes_of_frames_that_have_not_ended_are_held_by_the_gate(connect: Connect, gate: ConnectionGate) -> None:
    peer = await connect()
    whole = frame(SETTINGS, 0, 0, bytes(6 * 1000))
    peer.writer.write(whole[:5000])
    await eventually(lambda: gate.held_bytes == 5000)
    peer.writer.write(whole[5000:])
    await eventually(lambda: gate.held_bytes == 0)


async def test_a_server_that_leaves_answers_what_was_asked_and_refuses_what_comes_later(
    listener: Listener, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_GOAWAY_S", 0.2)
    peer = await connect()
    peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: LARGE})
    peer.h2.increment_flow_control_window(LARGE)
    await peer.settled()
    asked = peer.open(request("/large"), end=True)
    (served,) = listener._server.server_state.connections
    await eventually(lambda: cast(connection.Connection, served)._streams)

    listener.leave()
    later = peer.open(request("/"), end=True)
    async with asyncio.timeout(LIMIT_S):
        frames = frames_of(await peer.reader.read(-1))  # h2's client reads nothing behind GOAWAY

    assert sum(len(data) for kind, _, stream, data in frames if (kind, stream) == (DATA, asked)) == LARGE
    assert [stream for kind, _, stream, _ in frames if kind == RST_STREAM] == [later]
    assert [int.from_bytes(data[:4], "big") for kind, _, _, data in frames if kind == GOAWAY] == [asked]


async def test_a_broken_frame_ends_its_connection_alone(connect: Connect) -> None:
    sound, broken = await connect(), await connect()
    broken.writer.write(b"\0\0\4\3\0\0\0\0\0abcd")  # RST_STREAM of stream 0

    ended = await broken.until(h2.events.ConnectionTerminated)

    assert ended.error_code == ErrorCodes.PROTOCOL_ERROR
    sound.open(request("/"), end=True)
    await sound.until(h2.events.StreamEnded)


async def test_responses_share_the_connection_in_turns(connect: Connect) -> None:
    peer = await connect()
    peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: LARGE})
    await peer.settled()
    streams = [peer.open(request("/large"), end=True) for _ in range(3)]
    await peer.settled()  # the first has taken the window of the connection
    peer.h2.increment_flow_control_window(LARGE)
    peer.flush()
    order: list[int] = []
    while len(order) < 6:
        peer.events.clear()
        await peer.take()
        order += [event.stream_id for event in peer.events if isinstance(event, h2.events.DataReceived)]

    assert set(order[:6]) == set(streams)


@pytest.mark.parametrize("what", ["stream", "connection"])
async def test_a_client_that_does_not_read_a_response_has_its_stream_reset(
    what: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_stream, "STALL_S", 0.1)
    peer = await connect()
    window = LARGE if what == "connection" else 1000
    peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    await peer.settled()
    peer.open(request("/large"), end=True)

    reset = await peer.until(h2.events.StreamReset)

    assert reset.error_code == ErrorCodes.CANCEL


async def test_a_client_that_reads_slowly_but_steadily_is_served(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_stream, "STALL_S", 0.5)
    monkeypatch.setattr(http2_stream, "MIN_READ_BYTES", 1)
    peer = await connect()
    peer.open(request("/large"), end=True)
    read = 0
    while read < LARGE:
        await peer.take()
        for event in peer.events:
            assert not isinstance(event, h2.events.StreamReset)
            if isinstance(event, h2.events.DataReceived):
                read += len(event.data)
                peer.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        peer.events.clear()
        peer.flush()


async def test_a_stream_waits_for_its_turn_once_however_often_its_window_opens(
    listener: Listener, connect: Connect
) -> None:
    peer = await connect()
    streams = [peer.open(request("/large"), end=True) for _ in range(5)]
    for _ in range(200):
        for stream in streams:
            peer.h2.increment_flow_control_window(1, stream)
    peer.flush()
    await peer.settled()
    (served,) = listener._server.server_state.connections

    assert 0 < len(cast(connection.Connection, served).sender._ready) <= len(streams)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what servers write."""
    sizes: list[int] = []
    take: Callable[[Framing], list[Payload]] = Framing.take

    def recorded(self: Framing) -> list[Payload]:
        parts = take(self)
        if parts:
            sizes.append(sum(map(len, parts)))
        return parts

    monkeypatch.setattr(Framing, "take", recorded)
    return sizes


async def test_a_response_is_one_write_and_so_are_those_of_one_turn(connect: Connect, writes: list[int]) -> None:
    peer = await connect()
    writes.clear()

    assert (await peer.ask(request("/")))[2] == b"answer"
    assert len(writes) == 1

    streams = [peer.h2.get_next_available_stream_id()]
    for _ in range(10):
        streams.append(streams[-1] + 2)
    for stream in streams:
        peer.h2.send_headers(stream, request("/"), end_stream=True)
    peer.flush()
    assert [(await peer.response(stream))[2] for stream in streams] == [b"answer"] * 11
    assert len(writes) == 2


async def test_what_waits_for_the_end_of_a_turn_is_bounded(connect: Connect, writes: list[int]) -> None:
    peer = await connect()
    peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: LARGE})
    peer.h2.increment_flow_control_window(10 * LARGE)
    await peer.settled()
    writes.clear()
    streams = [peer.open(request("/large"), end=True) for _ in range(10)]
    assert [len((await peer.response(stream))[2]) for stream in streams] == [LARGE] * 10

    assert sum(writes) > 10 * LARGE
    assert max(writes) <= http2_stream._WAITING_BYTES + http2_stream._FRAME_BYTES + 1024


@pytest.fixture
async def connect_stalling() -> AsyncIterator[Connect]:
    """Connects to a server that reads the requests to all paths but `/stall`."""

    async def serve(stream: Stream) -> None:
        if (b":path", b"/stall") in stream.headers:
            await asyncio.Event().wait()
        while await stream.received.read_some():
            pass
        await stream.send_headers([(b":status", b"200")], end=True)

    state = ListenerState()
    sock = bind("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(lambda: connection.Connection(serve, state), sock=sock)
    async with server, connecting(*sock.getsockname()) as connect:
        yield connect


async def stalled(peer: Peer, streams: int) -> dict[int, int]:
    """Fill the windows of streams that are not read: the bytes sent on each."""
    sent = {peer.open(request("/stall", "POST")): 0 for _ in range(streams)}
    while progress := {stream: peer.send(stream, bytes(LARGE)) for stream in sent}:
        if not any(progress.values()):
            return sent
        sent = {stream: sent[stream] + progress[stream] for stream in sent}
        await peer.settled()
    raise AssertionError


async def test_streams_that_are_not_read_do_not_block_the_others(connect_stalling: Connect) -> None:
    peer = await connect_stalling()

    sent = await stalled(peer, 20)

    assert set(sent.values()) == {connection._STREAM_WINDOW}
    assert (await peer.ask(request("/", "POST"), bytes(connection._STREAM_WINDOW)))[0] == 200
    assert connection._AHEAD.taken_bytes >= 20 * connection._STREAM_WINDOW - connection._CONNECTION_WINDOW
    for stream in sent:
        peer.h2.reset_stream(stream)
    peer.flush()
    await eventually(lambda: not connection._AHEAD.taken_bytes)


async def test_bytes_that_are_not_read_are_bounded_for_a_connection_and_for_all(
    connect_stalling: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ByteBudget(4 * LARGE)
    monkeypatch.setattr(connection, "_AHEAD", budget)
    peers = [await connect_stalling() for _ in range(6)]

    sent = [sum((await stalled(peer, 20)).values()) for peer in peers]

    windows = connection._CONNECTION_WINDOW
    assert all(windows <= each <= windows + LARGE for each in sent)
    assert budget.limit_bytes * 0.9 < budget.taken_bytes <= budget.limit_bytes
    for peer in peers:
        peer.writer.close()
    await eventually(lambda: not budget.taken_bytes)


async def test_streams_that_were_reset_count_until_their_requests_end(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application goes on after its client has left; new streams would start ever more of it."""
    monkeypatch.setattr(connection, "MAX_STREAMS", 3)
    release = asyncio.Event()

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await release.wait()

    sock = bind("127.0.0.1", 0)
    async with serving(busy, sock, protocol), connecting(*sock.getsockname()) as connect_busy:
        peer = await connect_busy()
        for _ in range(3):
            stream = peer.open(request("/"))
            await peer.settled()
            peer.h2.reset_stream(stream)
        await peer.settled()
        peer.open(request("/"))
        refused = await peer.until(h2.events.StreamReset)
        release.set()

    assert refused.error_code == ErrorCodes.REFUSED_STREAM


async def test_a_connection_that_is_made_after_the_server_left_is_told_to_go(
    listener: Listener, address: tuple[str, int]
) -> None:
    """As of one whose handshake ends then."""
    listener._server.server_state.is_leaving = True
    reader, writer = await asyncio.open_connection(*address)
    peer = Peer(reader, writer)

    told = await peer.until(h2.events.ConnectionTerminated)
    writer.close()

    assert (told.error_code, told.last_stream_id) == (ErrorCodes.NO_ERROR, 0)
