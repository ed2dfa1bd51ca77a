"""Single calls through a real mux process, with a real client and a scripted worker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakSet

import grpc
import grpc.aio
import h2.events
import h2.settings
import pyarrow as pa
import pytest
from tests.http.garbage import left_in_cycles
from tests.support.frame_worker import TIMINGS, FrameWorker, Request, echo, hold
from tests.support.http_peers import connecting, framed, head
from tests.support.mux_process import MAX_MESSAGE_BYTES, Control, client, embed, running, stub, to
from tests.support.polling import eventually, on_uvloop

from teimgr.config.auth import ApiKeyEntry
from teimgr.errors import Code, error_from_code
from teimgr.http.auth.policy import Key, Policy, PolicyInForce, digest
from teimgr.http.server import bind
from teimgr.mux import handlers
from teimgr.mux.forwarding import CallCounters
from teimgr.mux.handlers import InferenceCall, MuxHandlers
from teimgr.mux.health import MuxHealth
from teimgr.mux.process import GrpcServer
from teimgr.spec import RouteEntry, RoutingSnapshot, State
from teimgr.wire.frames import Flag, Method
from teimgr.wire.grpc_core import health_reflection
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.router import Router
from teimgr.wire.status import PUSHBACK_KEY, STATUS

Status = grpc.StatusCode
STOPPED = RouteEntry("off", "quiet-model", State.STOPPED)
FAILED = RouteEntry("bad", "bad-model", State.FAILED, "no such model")


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.clause("M1.6-forwarded")
async def test_embed_reaches_the_worker_as_sent_and_comes_back_with_its_cost(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker()
    await control.push(running("a", worker))
    request = embed("hello")
    request.request.normalize = False

    call = stub(channel, "Embed")(request)
    headers = dict(await call.initial_metadata())

    assert list((await call).embeddings) == [5.0]
    seen: Request = await worker.requests.get()
    assert (seen.method, seen.flags, seen.payload) == (Method.EMBED, Flag.NONE, request.request.SerializeToString())
    assert 0 < seen.header.deadline_ms <= 30_000
    assert headers == {
        "x-compute-type": "gpu+optimized",
        "x-compute-time": "9",
        "x-compute-characters": "11",
        "x-compute-tokens": "5",
        "x-total-time": "9",
        "x-tokenization-time": "1",
        "x-queue-time": "2",
        "x-inference-time": "6",
    }


@pytest.mark.clause("M1.5-no-target", "M1.5-unknown-name", "M1.5-not-running")
@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        (None, Status.INVALID_ARGUMENT, "Missing target"),
        (mux_pb2.Target(), Status.INVALID_ARGUMENT, "No routing specified"),
        (to(""), Status.INVALID_ARGUMENT, "Instance name cannot be empty"),
        (to("nobody"), Status.NOT_FOUND, "Instance 'nobody' not found"),
        (to("A"), Status.NOT_FOUND, "Instance 'A' not found"),
        (to("off"), Status.UNAVAILABLE, "Instance 'off' is not running (status: stopped)"),
        (to("bad"), Status.UNAVAILABLE, "Instance 'bad' is not running (status: failed): no such model"),
        (mux_pb2.Target(model_id="x"), Status.NOT_FOUND, "No running instance of model 'x' found"),
        (mux_pb2.Target(model_id="quiet-model"), Status.NOT_FOUND, "No running instance of model 'quiet-model' found"),
        (mux_pb2.Target(instance_index=7), Status.NOT_FOUND, "Instance index 7 not found: there are 3 instances"),
    ],
)
@pytest.mark.parametrize("method", ["Embed", "EmbedArrow", "Info"])
async def test_a_target_that_leads_nowhere_says_why(
    control: Control, channel: Any, start_worker: Any, target: Any, status: Status, message: str, method: str
) -> None:
    await control.push(running("a", await start_worker()), STOPPED, FAILED)
    request = {
        "Embed": mux_pb2.EmbedRequest(target=target, request=tei_pb2.EmbedRequest(inputs="x")),
        "EmbedArrow": mux_pb2.EmbedArrowRequest(target=target, arrow_ipc=GOOD, noop=True),
        "Info": mux_pb2.InfoRequest(target=target),
    }[method]

    assert await failure(stub(channel, method)(request)) == (status, message)


def ipc(*columns: pa.Array, batches: int = 1) -> bytes:
    """An Arrow stream of equal batches."""
    batch = pa.record_batch(list(columns), names=[f"c{number}" for number in range(len(columns))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


GOOD = ipc(pa.array([1]), pa.array(["x"]))


@pytest.mark.clause("M1.8-order")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Invalid Arrow IPC: Expected schema message, found empty stream"),
        (b"x", "Invalid Arrow IPC: Expected schema message, found empty stream"),
        (b"\xff\xff\xff\xff\0\0\0\0", "Invalid Arrow IPC: Expected schema message, found empty stream"),
        (b"no arrow at all", "Invalid Arrow IPC: not an IPC stream (no continuation marker)"),
        (b"\xff\xff\xff\xff\x04\0\0\0\xff\xff\xff\xff", "Invalid Arrow IPC: a message header points outside"),
        (GOOD[: GOOD.rindex(b"\xff\xff\xff\xff", 0, -8) + 100], "Invalid Arrow IPC: a message claims"),
        (GOOD[GOOD.rindex(b"\xff\xff\xff\xff", 0, -8) :], "Invalid Arrow IPC: Expected schema message"),
        (ipc(pa.array(["x"]), batches=0), "No RecordBatch in stream"),
        (ipc(pa.array([1])), "No string column: expected `text` (a StringArray is needed)"),
    ],
)
@pytest.mark.parametrize("target", [to("nobody"), to("off"), mux_pb2.Target(model_id="x")])
@pytest.mark.parametrize("method", ["EmbedArrow", "EmbedSparseArrow"])
async def test_bad_arrow_for_nobody_is_bad_arrow(
    control: Control, channel: Any, content: bytes, message: str, target: Any, method: str
) -> None:
    await control.push(STOPPED)

    status, said = await failure(stub(channel, method)(mux_pb2.EmbedArrowRequest(target=target, arrow_ipc=content)))

    assert status is Status.INVALID_ARGUMENT
    assert said.startswith(message)


@pytest.mark.clause("M1.8-order")
@pytest.mark.parametrize(
    "texts",
    [
        pa.array(["x"]),
        pa.array(["x"], pa.large_string()),
        pa.array(["x"], pa.string_view()),
        pa.array(["x"]).dictionary_encode(),
    ],
)
async def test_good_arrow_for_nobody_is_not_found(control: Control, channel: Any, texts: pa.Array) -> None:
    for batches in (1, 2_000):
        request = mux_pb2.EmbedArrowRequest(target=to("nobody"), arrow_ipc=ipc(pa.array([1]), texts, batches=batches))

        assert await failure(stub(channel, "EmbedArrow")(request)) == (Status.NOT_FOUND, "Instance 'nobody' not found")


@pytest.mark.clause("M1.5-model-and-index")
@pytest.mark.parametrize("target", [mux_pb2.Target(model_id="model"), mux_pb2.Target(instance_index=1), to("a")])
async def test_every_way_of_naming_an_instance_works(
    control: Control, channel: Any, start_worker: Any, target: Any
) -> None:
    await control.push(STOPPED, running("a", await start_worker()))

    request = mux_pb2.EmbedRequest(target=target, request=tei_pb2.EmbedRequest(inputs="four"))
    answer = await stub(channel, "Embed")(request)

    assert list(answer.embeddings) == [4.0]


@pytest.mark.clause("M1.5-order")
@pytest.mark.parametrize(
    ("method", "request_type", "words"),
    [
        ("Embed", mux_pb2.EmbedRequest, "embed"),
        ("EmbedSparse", mux_pb2.EmbedSparseRequest, "embed_sparse"),
        ("EmbedAll", mux_pb2.EmbedAllRequest, "embed_all"),
        ("Predict", mux_pb2.PredictRequest, "predict"),
        ("PredictPair", mux_pb2.PredictPairRequest, "predict_pair"),
        ("Rerank", mux_pb2.RerankRequest, "rerank"),
        ("Tokenize", mux_pb2.EncodeRequest, "tokenize"),
        ("Decode", mux_pb2.DecodeRequest, "decode"),
    ],
)
async def test_checks_come_in_the_order_target_request_lookup(
    control: Control, channel: Any, method: str, request_type: Any, words: str
) -> None:
    call = stub(channel, method)

    assert await failure(call(request_type())) == (Status.INVALID_ARGUMENT, "Missing target")
    assert await failure(call(request_type(target=to("")))) == (
        Status.INVALID_ARGUMENT,
        "Instance name cannot be empty",
    )
    assert await failure(call(request_type(target=to("nobody")))) == (
        Status.INVALID_ARGUMENT,
        f"Missing {words} request",
    )


@pytest.mark.clause("M1.2-methods")
async def test_every_method_reaches_the_worker_under_its_own_number(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(lambda request: request.reply())
    await control.push(running("a", worker))
    requests = {
        "Info": (mux_pb2.InfoRequest(), Method.INFO),
        "EmbedSparse": (mux_pb2.EmbedSparseRequest(request={}), Method.EMBED_SPARSE),
        "EmbedAll": (mux_pb2.EmbedAllRequest(request={}), Method.EMBED_ALL),
        "EmbedSparseArrow": (mux_pb2.EmbedSparseArrowRequest(), Method.EMBED_SPARSE_ARROW),
        "Predict": (mux_pb2.PredictRequest(request={}), Method.PREDICT),
        "PredictPair": (mux_pb2.PredictPairRequest(request={}), Method.PREDICT_PAIR),
        "Rerank": (mux_pb2.RerankRequest(request={}), Method.RERANK),
        "Tokenize": (mux_pb2.EncodeRequest(request={}), Method.TOKENIZE),
        "Decode": (mux_pb2.DecodeRequest(request={}), Method.DECODE),
    }

    for name, (request, method) in requests.items():
        request.target.instance_name = "a"
        await stub(channel, name)(request)
        assert (await worker.requests.get()).method == method


@pytest.mark.clause("M1.8-no-timeout")
async def test_an_arrow_message_goes_whole_in_the_bulk_lane_without_a_server_deadline(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(
        lambda request: request.reply(mux_pb2.EmbedArrowResponse(arrow_ipc=b"vectors").SerializeToString())
    )
    await control.push(running("a", worker))
    request = mux_pb2.EmbedArrowRequest(target=to("a"), arrow_ipc=b"texts" * 100_000, truncate=True, noop=True)

    answer = await stub(channel, "EmbedArrow")(request)

    assert answer.arrow_ipc == b"vectors"
    seen: Request = await worker.requests.get()
    assert seen.payload == request.SerializeToString()
    assert seen.flags == Flag.BULK | Flag.WAIT
    assert seen.header.deadline_ms == 0


@pytest.mark.clause("M1.6-forwarded")
async def test_a_large_answer_comes_through_untouched(control: Control, channel: Any, start_worker: Any) -> None:
    content = bytes(range(256)) * 7_000
    worker = await start_worker(
        lambda request: request.reply(mux_pb2.EmbedArrowResponse(arrow_ipc=content).SerializeToString())
    )
    await control.push(running("a", worker))
    call = stub(channel, "EmbedArrow")

    answers = await asyncio.gather(*(call(mux_pb2.EmbedArrowRequest(target=to("a"))) for _ in range(8)))

    assert all(answer.arrow_ipc == content for answer in answers)


@pytest.mark.clause("M1.6-errors")
@pytest.mark.parametrize("code", Code)
async def test_the_workers_error_keeps_its_code_and_sentence(
    control: Control, channel: Any, start_worker: Any, code: Code
) -> None:
    worker = await start_worker(lambda request: request.fail(error_from_code(code, f"because of ünïcode {code}")))
    await control.push(running("a", worker))

    status, message = await failure(stub(channel, "Embed")(embed("x")))

    assert status.value[0] == STATUS[code].grpc
    assert message == f"because of ünïcode {code}"


async def test_malformed_bytes_are_the_callers_fault(control: Control, channel: Any) -> None:
    call = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/Embed")

    status, message = await failure(call(b"\x0a\xff"))

    assert status is Status.INVALID_ARGUMENT
    assert message.startswith("Malformed message")


@pytest.mark.clause("M1.1-unknown-path")
async def test_an_unknown_method_is_unimplemented(control: Control, channel: Any) -> None:
    for path in ("/tei_multiplexer.v1.TeiMultiplexer/Nothing", "/tei.v1.Embed/Nothing", "/tei.v2.Embed/Embed"):
        status, _ = await failure(channel.unary_unary(path)(b""))

        assert status is Status.UNIMPLEMENTED


async def test_a_name_too_long_for_a_trailer_is_still_answered(control: Control, channel: Any) -> None:
    status, message = await failure(stub(channel, "Embed")(embed("x", "n" * 100_000)))

    assert status is Status.NOT_FOUND
    assert message.startswith("Instance 'nnn")


@pytest.mark.clause("M1.10-size")
async def test_a_message_over_the_limit_is_refused_naming_both_sizes(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(echo)
    await control.push(running("a", worker))

    status, message = await failure(stub(channel, "Embed")(embed("x" * MAX_MESSAGE_BYTES)))

    assert status is Status.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in message
    assert str(embed("x" * MAX_MESSAGE_BYTES).ByteSize()) in message

    worker.script = lambda request: request.reply(b"x" * (MAX_MESSAGE_BYTES + 1))
    status, message = await failure(stub(channel, "Embed")(embed("x")))

    assert status is Status.RESOURCE_EXHAUSTED
    assert message == f"Reply message larger than max ({MAX_MESSAGE_BYTES + 1} vs. {MAX_MESSAGE_BYTES} bytes)"


async def test_a_client_that_cancels_reaches_the_worker(control: Control, channel: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    call = stub(channel, "Embed")(embed("x"))
    request = await worker.requests.get()

    call.cancel()

    assert await worker.cancels.get() == request.header.id


@pytest.mark.clause("M1.6-client-deadline")
async def test_the_clients_deadline_travels_to_the_worker_and_cancels_there(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))

    status, _ = await failure(stub(channel, "Embed")(embed("x"), timeout=0.3))
    request = await worker.requests.get()

    assert status is Status.DEADLINE_EXCEEDED
    assert 0 < request.header.deadline_ms <= 300
    assert await worker.cancels.get() == request.header.id


@pytest.mark.clause("M1.6-timeout")
async def test_the_servers_own_limit_is_a_request_timeout(start_mux: Any, start_worker: Any) -> None:
    control = await Control.connect(start_mux(request_timeout_s=0.05))
    worker: FrameWorker = await start_worker(hold)

    async with client(await control.push(running("a", worker))) as channel:
        assert await failure(stub(channel, "Embed")(embed("x"))) == (Status.DEADLINE_EXCEEDED, "Request timeout")
        assert await worker.cancels.get() == (await worker.requests.get()).header.id
    await control.close()


async def test_calls_in_flight_fail_as_unavailable_when_the_worker_dies(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    calls = [stub(channel, "Embed")(embed("x")) for _ in range(5)]
    for _ in calls:
        await worker.requests.get()

    worker.drop()

    for call in calls:
        assert await failure(call) == (Status.UNAVAILABLE, "Instance 'a' lost its worker: the connection closed")
    assert await failure(stub(channel, "Embed")(embed("x"))) == (
        Status.UNAVAILABLE,
        "Instance 'a' is not running (status: restarting): its worker is gone",
    )
    await control.push(running("a", await start_worker()))
    assert list((await stub(channel, "Embed")(embed("back"))).embeddings) == [4.0]


async def test_a_worker_that_cannot_be_reached_is_unavailable(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker()
    worker.drop()
    await control.push(running("a", worker))

    status, message = await failure(stub(channel, "Embed")(embed("x")))

    assert status is Status.UNAVAILABLE
    assert message.startswith("Failed to connect to backend: ")


async def test_a_removed_instance_finishes_its_calls_and_takes_no_more(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    call = stub(channel, "Embed")(embed("x"))
    request = await worker.requests.get()

    await control.push()

    assert await failure(stub(channel, "Embed")(embed("x"))) == (Status.NOT_FOUND, "Instance 'a' not found")
    request.reply(tei_pb2.EmbedResponse(embeddings=[1.0]).SerializeToString(), TIMINGS)
    assert list((await call).embeddings) == [1.0]
    await worker.lost.get()


async def test_calls_spread_over_the_replicas_of_an_instance(control: Control, channel: Any, start_worker: Any) -> None:
    one: FrameWorker = await start_worker(hold)
    two: FrameWorker = await start_worker(hold)
    await control.push(running("a", one, two))

    calls = [stub(channel, "Embed")(embed("x")) for _ in range(10)]
    requests = [await worker.requests.get() for worker in (one, two) for _ in range(5)]

    for request in requests:
        request.reply()
    await asyncio.gather(*calls)


@pytest.mark.clause("M1.1-many-streams")
async def test_a_thousand_calls_at_once_each_get_their_own_answer(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker()), running("b", await start_worker()))
    call = stub(channel, "Embed")

    answers = await asyncio.gather(*(call(embed("x" * n, "ab"[n % 2])) for n in range(1, 1001)))

    assert [answer.embeddings[0] for answer in answers] == list(range(1, 1001))


async def test_clients_that_give_up_at_any_moment_harm_nobody(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker()))
    call = stub(channel, "Embed")
    chance = random.Random(7)

    async def give_up() -> None:
        fickle = call(embed("x"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.01):
                await fickle.code()
        fickle.cancel()

    for _ in range(10):
        await asyncio.gather(*(give_up() for _ in range(50)))

    assert list((await call(embed("still here"))).embeddings) == [10.0]


async def test_calls_are_counted_by_method_instance_and_status(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("counted", await start_worker()))
    await stub(channel, "Embed")(embed("x", "counted"))
    await failure(stub(channel, "Embed")(embed("x", "never-seen")))

    stats = await control.stats()

    assert {"method": "Embed", "instance": "counted", "status": "OK", "count": 1} in stats["calls"]
    assert all(row["instance"] != "never-seen" for row in stats["calls"])
    latency = next(row for row in stats["latency"] if row["instance"] == "counted")
    assert sum(latency["buckets"]) == latency["messages"] == 1
    assert len(latency["buckets"]) == len(stats["bounds_s"]) + 1


EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed"


LIMIT_S = 20


class Server:
    """The handlers of a mux on a port of this process."""

    def __init__(self, policy: Policy, *entries: RouteEntry, charges: bool = True) -> None:
        self._policy = PolicyInForce(policy)
        self._charges = charges
        self._router = Router(LinkLimits())
        self._router.update(RoutingSnapshot(entries))

    async def __aenter__(self) -> int:
        options: dict[str, Any] = {"request_timeout_s": 0, "window": 8, "policy": self._policy, "health": MuxHealth()}
        options["charges"] = lambda: self._charges
        self._server = GrpcServer(MuxHandlers(self._router, CallCounters(()), **options).protocol)
        sock = bind("127.0.0.1", 0)
        self._server.add(sock)
        await self._server.start()
        return int(sock.getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._router.close()


@contextlib.asynccontextmanager
async def open_server() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server without authentication, for `LIMIT_S` seconds."""
    async with (
        Server(Policy()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        yield channel


async def nothing() -> AsyncIterator[bytes]:
    """A request stream that never has a message."""
    await asyncio.Event().wait()
    yield b""


async def test_a_call_without_the_key_ends_before_its_message_has_come() -> None:
    policy = Policy(keys=(Key("a", digest("teimgr_" + "x" * 20), ("inference",)),))
    async with Server(policy) as port, connecting("127.0.0.1", port) as connect, asyncio.timeout(LIMIT_S):
        peer = await connect()
        stream = peer.open(head(EMBED))
        peer.send(stream, framed(b"x" * 1000, 3_000_000))

        headers = dict((await peer.until(h2.events.ResponseReceived)).headers)

        assert headers["grpc-status"] == "16"


async def test_a_key_with_a_quota_is_refused_by_name_where_nothing_charges_it() -> None:
    given = {"rights": ("inference",)}
    quotas: dict[str, dict[str, Any]] = {
        "metered": {"tokens_per_day": 5},
        "free": {},
        "shadow": {"tokens_per_day": 5, "shadow": True},
    }
    keys = [ApiKeyEntry(name=name, key=f"{name}_{'x' * 20}", **given, **more) for name, more in quotas.items()]
    policy = Policy.from_json(Policy(keys=tuple(key.read() for key in keys)).to_json())
    found: dict[tuple[str, bool], str] = {}
    for charges in (True, False):
        async with (
            Server(policy, charges=charges) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            asyncio.timeout(LIMIT_S),
        ):
            for key in keys:
                metadata = (("authorization", f"Bearer {key.name}_{'x' * 20}"),)
                call = channel.unary_unary(EMBED)(embed("x").SerializeToString(), metadata=metadata)
                found[key.name, charges] = f"{(await call.code()).name}: {await call.details()}"
    refused = "The key 'metered' has a quota, which the daemon's host alone charges: call the gRPC port there"
    assert found.pop(("metered", False)) == f"PERMISSION_DENIED: {refused}"
    assert {each.partition(":")[0] for each in found.values()} == {"NOT_FOUND"}  # it has no instance


@on_uvloop
async def test_calls_of_a_lost_connection_are_freed_without_a_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 calls with a key kept 60 MiB: a collection of 130,000 objects, which holds the loop for 0.3 s."""
    policy = Policy(keys=(Key("a", digest("teimgr_" + "x" * 20), ("inference",)),))
    alive: WeakSet[InferenceCall] = WeakSet()

    class Watched(InferenceCall):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

    monkeypatch.setattr(handlers, "InferenceCall", Watched)
    async with Server(policy) as port, asyncio.timeout(LIMIT_S):

        async def announce_and_leave() -> None:
            async with connecting("127.0.0.1", port) as connect:
                peer = await connect()
                for _ in range(5):
                    stream = peer.open(head(EMBED, authorization=f"Bearer teimgr_{'x' * 20}"))
                    peer.send(stream, framed(b"x", 3_000_000))
                await eventually(lambda: len(alive) == 5)

        assert not await left_in_cycles(announce_and_leave, lambda: eventually(lambda: not alive, 5))


@pytest.mark.parametrize(
    "path",
    [
        EMBED,
        "/tei_multiplexer.v1.TeiMultiplexer/EmbedStream",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_message_that_does_not_come_ends_its_call(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_MESSAGE_S", "STREAM_PAUSE_S"):
        monkeypatch.setattr(handlers, limit, 0.2)
    monkeypatch.setattr(health_reflection, "MESSAGE_S", 0.2)
    async with open_server() as channel:
        first, second = (channel.stream_unary(path)(nothing()) for _ in range(2))

        assert await first.code() is await second.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2" in await first.details()


async def test_calls_without_a_message_are_bounded_and_end_and_leave_their_places_to_others(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 100
    monkeypatch.setattr(handlers, "_OPEN_CALLS", 2 * calls)  # of which a caller leaves half
    monkeypatch.setattr(handlers, "_MESSAGE_S", 2)
    entry = running("a", await start_worker(Request.reply))

    async with (
        Server(Policy(), entry) as port,
        connecting("127.0.0.1", port) as connect,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        for _ in range(2):
            silent = await connect()
            for _ in range(calls):
                silent.open(head(EMBED))
            await silent.settled()

            code, why = await failure(channel.stream_unary(EMBED)(nothing()))
            assert (code, why.split(";")[0]) == (Status.RESOURCE_EXHAUSTED, "Too many calls have sent no message yet")
            whole = silent.h2.get_next_available_stream_id()  # head and message in one segment: it does not wait
            silent.h2.send_headers(whole, head(EMBED))
            silent.h2.send_data(whole, framed(embed("x").SerializeToString()), end_stream=True)
            silent.flush()
            while (await silent.until(h2.events.TrailersReceived)).stream_id != whole:
                await silent.take()

            ended: list[str] = []
            while len(ended) < calls:
                await silent.take()
                answers = [each for each in silent.events if isinstance(each, h2.events.ResponseReceived)]
                ended = [dict(each.headers)["grpc-status"] for each in answers if each.stream_id != whole]
            assert ended == ["4"] * calls

        assert await stub(channel, "Embed")(embed("served when they are free"))


async def test_calls_without_a_message_of_one_key_leave_places_to_another(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_OPEN_CALLS", 8)
    keys = tuple(Key(name, digest(name * 40), ("inference",)) for name in ("a", "b"))

    async with (
        Server(Policy(keys=keys), running("a", await start_worker(Request.reply))) as port,
        connecting("127.0.0.1", port) as connect,
        asyncio.timeout(LIMIT_S),
    ):
        silent, other = await connect(), await connect()
        for _ in range(20):
            silent.open([*head(EMBED), ("authorization", f"Bearer {'a' * 40}")])
        await silent.settled()

        late = other.open([*head(EMBED), ("authorization", f"Bearer {'b' * 40}")])
        await other.settled()  # its message comes after its head
        other.h2.send_data(late, framed(embed("x").SerializeToString()), end_stream=True)
        other.flush()
        assert dict((await other.until(h2.events.TrailersReceived)).headers)["grpc-status"] == "0"


async def test_replies_of_a_stream_that_are_not_read_are_charged(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_HELD_BYTES", 40_000)  # a connection a quarter
    reply = tei_pb2.EmbedAllResponse(
        token_embeddings=[tei_pb2.TokenEmbedding(embeddings=[1] * 250)]
    ).SerializeToString()
    answered = 0

    def answer(request: Request) -> None:
        nonlocal answered
        answered += 1
        request.reply(reply)

    worker = await start_worker(answer)
    path = "/tei_multiplexer.v1.TeiMultiplexer/EmbedAllStream"
    request = mux_pb2.EmbedAllRequest(target=to("a"), request=tei_pb2.EmbedAllRequest(inputs="x"))

    async with (
        Server(Policy(), running("a", worker)) as port,
        connecting("127.0.0.1", port) as connect,
        asyncio.timeout(LIMIT_S),
    ):
        silent = await connect()
        silent.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stream = silent.open(head(path))
        for _ in range(60):  # one behind the other: each reply arrives before the next is read
            silent.h2.send_data(stream, framed(request.SerializeToString()))
            silent.flush()
            await silent.settled()
        assert 10_000 // len(reply) <= answered < 20


async def test_a_call_that_ends_without_a_message_is_invalid() -> None:
    async with open_server() as channel:
        call = channel.stream_unary(EMBED)(iter(()))

        assert (await call.code(), await call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "Missing message")


async def test_client_streams_of_one_connection_hold_a_part_of_the_budget(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_HELD_BYTES", 8000)
    request = mux_pb2.RerankStreamRequest(
        target=to("a"), request=tei_pb2.RerankStreamRequest(query="q", text="x" * 1500)
    )

    async with Server(Policy(), running("a", await start_worker(Request.reply))) as port, asyncio.timeout(LIMIT_S):
        options = (("grpc.use_local_subchannel_pool", 1),)  # a connection for each channel
        one, other = (grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(2))
        async with one, other:
            calls = [stub(channel, "RerankStream")() for channel in (one, one, other)]
            for call in calls:
                await call.write(request)
            await calls[2].done_writing()
            ended = [asyncio.ensure_future(call.code()) for call in calls[:2]]
            [refused], _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)

            assert refused.result() is Status.RESOURCE_EXHAUSTED
            assert dict(await calls[ended.index(refused)].trailing_metadata())[PUSHBACK_KEY] == "1000"
            assert await calls[2].code() is Status.OK
            for call in calls:
                call.cancel()


async def test_replies_that_some_clients_do_not_read_hold_up_no_others(
    start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_HELD_BYTES", 400)
    worker = await start_worker(
        lambda request: request.reply(tei_pb2.EmbedResponse(embeddings=[1] * 100).SerializeToString())
    )

    async with (
        Server(Policy(), running("a", worker)) as port,
        connecting("127.0.0.1", port) as connect,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        for _ in range(5):
            silent = await connect()
            silent.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
            for _ in range(3):
                stream = silent.open(head(EMBED))
                silent.h2.send_data(stream, framed(embed("x").SerializeToString()), end_stream=True)
                silent.flush()
            await silent.until(h2.events.ResponseReceived)

        assert len((await stub(channel, "Embed")(embed("x"))).embeddings) == 100


async def test_a_message_of_many_fields_holds_up_no_other_call(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux(max_message_bytes=40 * 2**20)
    control = await Control.connect(mux)
    await control.push(running("a", await start_worker()))
    monster = to("a").SerializeToString()
    monster = b"\x0a" + bytes((len(monster),)) + monster + b"\x78\0" * (39 * 2**19)
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    address = f"127.0.0.1:{(await control.stats())['port']}"
    async with (
        grpc.aio.insecure_channel(address, options) as heavy,
        grpc.aio.insecure_channel(address, options) as light,
        asyncio.timeout(60),
    ):
        raw = heavy.unary_unary(EMBED)
        sent = [asyncio.ensure_future(failure(raw(monster))) for _ in range(3)]
        slowest = 0.0
        while not all(each.done() for each in sent):
            began = time.monotonic()
            await stub(light, "Embed")(embed("x"))
            slowest = max(slowest, time.monotonic() - began)
        for each in sent:
            assert await each == (Status.INVALID_ARGUMENT, "The message has more than 128 fields")
    assert slowest < 5, "scanning them took half a minute each"
    await control.close()


async def test_one_key_holds_a_part_of_the_budget(start_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_HELD_BYTES", 64_000)
    keys = tuple(Key(name, digest(name * 40), ("inference",)) for name in ("a", "b"))
    request = mux_pb2.RerankStreamRequest(
        target=to("a"), request=tei_pb2.RerankStreamRequest(query="q", text="x" * 7000)
    )

    async with (
        Server(Policy(keys=keys), running("a", await start_worker(Request.reply))) as port,
        contextlib.AsyncExitStack() as stack,
        asyncio.timeout(LIMIT_S),
    ):
        options = (("grpc.use_local_subchannel_pool", 1),)  # a connection for each channel
        calls = []
        for name in "aaaaaaab":
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options))
            calls.append(stub(channel, "RerankStream")(metadata=(("authorization", f"Bearer {name * 40}"),)))
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await calls[-1].write(request)
        refused = [asyncio.ensure_future(call.code()) for call in calls[:-1]]
        done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result() for each in done} == {Status.RESOURCE_EXHAUSTED}
        await calls[-1].done_writing()
        assert await calls[-1].code() is Status.OK
        for call in calls:
            call.cancel()
