"""Streams: the in-flight window, the pump of a bidi stream, and the collected rerank stream as protobuf writes it."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.errors import InvalidInput, TooLarge
from teimgr.http.byte_budget import ByteBudget, UnreadReplies
from teimgr.wire.frames import Flag
from teimgr.wire.grpc_core import streams
from teimgr.wire.grpc_core.rpc import BY_PATH
from teimgr.wire.grpc_core.streams import (
    FIRST_MESSAGES,
    HELD_BYTES,
    INTERACTIVE_MESSAGES,
    PairCollector,
    StreamPump,
    StreamWindow,
)
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import frames_pb2
from teimgr.wire.protobuf import varint
from teimgr.wire.routing.links import WorkerReply


@given(st.lists(st.text(max_size=300), min_size=1, max_size=20))
async def test_it_is_what_protobuf_writes(texts: list[str]) -> None:
    requests = [tei_pb2.RerankStreamRequest(query="q", text=text, truncate=True) for text in texts]
    collected = PairCollector(1 << 20)

    for request in requests:
        await collected.add(request.SerializeToString())

    assert collected.payload() == frames_pb2.RerankPairs(requests=requests).SerializeToString()
    assert collected.flags == (Flag.WAIT | Flag.BULK if len(texts) > 4 else Flag.WAIT)


async def test_it_may_fill_the_limit_and_not_a_byte_more() -> None:
    collected = PairCollector(20)
    await collected.add(b"x" * 8)
    await collected.add(memoryview(b"x" * 8))
    assert len(collected.payload()) == 20

    with pytest.raises(TooLarge, match=r"\(22 vs\. 20 bytes\)"):
        await collected.add(b"")


async def test_pairs_are_bounded_by_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_PAIRS", 2)
    collected = PairCollector(1000)
    await collected.add(b"")
    await collected.add(b"")

    with pytest.raises(TooLarge, match=r"\(3 vs\. 2 messages\)"):
        await collected.add(b"")


def test_no_request_is_invalid() -> None:
    with pytest.raises(InvalidInput, match="Missing rerank request"):
        PairCollector(10).payload()


async def entered(window: StreamWindow, limit: int = 10_000) -> int:
    """How many messages the window lets in now, one task entering as long as it can."""
    count = 0

    async def enter() -> None:
        nonlocal count
        while count < limit:
            await window.enter()
            count += 1

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    return count


async def test_a_window_lets_in_its_limit_and_one_more_for_each_that_leaves() -> None:
    window = StreamWindow(50)

    assert await entered(window) == 50
    window.leave(100)
    window.leave(100)
    assert await entered(window) == 2
    assert window.in_flight == 50


async def test_large_answers_shrink_it_to_what_may_lie_in_memory() -> None:
    window = StreamWindow(1024)
    assert await entered(window) == FIRST_MESSAGES, "before any reply has told its size"

    for _ in range(FIRST_MESSAGES):
        window.leave(HELD_BYTES // 10)

    assert await entered(window) == 10


async def test_it_opens_by_a_message_for_each_reply_that_is_read() -> None:
    window = StreamWindow(1024)
    await entered(window)

    window.leave(10)
    assert await entered(window) == 2

    for _ in range(1024):
        window.leave(10)
        await window.enter()
    await entered(window)
    assert window.in_flight == 1024


async def test_a_conversation_goes_on_however_large_the_answers() -> None:
    window = StreamWindow(1024)
    await window.enter()

    window.leave(HELD_BYTES * 2)

    assert await entered(window) == INTERACTIVE_MESSAGES


async def test_small_answers_open_it_again() -> None:
    window = StreamWindow(64)
    await window.enter()
    window.leave(HELD_BYTES)

    await window.enter()
    window.leave(10)

    assert await entered(window) == 64


class Call:
    """A message in flight that the test answers."""

    def __init__(self, message: bytes, flags: int) -> None:
        self.message = message
        self.flags = flags
        self.answer: asyncio.Future[WorkerReply] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.answer.cancel()

    def reply(self) -> None:
        self.answer.set_result(WorkerReply(self.message.upper(), None))


class Pumped:
    """A pump over `messages`; one of them that is empty gets no reply."""

    def __init__(self, *messages: bytes, window: int = 100, path: str = "/tei.v1.Embed/EmbedStream") -> None:
        self.calls: list[Call] = []
        self.sent: list[bytes] = []
        self._messages: Iterator[bytes] = iter(messages)
        self.unread = UnreadReplies(ByteBudget(1000), 1)
        pump = StreamPump(BY_PATH[path], window, self.unread, receive=self._receive, start=self._start, send=self._send)
        self.running = asyncio.create_task(pump.run())

    async def _receive(self) -> bytes | None:
        return next(self._messages, None)

    async def _start(self, message: bytes, flags: int) -> Call | None:
        if message == b"bad":
            raise InvalidInput("bad")
        if not message:
            return None
        self.calls.append(Call(message, flags))
        return self.calls[-1]

    async def _send(self, payload: bytes) -> None:
        self.sent.append(payload)


async def test_replies_leave_in_request_order_and_a_message_without_reply_leaves_its_room() -> None:
    pumped = Pumped(b"a", b"", b"b", b"", b"c", window=3)
    await asyncio.sleep(0.01)

    for call in reversed(pumped.calls):
        call.reply()
        await asyncio.sleep(0)
        assert pumped.unread.taken_bytes == (0 if pumped.sent else 3 - pumped.calls.index(call)), "from its arrival on"
    await pumped.running

    assert pumped.sent == [b"A", b"B", b"C"]
    assert pumped.unread.taken_bytes == 0


async def test_a_failure_ends_the_stream_in_its_place_and_cancels_the_rest() -> None:
    pumped = Pumped(b"a", b"b", b"c", b"bad")
    await asyncio.sleep(0.01)
    first, second, third = pumped.calls

    second.answer.set_exception(InvalidInput("no"))
    first.reply()

    with pytest.raises(InvalidInput, match="no"):
        await pumped.running
    assert pumped.sent == [b"A"]
    assert third.answer.cancelled()


async def test_a_failure_to_start_comes_after_the_replies_before_it() -> None:
    pumped = Pumped(b"a", b"bad", b"c")
    await asyncio.sleep(0.01)

    pumped.calls[0].reply()

    with pytest.raises(InvalidInput, match="bad"):
        await pumped.running
    assert (pumped.sent, len(pumped.calls)) == ([b"A"], 1)


async def test_a_cancelled_stream_cancels_all_that_is_in_flight() -> None:
    pumped = Pumped(b"a", b"b", b"c")
    await asyncio.sleep(0.01)

    pumped.running.cancel()
    await asyncio.wait((pumped.running,))

    assert [call.answer.cancelled() for call in pumped.calls] == [True] * 3


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("/tei.v1.Embed/EmbedStream", [Flag.WAIT] * 4 + [Flag.WAIT | Flag.BULK]),
        ("/teimgr.v1.Arrow/InferStream", [Flag.WAIT | Flag.BULK] * 4),
    ],
)
async def test_messages_take_the_bulk_lane_once_they_are_many_and_arrow_batches_always(
    path: str, flags: list[Flag]
) -> None:
    pumped = Pumped(*[b"a"] * 20, window=5, path=path)
    await asyncio.sleep(0.01)

    assert [call.flags for call in pumped.calls] == flags
    pumped.running.cancel()
    await asyncio.wait((pumped.running,))


@pytest.mark.parametrize("turns", range(5))
async def test_two_cancellations_in_a_row_leave_no_call_in_flight(turns: int) -> None:
    """As of a stream whose deadline and reset come together."""
    live: set[object] = set()

    class Live(Call):
        def cancel(self) -> None:
            super().cancel()
            live.discard(self)

    async def start(message: bytes, flags: int) -> Live:
        call = Live(message, flags)
        live.add(call)
        return call

    messages, all_started = iter([b"x"] * 10), asyncio.Event()

    async def receive() -> bytes:
        if (message := next(messages, None)) is None:
            all_started.set()
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(payload: bytes) -> None:
        pass

    unread = UnreadReplies(ByteBudget(1000), 1)
    pump = StreamPump(BY_PATH["/tei.v1.Embed/EmbedStream"], 100, unread, receive=receive, start=start, send=send)
    running = asyncio.create_task(pump.run())
    await all_started.wait()
    assert len(live) == 10

    running.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))

    assert not live


async def test_messages_that_are_there_already_let_others_run_in_between() -> None:
    left, others = 2000, 0

    async def receive() -> bytes | None:
        nonlocal left
        left -= 1
        return b"x" if left >= 0 else None

    async def beside() -> None:
        nonlocal others
        while left > 0:
            others += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(beside())
    await PairCollector(10**6).collect(receive, None)
    await running
    assert others >= 50


async def test_a_large_pair_is_copied_in_several_turns() -> None:
    """One copy of 40 MiB held the loop for 36 ms."""
    messages, turns = [b"x" * 2**25, None], 0

    async def receive() -> bytes | None:
        return messages.pop(0)

    async def beside() -> None:
        nonlocal turns
        while not collecting.done():
            turns += 1
            await asyncio.sleep(0)

    collected = PairCollector(2**26)
    collecting = asyncio.create_task(collected.collect(receive, None))
    await beside()

    assert collected.payload() == streams._REQUEST + varint(2**25) + b"x" * 2**25
    assert turns >= 8
