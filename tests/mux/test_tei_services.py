"""tei.v1 on the mux port: the same methods as an instance has, whom they are for said by metadata."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from tests.mux.test_forwarding import Feed, ending, lengths_of
from tests.support.frame_worker import TIMINGS, FrameWorker, echo, hold
from tests.support.mux_process import Control, running, stub

from teimgr.directory import RouteEntry
from teimgr.errors import WrongModelKind
from teimgr.grpc_core.rpc_table import RPCS, Shape
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2, frames_pb2
from teimgr.spec import State
from teimgr.wire.frames import Flag, Method

Status = grpc.StatusCode
SERVICES = tei_pb2.DESCRIPTOR.services_by_name
ARROW = arrow_pb2.DESCRIPTOR.services_by_name["Arrow"]
TO_A = (("x-teimgr-instance", "a"),)


def tei(channel: Any, service: str, name: str) -> Any:
    return stub(channel, name, SERVICES[service])


def ask(text: str) -> tei_pb2.EmbedRequest:
    return tei_pb2.EmbedRequest(inputs=text)


@pytest.mark.clause("D-tei-on-mux")
async def test_the_metadata_names_the_instance(control: Control, channel: Any, start_worker: Any) -> None:
    worker, other = await start_worker(), await start_worker()
    await control.push(running("a", worker), running("b", other))

    call = tei(channel, "Embed", "Embed")(ask("hello"), metadata=TO_A)

    assert list((await call).embeddings) == [5.0]
    assert dict(await call.initial_metadata())["x-compute-tokens"] == str(TIMINGS.tokens)
    seen = await worker.requests.get()
    assert (seen.method, seen.flags, seen.payload) == (Method.EMBED, Flag.NONE, ask("hello").SerializeToString())
    assert other.requests.empty()


@pytest.mark.clause("D-tei-on-mux")
async def test_the_only_running_instance_needs_no_name(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(RouteEntry("off", "m", State.STOPPED), running("b", await start_worker()))

    assert list((await tei(channel, "Embed", "Embed")(ask("four"))).embeddings) == [4.0]


@pytest.mark.clause("D-tei-on-mux")
async def test_without_a_name_and_with_a_choice_the_choices_are_named(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker = await start_worker()
    await control.push(running("a", worker), RouteEntry("off", "m", State.STOPPED), running("b", worker))
    key = "Name an instance in the metadata `x-teimgr-instance`: "

    call = tei(channel, "Embed", "Embed")(ask("x"))
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

    call = tei(channel, "Embed", "Embed")(ask("x"), metadata=(("x-teimgr-instance", name),))

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

    assert await lengths_of(stream([ask("x" * n) for n in range(1, 200)], metadata=TO_A)) == list(range(1, 200))
    assert await lengths_of(stream([], metadata=TO_A)) == []


async def test_a_failure_ends_the_stream_in_its_place(control: Control, channel: Any, start_worker: Any) -> None:
    refusal = WrongModelKind("Backend error: Model is not an embedding model")
    worker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    feed.say(ask("one"), ask("two"))
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
