"""A stream with one answer: collected in the mux, asked as one request, bounded in bytes and in waiting."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.mux.test_stream_relay import Feed, ending
from tests.support.frame_worker import TIMINGS, FrameWorker, hold
from tests.support.mux_process import MAX_MESSAGE_BYTES, Control, client, running, stub, to

from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.pb.teimgr.v1 import frames_pb2
from teimgr.wire.frames import Flag, Method

Status = grpc.StatusCode


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
