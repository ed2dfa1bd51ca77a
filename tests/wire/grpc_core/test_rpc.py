"""RPCs: the rows of their table; over HTTP/2, bytes that are not read, messages that do not come, slow readers."""

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
from teimgr.wire.frames import Flag, Method
from teimgr.wire.grpc_core import health_reflection, rpc
from teimgr.wire.grpc_core.rpc import BY_PATH, RPCS, SERVICE, SERVICES, PayloadSource, Rpc, RpcStatusError, Shape
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
    monkeypatch.setattr(rpc, "MESSAGE_S", 0.2)
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
            async def refuse(call: rpc.RpcStream) -> None:
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


MUX = "tei_multiplexer.v1.TeiMultiplexer"
TEI = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
ARROW = "teimgr.v1.Arrow"


def rpc_of(name: str, service: str = MUX) -> Rpc:
    return BY_PATH[f"/{service}/{name}"]


def rows(*services: str) -> list[Rpc]:
    return [each for each in RPCS if each.service in services]


@pytest.mark.clause("M1.4-services")
def test_every_method_of_every_service_has_a_row() -> None:
    assert (*TEI, MUX, ARROW) == SERVICES
    assert [each.name for each in rows(MUX)] == [method.name for method in SERVICE.methods]
    assert (len(rows(MUX)), len(rows(*TEI)), len(rows(ARROW))) == (20, 17, 2)


def test_a_method_of_tei_asks_the_same_of_a_worker_as_its_namesake_of_the_multiplexer() -> None:
    for each in rows(*TEI):
        twin = rpc_of(each.name)
        same = ("name", "shape", "method", "lane", "limited", "reports_compute")
        assert [getattr(each, name) for name in same] == [getattr(twin, name) for name in same]
        assert each.payload is PayloadSource.WHOLE
        assert not each.has_target
        assert twin.has_target


def test_teimgr_s_own_arrow_calls_are_batches_with_a_target() -> None:
    unary, stream = rows(ARROW)

    assert (unary.name, unary.shape, stream.name, stream.shape) == ("Infer", Shape.UNARY, "InferStream", Shape.BIDI)
    for each in (unary, stream):
        assert each.method is Method.INFER_ARROW
        assert each.has_target
        assert (each.arrow_field, each.payload, each.lane) == (2, PayloadSource.WHOLE, Flag.BULK | Flag.WAIT)


@pytest.mark.clause("M1.5-missing-request")
@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Embed", "Missing embed request"),
        ("EmbedStream", "Missing embed request"),
        ("EmbedSparse", "Missing embed_sparse request"),
        ("EmbedAll", "Missing embed_all request"),
        ("Predict", "Missing predict request"),
        ("PredictPair", "Missing predict_pair request"),
        ("Rerank", "Missing rerank request"),
        ("Tokenize", "Missing tokenize request"),
        ("Decode", "Missing decode request"),
    ],
)
def test_a_missing_inner_request_is_named_as_the_contract_names_it(name: str, missing: str) -> None:
    assert rpc_of(name).missing == missing


@pytest.mark.clause("M1.2-methods")
def test_shapes_are_those_of_the_proto() -> None:
    shapes = {each.name: each.shape for each in rows(MUX)}

    assert shapes.pop("RerankStream") is Shape.CLIENT_STREAM
    assert all(shape is (Shape.BIDI if name.endswith("Stream") else Shape.UNARY) for name, shape in shapes.items())


def test_every_method_has_a_frame() -> None:
    assert [each.path for each in RPCS if each.method is None] == []
    assert rpc_of("RerankStream").method is Method.RERANK_STREAM
    assert rpc_of("EmbedAllStream").method is Method.EMBED_ALL
    assert rpc_of("TokenizeStream").method is Method.TOKENIZE
    assert rpc_of("EmbedArrowStream").method is rpc_of("EmbedArrow").method is Method.EMBED_ARROW
    assert rpc_of("EmbedSparseArrow").method is Method.EMBED_SPARSE_ARROW


def test_arrow_messages_travel_whole_and_in_bulk_and_a_rerank_waits_for_room() -> None:
    arrow = {each.name for each in rows(MUX) if each.arrow_field}

    assert arrow == {"EmbedArrow", "EmbedArrowStream", "EmbedSparseArrow"}
    assert all(each.payload is PayloadSource.WHOLE for each in rows(MUX) if each.name in arrow)
    assert {each.name: each.lane for each in rows(MUX) if each.lane} == {
        **dict.fromkeys(arrow, Flag.BULK | Flag.WAIT),
        "Rerank": Flag.WAIT,
        "RerankStream": Flag.WAIT,
    }


@pytest.mark.clause("M1.6-timeout", "M8-timeout-zero")
def test_only_single_calls_have_the_configured_timeout() -> None:
    limited = {each.name for each in rows(MUX) if each.limited}

    assert limited == {
        "Info", "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "Tokenize", "Decode",
    }  # fmt: skip


@pytest.mark.clause("M1.6-cost-metadata")
def test_compute_headers_are_told_by_the_methods_that_compute() -> None:
    assert {each.name for each in rows(MUX) if each.reports_compute} == {
        "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "RerankStream",
    }  # fmt: skip
