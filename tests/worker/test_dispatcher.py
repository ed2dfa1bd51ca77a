"""The stages of a call with an engine that only collects jobs, and calls that become several jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest
from tests.support.rest_listener import MODEL

from teimgr.engine.engine import Engine
from teimgr.engine.job import EQUAL, InferOptions, Job, Lane, Output, Pair, Share
from teimgr.errors import Code, DeadlineExceeded, InvalidInput, Overloaded, TeimgrError, TokenRateExceeded
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.wire.tenants.table import FILE, Counter, Limits, TenantKey, TenantTable
from teimgr.worker.calls import MAX_CALL_S, CallReply, Part, Submission, WorkerCall, parts_of
from teimgr.worker.dialects.tei import TeiEmbedRequest
from teimgr.worker.dispatcher import Dispatcher

CUT = InferOptions(frozenset({Output.SCORES}), truncate=True)
WHOLE = InferOptions(frozenset({Output.SCORES}), truncate=False)
PAIRS = [Pair("q", text) for text in ("a", "bb", "ccc", "dddd")]


def finish(job: Job, scores: list[float], each_ns: int) -> None:
    """As the finisher leaves it."""
    job.scores = np.array(scores, np.float32)[:, None]
    job.tokens = 10 * len(scores)
    job.queue_ns = job.inference_ns = job.tokenization_ns = each_ns


def work(options: list[InferOptions]) -> Submission:
    call = WorkerCall(1, Lane.BULK, deadline=7.0)
    return Submission(call, parts_of(PAIRS, options), lambda job: CallReply(b""))


def test_inputs_with_the_same_options_are_one_job_in_their_order() -> None:
    one, two = parts_of(PAIRS, [CUT, WHOLE, CUT, CUT])

    assert (one.rows, one.options) == ([0, 2, 3], CUT)
    assert (two.rows, two.inputs) == ([1], [PAIRS[1]])
    assert len(parts_of(PAIRS, [CUT] * 4)) == 1


def test_scores_and_errors_come_back_in_their_rows() -> None:
    several = work([CUT, WHOLE, CUT, WHOLE])
    cut, whole = several.jobs
    finish(cut, [0.1, 0.3], 100)
    finish(whole, [0.0, 0.4], 400)
    whole.errors[0] = InvalidInput("too long")

    assert several.complete() is None
    joined = several.complete()

    assert joined is not None
    assert joined.scores[:, 0].tolist() == pytest.approx([0.1, 0.0, 0.3, 0.4])
    assert {row: error.message for row, error in joined.errors.items()} == {1: "too long"}
    assert joined.inputs == PAIRS
    assert joined.chars == 14
    assert joined.tokens == 40
    assert joined.queue_ns == joined.inference_ns == joined.tokenization_ns == (2 * 100 + 400) // 3


def test_a_single_part_is_the_job_itself() -> None:
    single = work([CUT] * 4)

    (job,) = single.jobs
    assert single.complete() is job
    assert not single.jobs  # or the two would keep each other


def test_every_job_has_the_calls_lane_and_deadline_and_is_cancelled_with_it() -> None:
    several = work([CUT, WHOLE, CUT, WHOLE])

    several.cancel()

    assert {(job.lane, job.deadline, job.cancelled) for job in several.jobs} == {(Lane.BULK, 7.0, True)}


class FakeEngine:
    """Collects the jobs that are submitted; `broken` makes it refuse them."""

    info = replace(MODEL, dimension=32, max_batch_tokens=1024, token_dimension=32)
    tokenizer = None

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.started: list[int] = []  # the jobs there were at each start
        self.broken = False
        self.expected: float | None = None
        self.estimates: list[int] = []  # the jobs of each
        self.waiting_tokens = 0

    def stats(self) -> Any:
        raise NotImplementedError

    def expected_s(self, lane: Lane, jobs: Sequence[Job] = (), share: Share = EQUAL) -> float | None:
        self.estimates.append(len(jobs))
        return self.expected

    def queued_tokens(self, lane: Lane, jobs: Sequence[Job], share: Share = EQUAL) -> tuple[int, int]:
        return self.waiting_tokens, 10 * len(jobs)

    def submit(self, job: Job, starts: bool = True) -> None:
        assert not starts
        if self.broken:
            raise RuntimeError("no device")
        self.jobs.append(job)

    def start(self) -> None:
        self.started.append(len(self.jobs))


class Asked(WorkerCall):
    """A call that records its replies."""

    def __init__(self, may_wait: bool = False, deadline: float | None = None) -> None:
        super().__init__(1, Lane.BULK, deadline, may_wait=may_wait)
        self.replies: list[CallReply | TeimgrError] = []

    def reply(self, reply: CallReply) -> None:
        self.replies.append(reply)

    def fail(self, error: TeimgrError) -> None:
        self.replies.append(error)

    @property
    def code(self) -> Code:
        [error] = self.replies
        assert isinstance(error, TeimgrError)
        return error.code


def dispatching(engine: FakeEngine, calls: int = 2, message_bytes: int = 1 << 16) -> Dispatcher:
    """A dispatcher that admits 5 × `calls`, with a result budget of 8 × `message_bytes`."""
    limits = {"max_concurrent_requests": calls, "max_waiting": 4 * calls, "max_message_bytes": message_bytes}
    spec = WorkerSpec(name="i", model_id="m", port=1, **limits)
    dispatcher = Dispatcher(spec)
    dispatcher.attach(cast(Engine, engine))
    return dispatcher


def ask(dispatcher: Dispatcher, output: Output = Output.DENSE, text: str = "fog", *, may_wait: bool = False) -> Asked:
    call = Asked(may_wait)
    options = InferOptions(frozenset({output}))
    dispatcher.infer(call, [text], options, lambda job: CallReply(str(job.inputs[0]).encode()))
    return call


async def test_a_call_is_submitted_encoded_and_answered_once() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)

    call = ask(dispatcher)
    assert dispatcher.calls == 1
    await asyncio.sleep(0)  # calls start at the end of the loop's turn
    dispatcher.deliver(engine.jobs)
    await dispatcher.drained(1.0)
    dispatcher.cancel(call)

    assert call.replies == [CallReply(b"fog")]
    assert dispatcher.calls == 0
    dispatcher.close()


class Freed:
    """Sends the name of the thread that frees it."""

    __slots__ = ("names",)

    def __init__(self, names: SimpleQueue[str]) -> None:
        self.names = names

    def __del__(self) -> None:
        self.names.put(threading.current_thread().name)


async def test_what_is_in_a_large_body_is_freed_on_a_thread() -> None:
    names: SimpleQueue[str] = SimpleQueue()
    dispatcher = dispatching(FakeEngine())
    body = TeiEmbedRequest.model_construct(inputs=[[Freed(names)]])

    dispatcher.free_off_loop(body)
    assert names.empty()
    del body
    freed_on = await asyncio.to_thread(names.get, True, 60)

    assert freed_on.startswith("codec")
    dispatcher.close()


async def test_a_body_whose_last_use_ends_within_a_submission_stops_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a garbage collection may end it at any allocation: the executor's locks, held then, are not reentrant."""
    names: SimpleQueue[str] = SimpleQueue()
    dispatcher = dispatching(FakeEngine())
    bodies = [TeiEmbedRequest.model_construct(inputs=[[Freed(names)]])]
    dispatcher.free_off_loop(bodies[0])
    start = threading.Thread.start

    def freeing(thread: threading.Thread) -> None:
        bodies.clear()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", freeing)
    await dispatcher.off_loop(int)  # which starts the first thread
    freed_on = await asyncio.to_thread(names.get, True, 60)

    assert freed_on.startswith("codec")
    dispatcher.close()


async def test_calls_beyond_the_limit_are_overloaded_or_wait() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=1)
    first, *_ = [ask(dispatcher, text=str(number)) for number in range(5)]

    refused, waiting = ask(dispatcher), ask(dispatcher, text="later", may_wait=True)
    assert refused.code is Code.OVERLOADED
    await asyncio.sleep(0)
    assert len(engine.jobs) == 5
    dispatcher.cancel(first)
    await asyncio.sleep(0)

    assert engine.jobs[0].cancelled
    assert [job.inputs for job in engine.jobs[5:]] == [["later"]]
    assert not waiting.replies
    dispatcher.close()


def asked(dispatcher: Dispatcher, within_s: float | None, *, may_wait: bool = False, streamed: bool = False) -> Asked:
    call = Asked(may_wait, None if within_s is None else time.monotonic() + within_s)
    call.streamed = streamed
    dispatcher.infer(call, ["fog"], InferOptions(), lambda job: CallReply(b""))
    return call


async def test_a_call_that_would_be_answered_too_late_is_refused_and_told_when_to_come_back() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=100)
    for engine.expected in (0.0, None, 3.5):
        assert not asked(dispatcher, within_s=5).replies
    engine.expected = 4.0

    for call in (asked(dispatcher, within_s=5), asked(dispatcher, within_s=5, may_wait=True)):
        [refused] = call.replies
        assert isinstance(refused, Overloaded)
        assert refused.retry_after_s == 4.0
    assert not asked(dispatcher, within_s=6).replies
    assert not asked(dispatcher, within_s=5, may_wait=True, streamed=True).replies  # it has back-pressure
    dispatcher.close()


async def test_the_wait_of_a_call_is_estimated_once_and_again_if_it_has_waited_for_its_place() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=1)
    first, *_ = [asked(dispatcher, within_s=5) for _ in range(5)]
    assert engine.estimates == [1] * 5, "with its own inputs"

    asked(dispatcher, within_s=5, may_wait=True)
    assert engine.estimates == [1] * 6
    dispatcher.cancel(first)
    assert engine.estimates == [1] * 7

    call = Asked(may_wait=True, deadline=time.monotonic() + 5)
    dispatcher.admit(call, lambda: None)  # its inputs are still to be read
    assert engine.estimates == [1] * 7 + [0]
    dispatcher.close()


async def test_the_limit_for_calls_without_a_deadline_spares_those_that_may_wait_and_few_calls() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=100)
    engine.expected = dispatcher.spec.max_queue_wait_secs + 0.5
    for _ in range(8):  # few large calls of a patient client
        assert not asked(dispatcher, within_s=None).replies

    assert asked(dispatcher, within_s=None).code is Code.OVERLOADED
    assert not asked(dispatcher, within_s=None, may_wait=True).replies
    engine.expected = dispatcher.spec.max_queue_wait_secs - 0.5
    assert not asked(dispatcher, within_s=None).replies
    dispatcher.close()


async def test_a_call_for_which_too_many_tokens_wait_is_refused_unless_it_may_wait() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=100)
    dispatcher.spec = replace(dispatcher.spec, max_queued_tokens=100)
    assert not asked(dispatcher, within_s=None).replies
    engine.waiting_tokens = 90
    assert not asked(dispatcher, within_s=None).replies  # its own 10 fit
    engine.waiting_tokens, engine.expected = 91, 2.5

    [refused] = asked(dispatcher, within_s=None).replies
    assert isinstance(refused, Overloaded)
    assert refused.retry_after_s == 2.5
    assert not asked(dispatcher, within_s=None, may_wait=True).replies
    assert not asked(dispatcher, within_s=None, may_wait=True, streamed=True).replies
    engine.waiting_tokens = 0  # nothing waits: a call of any size is taken
    dispatcher.spec = replace(dispatcher.spec, max_queued_tokens=5)
    assert not asked(dispatcher, within_s=None).replies
    dispatcher.close()


async def test_a_full_worker_says_how_long_its_queue_will_take() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=1)
    for _ in range(5):
        ask(dispatcher)
    engine.expected = 2.5

    [refused] = ask(dispatcher).replies

    assert isinstance(refused, Overloaded)
    assert refused.retry_after_s == 2.5
    dispatcher.close()


async def test_calls_wait_for_the_result_budget_but_for_those_that_need_none_of_it() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=9)
    long = "x" * 5000  # 512 tokens of 32 float32: the budget holds 8 of them

    large = [ask(dispatcher, Output.TOKENS, long) for _ in range(9)]
    dense = ask(dispatcher)
    await asyncio.sleep(0)
    assert [job.inputs for job in engine.jobs] == [[long]] * 8 + [["fog"]]
    dispatcher.cancel(large[0])
    await asyncio.sleep(0)

    assert len(engine.jobs) == 10
    assert not dense.replies
    dispatcher.close()


def several(dispatcher: Dispatcher, tenant: int) -> Asked:
    """A call of two parts."""
    context = RequestContext("id")
    context.belongs_to(tenant)
    with use_context(context):
        call = Asked()
    parts = parts_of(PAIRS, [CUT, WHOLE, CUT, WHOLE])
    dispatcher.admit(call, lambda: dispatcher.submit(call, parts, lambda job: CallReply(b"")))
    return call


async def test_the_other_parts_of_a_call_that_a_quota_refuses_are_not_computed() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)
    call = several(dispatcher, 0)
    await asyncio.sleep(0)
    queued, refused = engine.jobs
    refused.refuse(TokenRateExceeded("no", 2.0))
    dispatcher.deliver([refused])

    assert call.code is Code.TOKEN_RATE_EXCEEDED
    assert queued.cancelled
    dispatcher.close()


async def test_a_call_of_several_jobs_is_counted_for_its_tenant_once(tmp_path: Path) -> None:
    table = TenantTable(tmp_path / FILE)
    keys = [TenantKey("one"), TenantKey("shadow", Limits(daily=25), shadow=True)]
    numbers = table.configure(keys)
    engine = FakeEngine()
    dispatcher = Dispatcher(WorkerSpec(name="i", model_id="m", port=1), tmp_path / FILE)
    dispatcher.attach(cast(Engine, engine))
    for name in numbers:
        several(dispatcher, numbers[name])
        await asyncio.sleep(0)
        for job in engine.jobs:
            finish(job, [0.1, 0.2], 100)
            if job.account is not None:
                job.account.charge(20)
        dispatcher.deliver(engine.jobs)
        engine.jobs = []

    [(_, row, _)] = table.rows()
    of_call = {Counter.TOKENS: 40, Counter.TEXTS: 4, Counter.CALLS: 1}
    shadowed = of_call | {Counter.SHADOWED: 1}
    assert {
        tenant: {counter: counts[counter] for counter in Counter if counts[counter]}
        for tenant, counts in row.counts.items()
        if any(counts)
    } == {numbers["one"]: of_call, numbers["shadow"]: shadowed}
    dispatcher.close()
    table.close()


async def test_an_engine_that_refuses_a_job_fails_its_call_alone() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)

    engine.broken = True
    failed = ask(dispatcher)
    await asyncio.sleep(0)
    engine.broken = False
    served = ask(dispatcher)
    await asyncio.sleep(0)

    assert failed.code is Code.INTERNAL_ERROR
    assert dispatcher.calls == len(engine.jobs) == 1
    assert not served.replies
    dispatcher.close()


async def test_calls_that_come_together_start_together() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)

    together = [ask(dispatcher, text=text) for text in ("fog", "rain", "mist")]
    dispatcher.cancel(together[1])
    assert not engine.jobs
    await asyncio.sleep(0)
    ask(dispatcher, text="snow")
    await asyncio.sleep(0)

    assert [job.inputs for job in engine.jobs] == [["fog"], ["mist"], ["snow"]]
    assert engine.started == [2, 3]
    dispatcher.close()


async def test_a_job_delivered_by_the_loops_own_thread_is_answered_at_once() -> None:
    class Inline(FakeEngine):
        def start(self) -> None:
            dispatcher.deliver(self.jobs)

    dispatcher = dispatching(Inline())

    call = ask(dispatcher)
    await asyncio.sleep(0)

    assert call.replies == [CallReply(b"fog")]
    assert dispatcher.calls == 0
    dispatcher.close()


async def test_a_call_cancelled_before_it_is_submitted_starts_no_job() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)
    call = Asked()
    dispatcher.admit(call, lambda: None)

    dispatcher.cancel(call)
    dispatcher.submit(call, [Part(range(1), ["fog"], InferOptions())], lambda job: CallReply(b""))

    assert not engine.jobs
    assert not call.replies
    dispatcher.close()


async def test_a_worker_that_stops_accepting_refuses_new_calls_and_answers_the_others() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)
    call = ask(dispatcher)
    await asyncio.sleep(0)

    dispatcher.stop_accepting()
    late = ask(dispatcher)
    dispatcher.deliver(engine.jobs)
    await dispatcher.drained(1.0)

    assert late.code is Code.BACKEND_UNAVAILABLE
    assert call.replies == [CallReply(b"fog")]
    dispatcher.close()


async def test_decoded_requests_wait_until_those_before_are_answered() -> None:
    dispatcher = Dispatcher(WorkerSpec(name="a", model_id="m", port=1, max_message_bytes=100))
    calls = [Asked() for _ in range(3)]
    for call in calls:
        dispatcher.admit(call, lambda: None)

    reserves = [asyncio.create_task(dispatcher.reserve(call, dispatcher.max_bytes)) for call in calls]
    await asyncio.sleep(0)
    assert [each.done() for each in reserves] == [True, False, False]

    dispatcher.cancel(calls[1])  # which leaves no task behind
    dispatcher.answer(calls[0], InvalidInput("x"))
    await reserves[2]
    with pytest.raises(asyncio.CancelledError):
        await reserves[1]
    assert dispatcher.calls == 1
    dispatcher.check_awaited(calls[2])
    dispatcher.answer(calls[2], InvalidInput("x"))
    assert not len(dispatcher._decoded_budget)
    with pytest.raises(TeimgrError, match="gone"):
        await dispatcher.reserve(calls[2], 1)
    with pytest.raises(TeimgrError, match="gone"):
        dispatcher.check_awaited(calls[2])


async def test_work_for_a_call_whose_deadline_has_passed_is_given_up() -> None:
    dispatcher = Dispatcher(WorkerSpec(name="a", model_id="m", port=1))
    call = Asked()
    dispatcher.admit(call, lambda: None)
    dispatcher.check_awaited(call)

    call.deadline = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        dispatcher.check_awaited(call)
    dispatcher.cancel(call)


def test_every_call_has_a_deadline() -> None:
    call = WorkerCall(1, Lane.BULK)

    assert call.deadline == call.received + MAX_CALL_S


async def test_thousands_of_calls_wait_by_default_and_as_many_as_max_waiting_says() -> None:
    dispatcher = Dispatcher(WorkerSpec(name="i", model_id="m", port=1))
    dispatcher.attach(cast(Engine, FakeEngine()))
    assert not any(ask(dispatcher).replies for _ in range(4000))

    limited = Dispatcher(WorkerSpec(name="i", model_id="m", port=1, max_concurrent_requests=3, max_waiting=2))
    limited.attach(cast(Engine, FakeEngine()))
    assert [bool(ask(limited).replies) for _ in range(7)] == [False] * 5 + [True] * 2


async def test_queries_that_leave_the_interactive_lane_do_not_wait_for_the_bulk_work_of_their_key() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=100)
    calls = [Asked() for _ in range(4)]
    for number, call in enumerate(calls):
        call.lane, call.context = Lane.INTERACTIVE, RequestContext(str(number))
        call.context.tenant = 0 if number else 7  # another key, once
        dispatcher.infer(call, ["fog"], InferOptions(), lambda job: CallReply(b""))
    await asyncio.sleep(0)

    assert [job.lane for job in engine.jobs] == [Lane.INTERACTIVE] * 3 + [Lane.BULK]
    assert [job.share.tenant for job in engine.jobs] == [0] * 3 + [~0]
    dispatcher.close()
