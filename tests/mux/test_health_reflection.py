"""Reflection under both names, and health that follows the directory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.mux.test_forwarding import ending, lengths_of
from tests.support.frame_worker import TIMINGS, FrameWorker, echo, hold
from tests.support.http_peers import Feed, reflection
from tests.support.mux_process import Control, client, running, stub

from teimgr.errors import WrongModelKind
from teimgr.mux.health import MuxHealth
from teimgr.spec import RouteEntry, State
from teimgr.wire.frames import Flag, Method
from teimgr.wire.grpc_core.rpc import RPCS, Shape
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2, frames_pb2

MUX = "tei_multiplexer.v1.TeiMultiplexer"
TEI = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture(params=["v1", "v1alpha"])
def reflect(request: Any, channel: Any) -> Any:
    return reflection(channel, request.param)


def files(answer: Any) -> dict[str, FileDescriptorProto]:
    protos = (FileDescriptorProto.FromString(raw) for raw in answer.file_descriptor_response.file_descriptor_proto)
    return {proto.name: proto for proto in protos}


@pytest.mark.clause("M1.10-reflection")
async def test_every_service_is_listed(reflect: Any) -> None:
    answer = await reflect(list_services="")

    assert {service.name for service in answer.list_services_response.service} == {
        *TEI, MUX, "teimgr.v1.Arrow",
        "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip


@pytest.mark.clause("M1.10-reflection")
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (MUX, "tei_multiplexer/v1/multiplexer.proto"),
        (f"{MUX}.EmbedArrowStream", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei_multiplexer.v1.Target", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei.v1.EmbedRequest.inputs", "tei/v1/tei.proto"),
        ("tei.v1.Embed", "tei/v1/tei.proto"),
        ("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto"),
        ("tei_multiplexer.v1.Target.routing", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei.v1.MODEL_TYPE_EMBEDDING", "tei/v1/tei.proto"),
        ("grpc.health.v1.Health", "grpc_health/v1/health.proto"),
        ("teimgr.v1.Arrow.InferStream", "teimgr/v1/arrow.proto"),
    ],
)
async def test_a_symbol_leads_to_its_file_under_its_original_name(reflect: Any, symbol: str, file: str) -> None:
    assert file in files(await reflect(file_containing_symbol=symbol))


async def test_a_client_can_build_the_service_from_what_reflection_says(reflect: Any) -> None:
    pool = DescriptorPool()
    for name in ("tei/v1/tei.proto", "tei_multiplexer/v1/multiplexer.proto"):
        pool.Add(files(await reflect(file_by_filename=name))[name])

    methods = [method.name for method in pool.FindServiceByName(MUX).methods]

    assert methods == [method.name for method in multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"].methods]


@pytest.mark.clause("M1.10-reflection")
async def test_what_does_not_exist_is_not_found(reflect: Any) -> None:
    for question in (
        {"file_containing_symbol": "no.Such"},
        {"file_containing_symbol": f"{MUX}.No"},
        {"file_by_filename": "no.proto"},
    ):
        assert (await reflect(**question)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def ask(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.clause("D-health-service")
async def test_health_knows_the_server_the_service_and_every_instance(
    control: Control, channel: Any, start_worker: Any
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    await control.push(running("up", await start_worker()), RouteEntry("down", "m", State.FAILED))

    own = ("", *TEI, MUX, "teimgr.v1.Arrow")
    statuses = {name: (await stub.Check(ask(name))).status for name in (*own, "up", "down")}
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses

    assert statuses == {**dict.fromkeys(own, SERVING), "up": SERVING, "down": NOT_SERVING}
    assert {name: each.status for name, each in listed.items()} == statuses
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(ask("nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_tells_every_change_of_an_instance(control: Control, channel: Any, start_worker: Any) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(ask("a"))
    worker = await start_worker()

    seen = [(await watch.read()).status]
    for entries in ([RouteEntry("a", "m", State.STARTING)], [running("a", worker)], []):
        await control.push(*entries)
        seen.append((await watch.read()).status)
    watch.cancel()

    assert seen == [UNKNOWN, NOT_SERVING, SERVING, UNKNOWN]


async def test_a_watch_hears_of_the_end_and_does_not_hold_it_up(start_mux: Any) -> None:
    mux = start_mux()
    control = await Control.connect(mux)
    async with client(await control.push()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(ask(""))
        assert (await watch.read()).status == SERVING

        control.say({"stop": 3600})

        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
    assert await asyncio.to_thread(mux.process.wait, 20) == 0
    await control.close()


async def test_a_watch_hears_of_an_end_that_comes_while_it_speaks() -> None:
    health = MuxHealth()
    sent = []

    async def send(answer: health_pb2.HealthCheckResponse) -> None:
        sent.append(answer.status)
        health.stop()

    await health.watch("", send)

    assert sent == [SERVING, NOT_SERVING]


Status = grpc.StatusCode
SERVICES = tei_pb2.DESCRIPTOR.services_by_name
ARROW = arrow_pb2.DESCRIPTOR.services_by_name["Arrow"]
TO_A = (("x-teimgr-instance", "a"),)


def tei(channel: Any, service: str, name: str) -> Any:
    return stub(channel, name, SERVICES[service])


def ask_tei_services(text: str) -> tei_pb2.EmbedRequest:
    return tei_pb2.EmbedRequest(inputs=text)


@pytest.mark.clause("D-tei-on-mux")
async def test_the_metadata_names_the_instance(control: Control, channel: Any, start_worker: Any) -> None:
    worker, other = await start_worker(), await start_worker()
    await control.push(running("a", worker), running("b", other))

    call = tei(channel, "Embed", "Embed")(ask_tei_services("hello"), metadata=TO_A)

    assert list((await call).embeddings) == [5.0]
    assert dict(await call.initial_metadata())["x-compute-tokens"] == str(TIMINGS.tokens)
    seen = await worker.requests.get()
    assert (seen.method, seen.flags, seen.payload) == (
        Method.EMBED,
        Flag.NONE,
        ask_tei_services("hello").SerializeToString(),
    )
    assert other.requests.empty()


@pytest.mark.clause("D-tei-on-mux")
async def test_the_only_running_instance_needs_no_name(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(RouteEntry("off", "m", State.STOPPED), running("b", await start_worker()))

    assert list((await tei(channel, "Embed", "Embed")(ask_tei_services("four"))).embeddings) == [4.0]


@pytest.mark.clause("D-tei-on-mux")
async def test_of_several_the_one_whose_kind_fits_needs_no_name(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker, ranker = await start_worker(), await start_worker()
    entries = (
        replace(running("a", worker), serves=("embedding", "dense")),
        replace(running("b", ranker), serves=("reranker",)),
    )
    await control.push(*entries)

    assert list((await tei(channel, "Embed", "Embed")(ask_tei_services("four"))).embeddings) == [4.0]
    assert ranker.requests.empty()
    call = tei(channel, "Embed", "EmbedSparse")(tei_pb2.EmbedSparseRequest(inputs="x"))
    status, message = await ending(call)
    assert (status, message.rpartition(": ")[2]) == (Status.FAILED_PRECONDITION, "no instance is of kind sparse")


@pytest.mark.clause("D-tei-on-mux")
async def test_without_a_name_and_with_a_choice_the_choices_are_named(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker = await start_worker()
    await control.push(running("a", worker), RouteEntry("off", "m", State.STOPPED), running("b", worker))
    key = "Name an instance in the metadata `x-teimgr-instance`: "

    call = tei(channel, "Embed", "Embed")(ask_tei_services("x"))
    assert await ending(call) == (Status.FAILED_PRECONDITION, f"{key}the running ones are 'a', 'b'")
    call = tei(channel, "Embed", "EmbedStream")(Feed())
    assert await ending(call) == (Status.FAILED_PRECONDITION, f"{key}the running ones are 'a', 'b'")
    await control.push()
    call = tei(channel, "Rerank", "RerankStream")(Feed())
    assert await ending(call) == (Status.FAILED_PRECONDITION, f"{key}no instance is running")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("nobody", Status.NOT_FOUND, "Instance 'nobody' not found"),
        ("", Status.INVALID_ARGUMENT, "Instance name cannot be empty"),
        ("off", Status.UNAVAILABLE, "Instance 'off' is not running (status: stopped)"),
    ],
)
async def test_a_name_that_leads_nowhere(
    control: Control, channel: Any, start_worker: Any, name: str, status: Status, message: str
) -> None:
    await control.push(running("a", await start_worker()), RouteEntry("off", "m", State.STOPPED))

    call = tei(channel, "Embed", "Embed")(ask_tei_services("x"), metadata=(("x-teimgr-instance", name),))

    assert await ending(call) == (status, message)


@pytest.mark.parametrize(
    ("service", "name"),
    [(rpc.service.removeprefix("tei.v1."), rpc.name) for rpc in RPCS if rpc.service.startswith("tei.v1.")],
)
async def test_every_method_reaches_the_worker_with_its_message_untouched(
    control: Control, channel: Any, start_worker: Any, service: str, name: str
) -> None:
    worker: FrameWorker = await start_worker(lambda request: request.reply(b""))
    await control.push(running("a", worker))
    (rpc,) = (each for each in RPCS if each.path == f"/tei.v1.{service}/{name}")
    descriptor = SERVICES[service].methods_by_name[name]
    message = GetMessageClass(descriptor.input_type)()
    if message.DESCRIPTOR.fields:
        message.MergeFromString(b"\x0a\x01x" if name not in {"Decode", "DecodeStream"} else b"\x0a\x01\x07")

    call = tei(channel, service, name)
    if rpc.shape is Shape.UNARY:
        await call(message, metadata=TO_A)
    elif rpc.shape is Shape.BIDI:
        assert len([each async for each in call([message] * 2, metadata=TO_A)]) == 2
    else:
        await call([message] * 2, metadata=TO_A)

    seen = await worker.requests.get()
    assert seen.method == rpc.method
    sent = frames_pb2.RerankPairs(requests=[message] * 2) if rpc.shape is Shape.CLIENT_STREAM else message
    assert seen.payload == sent.SerializeToString()


async def test_a_stream_is_answered_in_order_and_an_empty_one_with_nothing(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker()))
    stream = tei(channel, "Embed", "EmbedStream")

    assert await lengths_of(stream([ask_tei_services("x" * n) for n in range(1, 200)], metadata=TO_A)) == list(
        range(1, 200)
    )
    assert await lengths_of(stream([], metadata=TO_A)) == []


async def test_a_failure_ends_the_stream_in_its_place(control: Control, channel: Any, start_worker: Any) -> None:
    refusal = WrongModelKind("Backend error: Model is not an embedding model")
    worker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    feed.say(ask_tei_services("one"), ask_tei_services("two"))
    call = tei(channel, "Embed", "EmbedStream")(feed, metadata=TO_A)
    first, second = await worker.requests.get(), await worker.requests.get()

    second.fail(refusal)
    first.reply(tei_pb2.EmbedResponse(embeddings=[1]).SerializeToString())

    assert (await call.read()).embeddings == [1.0]
    assert await ending(call) == (Status.FAILED_PRECONDITION, refusal.message)


async def test_an_empty_rerank_stream_is_invalid(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(running("a", await start_worker(echo)))

    call = tei(channel, "Rerank", "RerankStream")([], metadata=TO_A)

    assert await ending(call) == (Status.INVALID_ARGUMENT, "Empty stream")


async def test_a_cancelled_call_reaches_the_worker(control: Control, channel: Any, start_worker: Any) -> None:
    worker = await start_worker(hold)
    await control.push(running("a", worker))
    call = tei(channel, "Predict", "Predict")(tei_pb2.PredictRequest(inputs="x"), metadata=TO_A)
    seen = await worker.requests.get()

    call.cancel()

    assert await worker.cancels.get() == seen.header.id


async def test_teimgr_s_arrow_batches_go_whole_in_bulk_with_the_options_of_the_first(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker = await start_worker(
        lambda request: request.reply(arrow_pb2.ArrowResponse(arrow_ipc=request.payload).SerializeToString())
    )
    await control.push(running("a", worker))
    target = mux_pb2.Target(instance_name="a")
    first = arrow_pb2.ArrowRequest(
        target=target, arrow_ipc=b"1", key_columns=["id"], outputs=[arrow_pb2.OUTPUT_DENSE], truncate=True
    )

    answer = await stub(channel, "Infer", ARROW)(first)
    assert answer.arrow_ipc == first.SerializeToString()
    feed = Feed()
    feed.say(first, arrow_pb2.ArrowRequest(arrow_ipc=b"2"))
    stream = stub(channel, "InferStream", ARROW)(feed)
    batches = [arrow_pb2.ArrowRequest.FromString((await stream.read()).arrow_ipc) for _ in range(2)]
    feed.end()

    assert await stream.read() is grpc.aio.EOF
    assert [batch.arrow_ipc for batch in batches] == [b"1", b"2"]
    assert all(list(batch.key_columns) == ["id"] and batch.truncate for batch in batches)
    seen = [await asyncio.wait_for(worker.requests.get(), 10) for _ in range(3)]
    assert {(each.method, each.flags) for each in seen} == {(Method.INFER_ARROW, Flag.BULK | Flag.WAIT)}
