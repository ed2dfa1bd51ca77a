"""The fair limiter as call limiter and as result budget, and the size of vectors per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from tests.support.rest_listener import MODEL

from teimgr.engine.job import InferOptions, Input, Lane, MediaFile, Output, Pair
from teimgr.errors import InvalidInput, Overloaded
from teimgr.wire.frames import Flag, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import UNCOUNTED_BYTES, varint
from teimgr.worker.calls import (
    CallReply,
    MethodCall,
    Submission,
    WorkerCall,
    _stops_of_pieces,
    counted,
    lane_of,
    max_token_bytes,
    parsed,
)
from teimgr.worker.limiter import CallLimiter


def unexpected(call: WorkerCall, error: Exception) -> None:
    raise error


class LimitedCalls:
    """A limiter of calls, and the calls it admitted, in order."""

    def __init__(self, calls: int = 2, size_bytes: int = 100, waiting: int = 3, waiting_bytes: int = 1000) -> None:
        self.limiter = CallLimiter(
            unexpected, max_calls=calls, max_bytes=size_bytes, max_waiting=waiting, max_waiting_bytes=waiting_bytes
        )
        self.proceeded: list[WorkerCall] = []

    def enter(self, size_bytes: int = 1, may_wait: bool = False) -> WorkerCall:
        call = WorkerCall(size_bytes, Lane.INTERACTIVE, may_wait=may_wait)
        self.limiter.enter(call, size_bytes, lambda: self.proceeded.append(call), may_wait)
        return call

    def is_queued(self, call: WorkerCall) -> bool:
        return call in self.limiter and call not in self.proceeded


@pytest.mark.parametrize(
    ("chars", "texts", "max_length", "image_tokens", "lane"),
    [
        (16, 1, 512, 0, Lane.INTERACTIVE),
        (40_000, 1, 512, 0, Lane.INTERACTIVE),  # it is truncated
        (40_000, 1, 8192, 0, Lane.BULK),
        (16_000, 90, 512, 0, Lane.INTERACTIVE),  # a rerank
        (16_000, 97, 512, 0, Lane.BULK),
        (40_000, 10_000, 512, 0, Lane.BULK),
        (0, 0, 77, 32 * 50, Lane.INTERACTIVE),  # pictures of CLIP
        (0, 0, 8192, 4 * 1030, Lane.BULK),  # pages of ColPali
        (5000, 1, 8192, 3 * 1030, Lane.BULK),
    ],
)
def test_the_lane_is_chosen_by_the_cost(chars: int, texts: int, max_length: int, image_tokens: int, lane: Lane) -> None:
    assert lane_of(chars, texts, max_length, image_tokens) is lane


def test_a_call_that_chose_its_lane_or_is_part_of_a_stream_keeps_it() -> None:
    large = b"x" * 100_000
    for flags, lane in (
        (Flag.NONE, Lane.BULK),
        (Flag.INTERACTIVE, Lane.INTERACTIVE),
        (Flag.BULK, Lane.BULK),
        (Flag.WAIT, Lane.INTERACTIVE),
    ):
        call = MethodCall(Method.EMBED, large, flags)
        call.price(1, 8192)
        assert call.lane is lane, flags


def test_calls_beyond_the_count_are_refused() -> None:
    calls = LimitedCalls(calls=2)
    first, second = calls.enter(), calls.enter()

    with pytest.raises(Overloaded):
        calls.enter()

    assert calls.proceeded == [first, second]
    assert len(calls.limiter) == 2


def test_calls_beyond_the_bytes_are_refused() -> None:
    calls = LimitedCalls(calls=9, size_bytes=100)
    calls.enter(60)

    with pytest.raises(Overloaded):
        calls.enter(41)
    calls.enter(40)

    assert len(calls.limiter) == 2


def test_a_lone_call_of_any_size_is_let_in() -> None:
    calls = LimitedCalls(size_bytes=100)

    large = calls.enter(10_000)

    assert calls.proceeded == [large]
    with pytest.raises(Overloaded):
        calls.enter(1)


def test_those_who_may_wait_come_in_by_their_order() -> None:
    calls = LimitedCalls(calls=1)
    inside = calls.enter()
    line = [calls.enter(may_wait=True) for _ in range(3)]
    assert calls.proceeded == [inside]

    for call in (inside, *line):
        calls.limiter.leave(call)

    assert calls.proceeded == [inside, *line]
    assert len(calls.limiter) == 0


def test_nobody_passes_the_line_even_if_small_enough() -> None:
    calls = LimitedCalls(calls=9, size_bytes=100)
    calls.enter(60)
    calls.enter(50, may_wait=True)

    with pytest.raises(Overloaded):
        calls.enter(1)


def test_a_line_that_is_full_by_count_or_by_bytes_refuses() -> None:
    by_count = LimitedCalls(calls=1, waiting=2)
    by_bytes = LimitedCalls(calls=1, waiting=9, waiting_bytes=100)
    by_count.enter()
    by_bytes.enter()
    for _ in range(2):
        by_count.enter(may_wait=True)
        by_bytes.enter(50, may_wait=True)

    for calls in (by_count, by_bytes):
        with pytest.raises(Overloaded):
            calls.enter(may_wait=True)


def test_a_lone_waiting_call_of_any_size_stands_in_line() -> None:
    calls = LimitedCalls(calls=1, waiting_bytes=100)
    inside = calls.enter()
    large = calls.enter(10_000, may_wait=True)

    calls.limiter.leave(inside)

    assert calls.proceeded == [inside, large]


def test_leaving_twice_gives_room_back_once() -> None:
    calls = LimitedCalls(calls=1)
    call = calls.enter()

    assert calls.limiter.leave(call)
    assert not calls.limiter.leave(call)

    calls.enter()
    with pytest.raises(Overloaded):
        calls.enter()


def test_who_leaves_the_line_is_never_let_in_and_lets_the_next_one_up() -> None:
    calls = LimitedCalls(calls=9, size_bytes=100)
    inside = calls.enter(60)
    large = calls.enter(50, may_wait=True)
    small = calls.enter(10, may_wait=True)

    assert calls.limiter.leave(large)

    assert calls.proceeded == [inside, small]
    assert large not in calls.limiter


def test_room_of_the_line_comes_back() -> None:
    calls = LimitedCalls(calls=1, waiting=1, waiting_bytes=100)
    inside = calls.enter()
    waiting = calls.enter(100, may_wait=True)

    calls.limiter.leave(waiting)
    again = calls.enter(100, may_wait=True)
    calls.limiter.leave(inside)

    assert calls.proceeded == [inside, again]
    assert calls.enter(100, may_wait=True) in calls.limiter


def test_a_long_line_of_calls_that_fail_at_once_is_worked_off() -> None:
    """Each leaves while it is being let in, which must not nest."""
    limiter = CallLimiter(unexpected, max_calls=1, max_bytes=100, max_waiting=5000, max_waiting_bytes=5000)
    calls = [WorkerCall(1, Lane.BULK, may_wait=True) for _ in range(5000)]
    left: list[WorkerCall] = []

    def fail(call: WorkerCall) -> None:
        left.append(call)
        limiter.leave(call)

    first = WorkerCall(1, Lane.BULK)
    limiter.enter(first, 1, lambda: None, may_wait=False)
    for call in calls:
        limiter.enter(call, 1, lambda call=call: fail(call))
    limiter.leave(first)

    assert left == calls
    assert len(limiter) == 0


class Budget:
    """A result budget, and the calls it admitted, in order."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.limiter = CallLimiter(unexpected, max_bytes=max_bytes)
        self.admitted: list[WorkerCall] = []

    def enter(self, size_bytes: int, then: Callable[[WorkerCall], None] = lambda call: None) -> WorkerCall:
        call = WorkerCall(1, Lane.BULK)

        def proceed() -> None:
            self.admitted.append(call)
            then(call)

        self.limiter.enter(call, size_bytes, proceed)
        return call


def test_what_does_not_fit_waits_by_its_order() -> None:
    budget = Budget(100)
    first, second, third = budget.enter(60), budget.enter(50), budget.enter(10)

    assert budget.admitted == [first]
    budget.limiter.leave(first)
    assert budget.admitted == [first, second, third]


def test_a_lone_call_fits_whatever_its_size() -> None:
    budget = Budget(100)
    first, second = budget.enter(10_000), budget.enter(10_000)

    assert budget.admitted == [first]
    budget.limiter.leave(first)
    assert budget.admitted == [first, second]


def test_who_gives_up_in_the_line_is_never_let_in() -> None:
    budget = Budget(100)
    first, second, third = budget.enter(100), budget.enter(100), budget.enter(100)

    budget.limiter.leave(second)
    budget.limiter.leave(first)
    assert budget.admitted == [first, third]


def test_leaving_the_budget_twice_gives_room_back_once() -> None:
    budget = Budget(100)
    first, second = budget.enter(50), budget.enter(50)

    budget.limiter.leave(first)
    budget.limiter.leave(first)
    third, fourth = budget.enter(50), budget.enter(1)
    assert budget.admitted == [first, second, third]
    budget.limiter.leave(second)
    assert budget.admitted[-1] is fourth


def test_a_long_line_of_calls_that_leave_the_budget_at_once_is_worked_off() -> None:
    budget = Budget(100)
    first = budget.enter(100)
    for _ in range(5000):
        budget.enter(100, then=budget.limiter.leave)

    budget.limiter.leave(first)
    assert len(budget.admitted) == 5001


def test_a_call_whose_start_raises_is_reported_and_the_queue_goes_on() -> None:
    failed: list[tuple[WorkerCall, Exception]] = []
    defect = RuntimeError("start")

    def fail(call: WorkerCall, error: Exception) -> None:
        failed.append((call, error))
        limiter.leave(call)

    def raising() -> None:
        raise defect

    limiter = CallLimiter(fail, max_bytes=1)
    calls = [WorkerCall(1, Lane.BULK) for _ in range(3)]
    started: list[WorkerCall] = []
    limiter.enter(calls[0], 1, lambda: None)
    limiter.enter(calls[1], 1, raising)
    limiter.enter(calls[2], 1, lambda: started.append(calls[2]))

    limiter.leave(calls[0])

    assert failed == [(calls[1], defect)]
    assert started == [calls[2]]


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens", "width"),
    [
        ({Output.DENSE, Output.SPARSE}, ["fog"], 0, 0),
        ({Output.TOKENS}, ["fog"], 3 + 64, 32),
        ({Output.TOKENS, Output.MULTI_VECTOR}, ["fog", None], 3 + 2 * 64, 32 + 8),
        ({Output.MULTI_VECTOR}, ["fog" * 1000, Pair("a", "b"), np.zeros(5, np.int32)], 200 + 66 + 69, 8),
    ],
)
def test_token_vectors_are_weighed_by_the_characters_up_to_the_models_limit(
    outputs: set[Output], inputs: list[Input], tokens: int, width: int
) -> None:
    model = replace(
        MODEL,
        dimension=32,
        max_input_length=200,
        max_batch_tokens=1024,
        token_dimension=32,
        multi_vector_dimension=8,
    )

    assert max_token_bytes(model, frozenset(outputs), inputs) == tokens * width * 4


class _Uncountable(list[Input]):
    """Inputs that no one may look at one by one."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the inputs were looked at")


def test_the_loop_does_not_count_again_what_a_thread_has_counted() -> None:
    """100,000 pairs took 12 ms for their characters and twice 14 ms for the tokens of their images."""
    picture = MediaFile(data=b"", format="PNG", tokens=70, digest=b"")
    part = counted([Pair("a", "bc"), picture], InferOptions())
    part = part._replace(inputs=_Uncountable(part.inputs))

    [job] = Submission(WorkerCall(1, Lane.BULK), [part], lambda job: CallReply(b"")).jobs

    assert (job.chars, job.tokens_of_media()) == (3, 70)


def test_what_the_library_parses_is_counted_from_64_kib_on() -> None:
    empty = b"\x78\0"
    parsed(tei_pb2.EmbedRequest, empty * (UNCOUNTED_BYTES // 2))
    parsed(tei_pb2.EmbedRequest, b"\x7a\x80\x80\x40" + bytes(2**20))
    with pytest.raises(InvalidInput, match="more than 5 fields"):
        parsed(tei_pb2.EmbedRequest, empty * (UNCOUNTED_BYTES // 2 + 1), 5)


@pytest.mark.parametrize("size", [100, 3 * 2**20, 7 * 2**20])
def test_a_large_message_is_parsed_in_pieces_of_whole_fields(size: int) -> None:
    """One call held the GIL for 32 ms where 40 MiB of emoji are 32 texts."""
    given = tei_pb2.RerankRequest(
        query="\U0001f327" * 30_000, texts=["fog" * (size // 3), "", "rain"] * 4, truncate=True
    )
    given.truncation_direction = tei_pb2.TRUNCATION_DIRECTION_LEFT
    payload = given.SerializeToString() + b"\x18\x00"  # the last `truncate` counts
    given.truncate = False

    assert parsed(tei_pb2.RerankRequest, payload) == given
    assert parsed(tei_pb2.RerankRequest, bytearray(payload)) == given
    stops = _stops_of_pieces(tei_pb2.RerankRequest, payload, 4096)
    assert stops[-1] == len(payload)
    assert max(np.diff([0, *stops])) <= 2 * 2**20 + size + 9
    with pytest.raises(InvalidInput, match="Malformed tei"):
        parsed(tei_pb2.RerankRequest, payload + b"\x12\x01\xff")


def test_a_large_table_is_a_view_of_its_message() -> None:
    """Protobuf copies it at each look: 40 MB held the worker's loop for 50 ms, three times a call."""
    small, large = (arrow_pb2.ArrowRequest(arrow_ipc=b"a" * size, key_columns=["id"]) for size in (9, UNCOUNTED_BYTES))
    for whole in (small, large):
        call = MethodCall(Method.INFER_ARROW, bytearray(whole.SerializeToString()), 0)
        message, table = call.table_message(arrow_pb2.ArrowRequest)
        assert (list(message.key_columns), bytes(table)) == (["id"], whole.arrow_ipc)
    assert isinstance(table, memoryview)
    assert table.obj is call.payload
    assert message.arrow_ipc == b""


def test_packed_numbers_are_counted_as_fields_are() -> None:
    """One field of 40 MB: the library reads it in a second, in which no other thread of the worker runs."""
    size = UNCOUNTED_BYTES + 1
    outputs = b"\x1a" + varint(size) + b"\x01" * size
    with pytest.raises(InvalidInput, match=rf"`outputs` has {size} bytes of numbers, more than 4096"):
        parsed(arrow_pb2.ArrowRequest, outputs)
    ids = tei_pb2.DecodeRequest(ids=[1] * size).SerializeToString()
    assert len(parsed(tei_pb2.DecodeRequest, ids, 2 * size).ids) == size  # it has a limit of its own
