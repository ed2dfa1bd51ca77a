"""RPCs over HTTP/2: bytes received and not read, messages that do not come, clients that do not read."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast
from urllib.parse import unquote_to_bytes

import h2.events
import h2.settings
import pytest
from tests.support.http_peers import Peer, connecting, framed, head, hello, request
from tests.support.polling import eventually
from tests.worker.test_dispatcher import FakeEngine

from teimgr.engine.engine import Engine
from teimgr.http.byte_budget import ByteBudget
from teimgr.http.http2 import connection
from teimgr.http.http2 import stream as http2_stream
from teimgr.http.server import bind, serving
from teimgr.spec import WorkerSpec
from teimgr.wire.grpc_core import health_reflection, rpc_stream
from teimgr.wire.grpc_core.rpc_stream import RpcStatusError
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.worker import grpc_port
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port import GrpcPort

MESSAGE = 256 * 1024
HEAD = head("/tei.v1.Embed/Embed")


Connect = Callable[[], Awaitable[Peer]]


@pytest.fixture
async def dispatcher() -> Dispatcher:
    dispatcher = Dispatcher(WorkerSpec(name="a", model_id="m", port=1, max_message_bytes=MESSAGE))
    dispatcher._engine = cast(Engine, FakeEngine())
    return dispatcher


@pytest.fixture
async def port(dispatcher: Dispatcher) -> GrpcPort:
    return GrpcPort(dispatcher)


@pytest.fixture
async def address(port: GrpcPort) -> AsyncIterator[tuple[str, int]]:
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of its connections: what is not read shows early
    async with serving(hello, sock, port.protocol):
        yield sock.getsockname()


@pytest.fixture
async def connect(address: tuple[str, int]) -> AsyncIterator[Connect]:
    async with connecting(*address) as connect:
        yield connect


async def test_bytes_of_messages_that_arrive_are_bounded_over_all_connections(
    dispatcher: Dispatcher, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ByteBudget(1 << 20)
    monkeypatch.setattr(connection, "_AHEAD", ahead)
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
    windows = len(peers) * connection._CONNECTION_WINDOW + ahead.limit_bytes
    assert sent <= dispatcher.port_budget.limit_bytes + windows
    assert dispatcher.port_budget.taken_bytes <= dispatcher.port_budget.limit_bytes
    for peer in peers:
        peer.writer.close()
    await eventually(lambda: not dispatcher.port_budget.taken_bytes)


async def test_an_announced_length_holds_nothing_of_the_budget(dispatcher: Dispatcher, connect: Connect) -> None:
    peer = await connect()
    for _ in range(1000):
        peer.send(peer.open(HEAD), framed(b"", MESSAGE))
    await peer.settled()
    assert dispatcher.port_budget.taken_bytes == 0

    begun = peer.open(HEAD)
    peer.send(begun, framed(b"x" * 100, MESSAGE))
    await peer.settled()
    await eventually(lambda: dispatcher.port_budget.taken_bytes == 100)


async def test_a_small_message_does_not_wait_for_those_that_hold_the_budget(
    dispatcher: Dispatcher, connect: Connect
) -> None:
    dispatcher.port_budget.charge(dispatcher.port_budget.limit_bytes)
    peer = await connect()

    stream = peer.open(HEAD)
    peer.send(stream, framed(tei_pb2.EmbedRequest(inputs="fog").SerializeToString()))
    await peer.settled()
    await eventually(lambda: dispatcher.port_budget.taken_bytes == dispatcher.port_budget.limit_bytes)
    assert stream in peer.h2.streams
    dispatcher.port_budget.give_back(dispatcher.port_budget.limit_bytes)
    assert dispatcher.port_budget.taken_bytes == 0


@pytest.mark.parametrize(
    "headers",
    [
        [*HEAD, ("connection", "keep-alive")],
        [*HEAD, ("te", "gzip")],
        [*HEAD, (":path", "/tei.v1.Info/Info")],
        [*HEAD, ("X-Upper", "a")],
        [*HEAD, ("x", "a\nb")],
        [each for each in HEAD if each[0] != ":scheme"],
        [(name, "ftp" if name == ":scheme" else value) for name, value in HEAD],
        [*HEAD, ("content-length", "five")],
    ],
    ids=lambda headers: repr(headers[-1]),
)
async def test_the_head_of_a_call_is_validated_as_that_of_an_http_request(
    headers: list[tuple[str, str]], connect: Connect
) -> None:
    peer = await connect()
    peer.h2.config.validate_outbound_headers = peer.h2.config.normalize_outbound_headers = False
    stream = peer.open(headers, end=True)

    assert (await peer.response(stream))[0] == 400
    assert (await peer.ask(request("/hello")))[0] == 200


async def test_a_call_whose_content_is_not_as_long_as_its_head_says_is_reset(connect: Connect) -> None:
    peer = await connect()
    stream = peer.open([*HEAD, ("content-length", "5")])
    peer.send(stream, framed(b"\x0a\x01a"))

    assert (await peer.until(h2.events.StreamReset)).error_code == 1


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
    monkeypatch.setattr(grpc_port, "MESSAGE_S", 0.2)
    monkeypatch.setattr(health_reflection, "MESSAGE_S", 0.2)
    monkeypatch.setattr(grpc_port, "STREAM_PAUSE_S", 0.2)
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
    port: GrpcPort, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_stream, "STALL_S", 0.5)
    reader = await connect()
    reader.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})  # it never lets a reply through
    reader.flush()
    await reader.settled()
    stream = reader.open(head("/tei.v1.Info/Info"))
    reader.h2.send_data(stream, framed(tei_pb2.InfoRequest().SerializeToString()), end_stream=True)
    reader.flush()
    await reader.settled()

    assert port._unread.taken_bytes > 0
    trailers = dict((await reader.until(h2.events.TrailersReceived)).headers)

    assert trailers["grpc-status"] == "1"
    await eventually(lambda: not port._unread.taken_bytes)


async def test_replies_that_one_client_does_not_read_hold_up_its_own_calls_alone(
    port: GrpcPort, connect: Connect
) -> None:
    port._unread.limit_bytes = 4  # a byte for one connection
    silent, reader = await connect(), await connect()
    silent.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    silent.flush()
    await silent.settled()
    for _ in range(3):
        stream = silent.open(head("/tei.v1.Info/Info"))
        silent.h2.send_data(stream, framed(b""), end_stream=True)
        silent.flush()
        await silent.settled()

    held = port._unread.taken_bytes
    assert 4 < held < 100, "the reply to the first call alone"
    for _ in range(3):
        stream = reader.open(head("/tei.v1.Info/Info"))
        reader.h2.send_data(stream, framed(b""), end_stream=True)
        reader.flush()
        while (await reader.until(h2.events.TrailersReceived)).stream_id != stream:
            await reader.take()

    silent.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    silent.flush()
    while (await silent.until(h2.events.TrailersReceived)).stream_id != 5:
        await silent.take()
    assert port._unread.taken_bytes == 0


async def test_a_deadline_in_millennia_is_served(connect: Connect) -> None:
    peer = await connect()
    stream = peer.open(head("/tei.v1.Info/Info", **{"grpc-timeout": "99999999H"}))
    peer.h2.send_data(stream, framed(b""), end_stream=True)
    peer.flush()

    assert dict((await peer.until(h2.events.TrailersReceived)).headers)["grpc-status"] == "0"


@pytest.mark.parametrize("sent", [b"\0\0", framed(b"abc", 9)])
async def test_an_end_inside_a_message_is_invalid(sent: bytes, connect: Connect) -> None:
    peer = await connect()
    stream = peer.open(HEAD)
    peer.h2.send_data(stream, sent, end_stream=True)
    peer.flush()

    headers = dict((await peer.until(h2.events.ResponseReceived)).headers)

    assert headers["grpc-status"] == "3"
    assert "ends inside" in headers["grpc-message"]


async def test_a_connection_has_calls_and_http_requests_beside_each_other(connect: Connect) -> None:
    peer = await connect()
    assert (await peer.ask(request("/any", "POST", **{"content-type": "application/json"}), b"{}"))[0] == 200

    stream = peer.open(head("/tei.v1.Info/Info"))
    peer.h2.send_data(stream, framed(b""), end_stream=True)
    peer.flush()
    trailers = dict((await peer.until(h2.events.TrailersReceived)).headers)
    wrong = [*request("/tei.v1.Info/Info", "POST"), ("content-type", "text/plain")]

    assert trailers["grpc-status"] == "0"
    assert (await peer.ask(wrong, b"x"))[0] == 415
    assert (await peer.ask(request("/any")))[0] == 200


@pytest.mark.parametrize(("flag", "status", "encodings"), [(1, "12", "identity"), (2, "3", None)])
async def test_a_compressed_message_is_refused_with_the_encodings_that_are_served(
    flag: int, status: str, encodings: str | None, connect: Connect
) -> None:
    peer = await connect()
    stream = peer.open(head("/tei.v1.Info/Info", **{"grpc-encoding": "gzip"}))
    peer.h2.send_data(stream, bytes((flag,)) + framed(b"abc")[1:], end_stream=True)
    peer.flush()

    headers = dict((await peer.until(h2.events.ResponseReceived)).headers)

    assert (headers["grpc-status"], headers.get("grpc-accept-encoding")) == (status, encodings)


TEXTS = {
    "3 bytes": "\u6f22" * 2000,
    "1 + 3 bytes": "a" + "\u6f22" * 2000,
    "2 + 3 bytes": "ab" + "\u6f22" * 2000,
    "escapes": "%" * 2000,
    "plain": "x" * 9000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_a_status_message_is_bounded_as_it_is_sent(text: str, port: GrpcPort, connect: Connect) -> None:
    class Refusing(dict[str, object]):
        def get(self, path: str, default: object = None) -> object:
            async def refuse(call: rpc_stream.RpcStream) -> None:
                raise RpcStatusError(5, text)

            return refuse

    port._standard = Refusing(port._standard)  # type: ignore[assignment]
    peer = await connect()
    stream = peer.open(head("/any/Thing"))
    peer.h2.send_data(stream, framed(b""), end_stream=True)
    peer.flush()

    headers = dict((await peer.until(h2.events.ResponseReceived)).headers)

    message = unquote_to_bytes(headers["grpc-message"]).decode()
    assert headers["grpc-status"] == "5"
    assert text.startswith(message)
    assert 4080 < len(headers["grpc-message"]) <= 4096


async def test_collected_streams_do_not_wait_for_what_they_hold(connect: Connect) -> None:
    peer = await connect()
    one = framed(tei_pb2.RerankStreamRequest(query="q", text="x" * (MESSAGE // 8)).SerializeToString())
    streams = [peer.open(head("/tei.v1.Rerank/RerankStream")) for _ in range(3)]
    status: dict[str, str] = {}
    for _ in range(7):
        for stream in streams:
            assert peer.send(stream, one) == len(one)
        await peer.settled()
        status |= {
            k: v for event in peer.events if isinstance(event, h2.events.ResponseReceived) for k, v in event.headers
        }
        if status:
            break

    assert status["grpc-status"] == "8", "the budget of the connection is two messages of the largest size"
