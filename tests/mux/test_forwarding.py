"""Streams through a real mux process: bidi (order, window, targets, failures, Arrow batches) and collected ones."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tests.support.frame_worker import TIMINGS, FrameWorker, Request, echo, hold, lengths
from tests.support.http_peers import Feed
from tests.support.mux_process import MAX_MESSAGE_BYTES, WINDOW, Control, client, embed, running, stub, to

from teimgr.errors import InvalidInput
from teimgr.wire.frames import Flag, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import frames_pb2

Status = grpc.StatusCode


async def lengths_of(call: Any) -> list[float]:
    return [answer.embeddings[0] async for answer in call]


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


@pytest.mark.clause("M1.7-order")
async def test_answers_come_in_request_order_whatever_order_the_worker_takes(
    control: Control, channel: Any, start_worker: Any
) -> None:
    held: list[Request] = []

    def in_pairs_backwards(request: Request) -> None:
        held.append(request)
        if len(held) == 2:
            while held:
                lengths(held.pop())

    await control.push(running("a", await start_worker(in_pairs_backwards)))

    answers = await lengths_of(stub(channel, "EmbedStream")(embed("x" * n) for n in range(1, 201)))

    assert answers == list(range(1, 201))


async def test_a_conversation_is_answered_message_by_message(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(running("a", await start_worker()))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)

    for number in range(1, 6):
        feed.say(embed("x" * number))
        assert (await call.read()).embeddings[0] == number
    feed.end()

    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Status.OK


@pytest.mark.clause("M1.7-headers-first")
async def test_the_headers_come_before_the_first_answer(control: Control, channel: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(embed("x"))

    await call.initial_metadata()

    lengths(await worker.requests.get())
    feed.end()
    assert await lengths_of(call) == [1.0]


@pytest.mark.clause("M1.7-window")
async def test_no_more_messages_than_the_window_are_in_flight(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    call = stub(channel, "EmbedStream")(embed("x" * n) for n in range(1, WINDOW + 4))
    requests = [await worker.requests.get() for _ in range(WINDOW)]
    # A call of its own goes through the same worker meanwhile: had the stream sent more, it would lie before this one.
    other = asyncio.ensure_future(stub(channel, "Embed")(embed("other")))
    asked = await worker.requests.get()
    assert asked.flags == Flag.NONE
    lengths(asked)
    await other
    assert worker.requests.empty()

    worker.script = lengths
    for request in requests:
        lengths(request)

    assert await lengths_of(call) == list(range(1, WINDOW + 4))


async def test_messages_wait_for_room_and_turn_to_bulk_once_they_are_many(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    call = stub(channel, "EmbedStream")(embed("x") for _ in range(8))

    requests = [await worker.requests.get() for _ in range(8)]
    for request in requests:
        lengths(request)
    await lengths_of(call)

    flags = sorted(request.flags for request in requests)
    assert flags == [Flag.WAIT] * 4 + [Flag.WAIT | Flag.BULK] * 4
    assert all(request.header.deadline_ms == 0 for request in requests)


@pytest.mark.clause("M1.7-target")
async def test_each_message_goes_to_its_own_target_and_none_means_the_one_before(
    control: Control, channel: Any, start_worker: Any
) -> None:
    def naming(value: float) -> Any:
        answer = tei_pb2.EmbedResponse(embeddings=[value]).SerializeToString()
        return lambda request: request.reply(answer)

    await control.push(running("a", await start_worker(naming(1))), running("b", await start_worker(naming(2))))
    targets = ["a", None, "b", None, None, "a"]

    answers = await lengths_of(stub(channel, "EmbedStream")(embed("x", target) for target in targets))

    assert answers == [1, 1, 2, 2, 2, 1]


async def test_a_stream_stays_on_one_replica(control: Control, channel: Any, start_worker: Any) -> None:
    one: FrameWorker = await start_worker()
    two: FrameWorker = await start_worker()
    await control.push(running("a", one, two))

    await lengths_of(stub(channel, "EmbedStream")(embed("x") for _ in range(30)))

    assert sorted((one.requests.qsize(), two.requests.qsize())) == [0, 30]


async def test_a_stream_follows_its_instance_to_the_next_incarnation(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker()))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(embed("x"))
    await call.read()

    new: FrameWorker = await start_worker()
    await control.push(running("a", new))
    feed.say(embed("yy", None))

    assert (await call.read()).embeddings[0] == 2.0
    assert new.requests.qsize() == 1
    feed.end()
    assert await call.code() is Status.OK


@pytest.mark.clause("M1.7-skipped")
async def test_a_message_without_inner_request_is_skipped(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(running("a", await start_worker()))
    messages = [mux_pb2.EmbedRequest(target=to("a")), embed("x"), mux_pb2.EmbedRequest(), embed("xx"), embed("xxx")]

    assert await lengths_of(stub(channel, "EmbedStream")(messages)) == [1, 2, 3]


async def test_a_stream_of_skipped_messages_ends_well(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(running("a", await start_worker()))

    call = stub(channel, "EmbedStream")([mux_pb2.EmbedRequest(target=to("a"))] * (WINDOW * 3))

    assert await lengths_of(call) == []


@pytest.mark.clause("M1.7-empty")
@pytest.mark.parametrize("method", ["EmbedStream", "EmbedArrowStream", "DecodeStream", "RerankStream"])
async def test_an_empty_stream_is_invalid(control: Control, channel: Any, method: str) -> None:
    call = stub(channel, method)([])

    assert await ending(call) == (Status.INVALID_ARGUMENT, "Empty stream")


@pytest.mark.parametrize(
    ("first", "status", "message"),
    [
        (embed("x", None), Status.INVALID_ARGUMENT, "Missing target"),
        (embed("x", ""), Status.INVALID_ARGUMENT, "Instance name cannot be empty"),
        (embed("x", "nobody"), Status.NOT_FOUND, "Instance 'nobody' not found"),
    ],
)
async def test_a_first_message_that_leads_nowhere_ends_the_stream(
    control: Control, channel: Any, first: Any, status: Status, message: str
) -> None:
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(first)

    assert await ending(call) == (status, message)


@pytest.mark.clause("M1.7-first-failure")
async def test_the_first_failing_item_ends_the_stream_after_those_before_it(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(embed("x"), embed("xx"), embed("bad"), embed("xxx"))

    for request in [await worker.requests.get() for _ in range(4)]:
        if b"bad" in request.payload:
            request.fail(InvalidInput("this text is bad"))
        else:
            lengths(request)

    assert [(await call.read()).embeddings[0] for _ in range(2)] == [1, 2]
    assert await ending(call) == (Status.INVALID_ARGUMENT, "this text is bad")


async def test_a_later_message_to_nobody_ends_the_stream_in_its_place(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker()))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(embed("x"), embed("xx"), embed("x", "nobody"))

    assert [(await call.read()).embeddings[0] for _ in range(2)] == [1, 2]
    assert await ending(call) == (Status.NOT_FOUND, "Instance 'nobody' not found")


async def test_cancelling_a_stream_cancels_all_it_has_in_flight(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(*(embed("x") for _ in range(10)))
    requests = [await worker.requests.get() for _ in range(10)]

    call.cancel()

    cancelled = [await worker.cancels.get() for _ in requests]
    assert sorted(cancelled) == sorted(request.header.id for request in requests)


async def test_a_stream_that_fails_cancels_what_comes_after(control: Control, channel: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(*(embed("x") for _ in range(3)))
    first, *rest = sorted([await worker.requests.get() for _ in range(3)], key=lambda request: request.header.id)

    first.fail(InvalidInput("no"))

    assert await ending(call) == (Status.INVALID_ARGUMENT, "no")
    assert [await worker.cancels.get() for _ in rest] == [request.header.id for request in rest]


async def test_a_stream_in_flight_is_unavailable_when_its_worker_dies(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    feed = Feed()
    call = stub(channel, "EmbedStream")(feed)
    feed.say(embed("x"))
    await worker.requests.get()

    worker.drop()

    assert await ending(call) == (Status.UNAVAILABLE, "Instance 'a' lost its worker: the connection closed")


@pytest.mark.clause("N-arrow-stream")
@pytest.mark.parametrize(
    ("name", "method", "request_type"),
    [
        ("EmbedSparseStream", Method.EMBED_SPARSE, mux_pb2.EmbedSparseRequest),
        ("EmbedAllStream", Method.EMBED_ALL, mux_pb2.EmbedAllRequest),
        ("PredictStream", Method.PREDICT, mux_pb2.PredictRequest),
        ("PredictPairStream", Method.PREDICT_PAIR, mux_pb2.PredictPairRequest),
        ("TokenizeStream", Method.TOKENIZE, mux_pb2.EncodeRequest),
        ("DecodeStream", Method.DECODE, mux_pb2.DecodeRequest),
    ],
)
async def test_every_stream_asks_the_worker_for_its_own_method(
    control: Control, channel: Any, start_worker: Any, name: str, method: Method, request_type: Any
) -> None:
    worker: FrameWorker = await start_worker(lambda request: request.reply())
    await control.push(running("a", worker))

    answers = [answer async for answer in stub(channel, name)([request_type(target=to("a"), request={})] * 3)]

    assert len(answers) == 3
    assert {(await worker.requests.get()).method for _ in answers} == {method}


@pytest.mark.clause("N-arrow-stream")
async def test_later_arrow_batches_take_the_options_of_the_first(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(
        lambda request: request.reply(
            mux_pb2.EmbedArrowResponse(
                arrow_ipc=mux_pb2.EmbedArrowRequest.FromString(request.payload).arrow_ipc
            ).SerializeToString()
        )
    )
    await control.push(running("a", worker))
    options = mux_pb2.EmbedArrowRequest(
        truncate=True, normalize=True, prompt_name="query", dimensions=64, output_dtype=2
    )
    first = mux_pb2.EmbedArrowRequest(target=to("a"), arrow_ipc=b"batch 0")
    first.MergeFrom(options)
    later = [mux_pb2.EmbedArrowRequest(arrow_ipc=f"batch {number}".encode()) for number in range(1, 9)]

    answers = [answer.arrow_ipc async for answer in stub(channel, "EmbedArrowStream")([first, *later])]

    assert answers == [f"batch {number}".encode() for number in range(9)]
    for answer in answers:
        request = await worker.requests.get()
        seen = mux_pb2.EmbedArrowRequest.FromString(request.payload)
        seen.ClearField("target")
        options.arrow_ipc = answer
        assert seen == options
        assert (request.method, request.flags) == (Method.EMBED_ARROW, Flag.BULK | Flag.WAIT)


async def test_options_that_would_make_every_message_large_are_refused(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker(hold)))
    feed = Feed()
    feed.say(mux_pb2.EmbedArrowRequest(target=to("a"), arrow_ipc=b"batch", prompt_name="q" * 300_000))

    status, message = await ending(stub(channel, "EmbedArrowStream")(feed))

    assert status is Status.INVALID_ARGUMENT
    assert message.startswith("The first message has 300004 bytes beside its target and table, more than 262144")


@pytest.mark.clause("N-arrow-stream-failure")
async def test_a_bad_arrow_batch_for_nobody_is_a_bad_batch(control: Control, channel: Any) -> None:
    feed = Feed()
    feed.say(mux_pb2.EmbedArrowRequest(target=to("nobody"), arrow_ipc=b"no arrow at all"))

    status, message = await ending(stub(channel, "EmbedArrowStream")(feed))

    assert status is Status.INVALID_ARGUMENT
    assert message.startswith("Invalid Arrow IPC: ")


async def test_only_a_few_arrow_batches_are_in_flight(control: Control, channel: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    batches = [mux_pb2.EmbedArrowRequest(target=to("a"), arrow_ipc=b"x" * 500_000) for _ in range(10)]
    call = stub(channel, "EmbedArrowStream")(batches)
    requests = [await worker.requests.get() for _ in range(4)]
    # A call of its own goes through the same link meanwhile: had the stream sent more, it would lie before this one.
    other = asyncio.ensure_future(stub(channel, "EmbedArrow")(mux_pb2.EmbedArrowRequest(target=to("a"))))
    asked = await worker.requests.get()
    assert asked.payload == mux_pb2.EmbedArrowRequest(target=to("a")).SerializeToString()
    echo(asked)
    await other
    assert worker.requests.empty()

    worker.script = echo
    for request in requests:
        echo(request)

    assert len([answer async for answer in call]) == 10


def pair(text: str, target: str | None = None) -> mux_pb2.RerankStreamRequest:
    request = tei_pb2.RerankStreamRequest(query="q", text=text)
    return mux_pb2.RerankStreamRequest(target=None if target is None else to(target), request=request)


def ranked(request: Any) -> None:
    pairs = frames_pb2.RerankPairs.FromString(request.payload).requests
    ranks = [tei_pb2.Rank(index=i, score=len(each.text)) for i, each in enumerate(pairs)]
    request.reply(tei_pb2.RerankResponse(ranks=ranks).SerializeToString(), TIMINGS)


@pytest.mark.clause("M1.7-rerank-stream")
async def test_all_messages_are_one_request_in_the_order_they_came(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(ranked)
    await control.push(running("a", worker))

    call = stub(channel, "RerankStream")([pair("", "a"), pair("xx"), pair("xxx")])

    assert [(rank.index, rank.score) for rank in (await call).ranks] == [(0, 0.0), (1, 2.0), (2, 3.0)]
    assert dict(await call.initial_metadata())["x-compute-tokens"] == str(TIMINGS.tokens)
    seen = await worker.requests.get()
    assert (seen.method, seen.flags) == (Method.RERANK_STREAM, Flag.WAIT)
    assert worker.requests.empty()


async def test_many_pairs_are_bulk_work(control: Control, channel: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(ranked)
    await control.push(running("a", worker))

    answer = await stub(channel, "RerankStream")([pair("x", "a")] * 500)

    assert len(answer.ranks) == 500
    assert (await worker.requests.get()).flags == Flag.WAIT | Flag.BULK


async def test_a_large_pair_arrives_whole(control: Control, channel: Any, start_worker: Any) -> None:
    await control.push(running("a", await start_worker(ranked)))

    answer = await stub(channel, "RerankStream")([pair("x" * 100_000, "a"), pair("y" * 300)])

    assert [rank.score for rank in answer.ranks] == [100_000.0, 300.0]


async def test_messages_without_a_request_are_skipped_and_nothing_else_is_invalid(
    control: Control, channel: Any, start_worker: Any
) -> None:
    await control.push(running("a", await start_worker(ranked)))
    empty = mux_pb2.RerankStreamRequest(target=to("a"))

    assert len((await stub(channel, "RerankStream")([empty, pair("x"), empty])).ranks) == 1
    call = stub(channel, "RerankStream")([empty])
    assert await ending(call) == (Status.INVALID_ARGUMENT, "Missing rerank request")


@pytest.mark.clause("M1.7-rerank-stream")
@pytest.mark.parametrize(
    ("first", "status", "message"),
    [
        (pair("x"), Status.INVALID_ARGUMENT, "Missing target"),
        (pair("x", ""), Status.INVALID_ARGUMENT, "Instance name cannot be empty"),
        (pair("x", "nobody"), Status.NOT_FOUND, "Instance 'nobody' not found"),
    ],
)
async def test_a_first_message_that_leads_nowhere_ends_the_stream_while_it_is_open(
    control: Control, channel: Any, first: Any, status: Status, message: str
) -> None:
    feed = Feed()
    feed.say(first)

    assert await ending(stub(channel, "RerankStream")(feed)) == (status, message)


async def test_a_stream_over_the_limit_is_refused_naming_both_sizes(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(ranked)
    await control.push(running("a", worker))
    half = "x" * (MAX_MESSAGE_BYTES // 2)
    feed = Feed()
    feed.say(pair(half, "a"), pair(half))

    status, message = await ending(stub(channel, "RerankStream")(feed))

    assert status is Status.RESOURCE_EXHAUSTED
    size = frames_pb2.RerankPairs(requests=[pair(half).request] * 2).ByteSize()
    assert message == f"Stream larger than max ({size} vs. {MAX_MESSAGE_BYTES} bytes)"
    assert worker.requests.empty()


async def test_a_stream_that_says_nothing_more_is_not_waited_for_for_ever(start_mux: Any, start_worker: Any) -> None:
    mux = start_mux(request_timeout_s=0.3)
    control = await Control.connect(mux)
    await control.push(running("a", await start_worker(ranked)))
    async with client(await control.stats()) as channel:
        feed = Feed()
        feed.say(pair("x", "a"))

        status, message = await ending(stub(channel, "RerankStream")(feed))

    assert (status, message) == (Status.DEADLINE_EXCEEDED, "Request timeout: no further message within 0.3 s")
    await control.close()


async def test_a_client_that_leaves_takes_its_call_from_the_worker(
    control: Control, channel: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    await control.push(running("a", worker))
    call = stub(channel, "RerankStream")([pair("x", "a")])
    seen = await worker.requests.get()

    call.cancel()

    assert await worker.cancels.get() == seen.header.id
