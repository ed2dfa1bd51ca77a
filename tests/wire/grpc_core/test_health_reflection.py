"""Health watches and reflection answers, without a transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import h2.events
import h2.settings
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.support.http_peers import LIMIT_S, Peer, connecting, framed, head, hello
from tests.support.polling import eventually
from tests.worker.test_dispatcher import FakeEngine

from teimgr.engine.engine import Engine
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.http.byte_budget import ByteBudget
from teimgr.http.http1 import ListenerState
from teimgr.http.http2.connection import Connection
from teimgr.http.server import bind, serving
from teimgr.mux.forwarding import CallCounters
from teimgr.mux.handlers import MuxHandlers
from teimgr.mux.health import MuxHealth
from teimgr.mux.process import GrpcServer
from teimgr.spec import WorkerSpec
from teimgr.wire.grpc_core import health_reflection
from teimgr.wire.grpc_core.health_reflection import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthService, Reflection
from teimgr.wire.grpc_core.rpc import FILES
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.router import Router
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port import GrpcPort


class Health(HealthService):
    """Statuses that the test sets."""

    def __init__(self, poll_s: float | None = None) -> None:
        super().__init__(poll_s)
        self.statuses: dict[str, int] = {"": SERVING}
        self.sent: asyncio.Queue[int] = asyncio.Queue()

    def status_of(self, service: str) -> int | None:
        return self.statuses.get(service)

    async def send(self, response: health_pb2.HealthCheckResponse) -> None:
        self.sent.put_nowait(response.status)


async def test_a_watch_sends_each_change_once_until_the_stop() -> None:
    health = Health()
    watch = asyncio.create_task(health.watch("a", health.send))

    assert await health.sent.get() == SERVICE_UNKNOWN
    for status in (SERVING, NOT_SERVING):
        health.statuses["a"] = status
        health.notify()
        health.notify()
        assert await health.sent.get() == status
    health.stop()
    await watch

    assert health.sent.empty()


async def test_a_stop_during_the_send_of_a_status_is_not_missed() -> None:
    health = Health()

    async def send(response: health_pb2.HealthCheckResponse) -> None:
        await health.send(response)
        health.statuses[""] = NOT_SERVING
        health.stop()

    await health.watch("", send)

    assert [health.sent.get_nowait() for _ in range(2)] == [SERVING, NOT_SERVING]


async def test_a_polled_service_needs_no_notification() -> None:
    health = Health(poll_s=0.01)
    watch = asyncio.create_task(health.watch("", health.send))
    assert await health.sent.get() == SERVING

    health.statuses[""] = NOT_SERVING

    assert await asyncio.wait_for(health.sent.get(), 10) == NOT_SERVING
    health.stop()
    await watch


@pytest.mark.parametrize(
    ("question", "code", "message"),
    [
        ({}, 3, "invalid argument"),
        ({"file_containing_symbol": "no.Such"}, 5, "not found"),
        ({"file_containing_symbol": "tei.v1.Embed.Nothing"}, 5, "not found"),
        ({"file_by_filename": "no.proto"}, 5, "not found"),
        ({"all_extension_numbers_of_type": "no.Such"}, 5, "not found"),
        (
            {"file_containing_extension": {"containing_type": "tei.v1.EmbedRequest", "extension_number": 9}},
            5,
            "not found",
        ),
    ],
)
def test_what_does_not_exist_is_an_error_with_the_request(question: Any, code: int, message: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(host="h", **question)

    answer = Reflection(FILES).answer(request)

    assert (answer.error_response.error_code, answer.error_response.error_message) == (code, message)
    assert answer.original_request == request


def test_a_file_comes_with_its_imports_each_once_and_a_message_has_its_extensions() -> None:
    reflection = Reflection(FILES)

    answer = reflection.answer(reflection_pb2.ServerReflectionRequest(file_by_filename=FILES[1].name))
    extensions = reflection.answer(
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="tei.v1.EmbedRequest")
    )

    files = answer.file_descriptor_response.file_descriptor_proto
    assert len(files) == 1 + len(FILES[1].dependencies)
    assert len(set(files)) == len(files)
    assert extensions.all_extension_numbers_response.base_type_name == "tei.v1.EmbedRequest"
    assert list(extensions.all_extension_numbers_response.extension_number) == []


CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
RESOURCE_EXHAUSTED = "8"


@dataclass
class Port:
    """A server; `budget` is that of the messages of inference, `state` has its connections and tasks."""

    address: tuple[str, int]
    budget: ByteBudget
    state: ListenerState
    connect: Callable[[], Awaitable[Peer]]


@pytest.fixture(params=["mux", "instance port"])
async def port(request: Any) -> AsyncIterator[Port]:
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    if request.param == "mux":
        router = Router(LinkLimits())
        policy = PolicyInForce(Policy())
        options: dict[str, Any] = {"request_timeout_s": 0, "window": 8, "policy": policy, "health": MuxHealth()}
        handlers = MuxHandlers(router, CallCounters(()), charges=lambda: True, **options)
        server = GrpcServer(handlers.protocol)
        server.add(sock)
        await server.start()
        async with connecting(*address) as connect, asyncio.timeout(LIMIT_S):
            yield Port(address, handlers._held, server._state, connect)
        await server.stop(None)
        await router.close()
    else:
        dispatcher = Dispatcher(WorkerSpec(name="a", model_id="m", port=1, max_message_bytes=40 * 2**20))
        dispatcher._engine = cast(Engine, FakeEngine())
        async with (
            serving(hello, sock, GrpcPort(dispatcher).protocol) as listener,
            connecting(*address) as connect,
            asyncio.timeout(LIMIT_S),
        ):
            yield Port(address, dispatcher.port_budget, listener._server.server_state, connect)


def call(peer: Peer, path: str, body: bytes = b"", *, end: bool = True) -> int:
    """Send head and body of a call in one segment."""
    stream = peer.h2.get_next_available_stream_id()
    peer.h2.send_headers(stream, head(path))
    peer.h2.send_data(stream, body, end_stream=end)
    peer.flush()
    return stream


@pytest.fixture
def three_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the port: a caller leaves as many places as it takes."""
    monkeypatch.setattr(health_reflection, "MAX_OPEN", 6)


async def status_of(peer: Peer, stream: int) -> dict[str, str]:
    """The headers that have the status of a call."""
    while True:
        for event in peer.events:
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived) and event.stream_id == stream:
                fields = cast(dict[str, str], dict(event.headers))
                if "grpc-status" in fields:
                    return fields
        await peer.take()


async def reads_nothing(port: Port) -> Peer:
    """A client that lets no reply through."""
    peer = await port.connect()
    peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    peer.flush()
    await peer.settled()
    return peer


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECT])
async def test_an_announced_message_takes_nothing_from_inference(port: Port, path: str) -> None:
    peer = await port.connect()
    small = peer.open(head(path))
    peer.send(small, framed(b"", health_reflection.MAX_MESSAGE_BYTES))
    large = peer.open(head(path))
    peer.send(large, framed(b"", 40 * 2**20))

    assert (await status_of(peer, large))["grpc-status"] == RESOURCE_EXHAUSTED
    assert len(port.state.tasks) == 1, "the small one waits"
    assert port.budget.taken_bytes == 0


async def test_a_reflection_reply_repeats_no_large_request(port: Port) -> None:
    peer = await port.connect()
    request = reflection_pb2.ServerReflectionRequest(host="h" * 5000, list_services="")

    refused = await status_of(peer, call(peer, REFLECT, framed(request.SerializeToString())))

    assert refused["grpc-status"] == RESOURCE_EXHAUSTED
    assert "larger than max (50" in refused["grpc-message"]


async def test_calls_whose_replies_are_not_read_are_bounded(three_a_caller: None, port: Port) -> None:
    silent = await reads_nothing(port)

    for _ in range(10):
        call(silent, CHECK, framed(b""))

    await eventually(lambda: len(port.state.tasks) == 3)
    ended = [await status_of(silent, stream) for stream in (7, 19)]
    assert [each["grpc-status"] for each in ended] == [RESOURCE_EXHAUSTED] * 2
    assert len(port.state.tasks) == 3


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECT])
async def test_calls_that_wait_keep_no_check_of_others_from_its_answer(
    three_a_caller: None, port: Port, path: str
) -> None:
    idle, other = await port.connect(), await port.connect()
    first, *_, last = [call(idle, path, framed(b"") if path == WATCH else b"", end=False) for _ in range(4)]

    assert (await status_of(idle, last))["grpc-status"] == RESOURCE_EXHAUSTED
    for _ in range(5):
        assert (await status_of(other, call(other, CHECK, framed(b""))))["grpc-status"] == "0"
    symbol = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    assert (await status_of(other, call(other, REFLECT, framed(symbol))))["grpc-status"] == "0"

    idle.h2.reset_stream(first)
    idle.flush()
    await idle.settled()
    watch = call(other, WATCH, framed(b""))
    while [event for event in other.events if isinstance(event, h2.events.DataReceived)][-1].stream_id != watch:
        await other.take()
    assert len(port.state.tasks) == 3, "in the place of the one that ended"


async def test_a_status_does_not_wait_for_a_client_that_does_not_read(port: Port) -> None:
    peer = await port.connect()
    (connection,) = port.state.connections
    cast(Connection, connection).sender.pause()

    ended = await status_of(peer, call(peer, "/grpc.health.v1.Health/Nothing", framed(b"")))

    assert ended["grpc-status"] == "12"
    request = health_pb2.HealthCheckRequest().SerializeToString()
    call(peer, CHECK, framed(request))
    await peer.settled()
    assert len(port.state.tasks) == 1, "but a reply does"
