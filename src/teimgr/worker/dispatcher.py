"""The path of a call through a worker: admission, result memory, the engine, encoding, exactly one reply."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from teimgr.engine.engine import Engine
from teimgr.engine.job import InferOptions, Input, Job
from teimgr.engine.token_pooling import pool_documents
from teimgr.errors import Cancelled, DeadlineExceeded, Internal, Overloaded, TeimgrError, Unavailable
from teimgr.http.byte_budget import ByteBudget
from teimgr.http.turns import TURNS_OF, SharedThreads, WorkTurns
from teimgr.observability.request_context import CURRENT, RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.wire.gil import StepThread, free, short_turns
from teimgr.wire.json_scan import Steps
from teimgr.wire.spaces import Marks, check_expected, reply_headers, reply_marks
from teimgr.worker.calls import CallReply, DeferredReply, Encode, Part, Submission, WorkerCall, job_of, max_token_bytes
from teimgr.worker.limiter import CallLimiter, InteractiveCalls
from teimgr.worker.scores import ListSubmission, lists_of, prompts_of
from teimgr.worker.tenant_meter import Tenants
from teimgr.worker.worker_metrics import TeiMetrics

if TYPE_CHECKING:
    from teimgr.worker.media_links import LinkFetcher, PageRenderer

log = logging.getLogger(__name__)

# Limits on a worker's memory: bytes of admitted calls, as a multiple of the largest payload; number of waiting calls.
_MAX_PAYLOADS = 8
_MAX_QUEUED = 65536
# With more inputs, those of a call are freed on a thread: 90,000 pairs would hold the loop for 20 ms.
_MANY_INPUTS = 10_000
# A call is refused if its answer is expected after this part of the time to its deadline. The margin is for errors of
# the estimate: an answer after the deadline costs as much as one before it.
_PART_OF_DEADLINE = 0.75
# With fewer calls in the worker, one without a deadline is not refused for its expected wait: a few calls are one
# patient client with large batches, not an overload.
_PATIENT_CALLS = 8

ResultT = TypeVar("ResultT")
Outcome = tuple[WorkerCall, Job, CallReply | DeferredReply | TeimgrError]


class Dispatcher:
    """Takes calls to the engine and answers each exactly once. Use it on the loop's thread, except `deliver` and
    `check_awaited`.

    The stages, in the order of the methods:

    1. Admission (`serve`, `infer`, `admit`): estimates the wait, then limits calls and payload bytes. Calls that may
       wait are queued.
    2. Result memory (`_enter`): calls whose results grow with every token wait until the result budget has room.
    3. The engine (`_start`): one job per part, checked by `Engine.submit`. Calls that arrived in the same turn of the
       loop start together at its end, as one batch; a batch of a few queries is usually computed right there.
    4. Encoding (`deliver`): on the thread that finished the batch, which is the finisher's, an engine thread or the
       loop's; very large replies on a codec thread (`_encode_deferred`).
    5. The reply (`_finish`, `answer`): first releases everything that the call holds.

    An error at any stage is sent as the reply. Calls are UNAVAILABLE before `attach` and after `stop_accepting`.
    """

    def __init__(self, spec: WorkerSpec, tenants: Path | None = None) -> None:
        self.spec = spec
        self._tenants = Tenants(tenants, spec)
        self.metrics = TeiMetrics()
        self.max_bytes = spec.max_message_bytes * _MAX_PAYLOADS
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._engine: Engine | None = None
        self._closed = False
        self.taken = 0
        """Number of calls and stream messages since the start."""
        self._call_limiter = CallLimiter(
            self._fail,
            max_calls=spec.max_concurrent_requests + spec.max_waiting,
            max_bytes=self.max_bytes,
            max_waiting=_MAX_QUEUED,
            max_waiting_bytes=self.max_bytes,
        )
        self._interactive = InteractiveCalls()
        # Bytes of the instance port's messages until they become calls, and of replies until clients have read them.
        self.port_budget = ByteBudget(self.max_bytes)
        self._result_budget = CallLimiter(self._fail, max_bytes=self.max_bytes)
        self._decoded_budget = CallLimiter(self._fail, max_bytes=self.max_bytes)
        self.max_length = 0  # maximum tokens of a text; set by `attach`
        self.space_headers: dict[str, str] = {}  # headers of each reply; set by `attach`
        self.space_marks: Marks = ()
        # Futures, for memory or a codec thread, that tasks of admitted calls await.
        self._awaiting: dict[WorkerCall, asyncio.Future[Any]] = {}
        self._submissions: dict[WorkerCall, Submission] = {}
        self._starting: list[Submission] = []  # calls of this turn of the loop
        self._answering: dict[WorkerCall, asyncio.Task[None]] = {}  # calls that `run` answers
        self._tasks: set[asyncio.Task[None]] = set()
        self.turns = WorkTurns()
        """Turns of callers on the worker's loop, for reading bodies and starting calls of links."""
        self._codec = SharedThreads(2, "codec")
        self._tokenizing = StepThread("tokenize")
        self._pooling = SharedThreads(1, "pooling")  # token pooling
        self._rereading = StepThread("reread")
        self.fetcher = _link_fetcher(spec)
        self._renderer: PageRenderer | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self.max_length = engine.info.max_input_length
        self.metrics.attach(engine.stats, self.max_length)
        self.space_headers = reply_headers(engine.info.space, engine.info.precision)
        self.space_marks = reply_marks(engine.info.space, engine.info.precision)

    @property
    def engine(self) -> Engine:
        """Return the loaded engine; raises Unavailable while it is loading."""
        if self._engine is None:
            raise Unavailable(f"Instance '{self.spec.name}' is loading its model")
        return self._engine

    def check_space(self, expected: str | None) -> None:
        """Refuse a request whose expected fingerprint is not the model's; raises as `spaces.check_expected`."""
        if expected is not None:
            info = self.engine.info
            check_expected(expected, info.space, info.precision, self.spec.name)

    @property
    def calls(self) -> int:
        return len(self._call_limiter) + sum(call not in self._call_limiter for call in self._answering)

    # Stage 1: admission.

    def serve(self, call: WorkerCall, inputs: Sequence[Input], options: InferOptions, encode: Encode) -> None:
        """Count a request, then `infer`."""
        if not call.streamed:
            self.metrics.received(len(inputs))
        call.price(len(inputs), self.max_length)
        self.infer(call, inputs, options, encode)

    def infer(self, call: WorkerCall, inputs: Sequence[Input], options: InferOptions, encode: Encode) -> None:
        """Admit a call, compute its inputs, and reply with what `encode` makes of the finished job.

        `encode` runs on the thread that finishes the job.
        """
        self._interactive.enter(call, self._tenants.share(call))
        submission = Submission(call, (Part(range(len(inputs)), inputs, options),), encode)
        self.admit(call, partial(self._enter, submission), submission.jobs)
        submission.wait()  # no-op if it was admitted

    def admit(self, call: WorkerCall, proceed: Callable[[], None], jobs: Sequence[Job] = ()) -> None:
        """Run `proceed` once `call` is admitted; at once if it was admitted before its message was parsed.

        Errors, including those of `proceed`, become the reply. `jobs` are the call's jobs, if they are known.
        """
        if call in self._call_limiter:
            try:
                self._check_wait(call, jobs, self._patience_s(call))  # again, since its lane is known now
                proceed()
            except Exception as error:
                self._fail(call, error)
            return
        self._idle.clear()
        self.taken += 1
        try:
            if self._closed:
                raise Unavailable(f"Instance '{self.spec.name}' is stopping")
            self._check_wait(call, jobs, self._patience_s(call))
            self._call_limiter.enter(call, call.size_bytes, proceed, call.may_wait)
        except TeimgrError as error:
            if isinstance(error, Overloaded) and error.retry_after_s is None and self._engine is not None:
                error.try_after(self._engine.expected_s(call.lane))
            self.metrics.failed(error)
            self._tenants.refused(call)
            self._interactive.leave(call)
            call.fail(error)
            self._check_idle()

    def _patience_s(self, call: WorkerCall) -> float | None:
        """Return how long a call without a deadline may wait; None without a limit."""
        is_patient = call.has_deadline or call.may_wait or len(self._call_limiter) < _PATIENT_CALLS
        return None if is_patient else self.spec.max_queue_wait_secs or None

    def _check_wait(self, call: WorkerCall, jobs: Sequence[Job], most_s: float | None = None) -> None:
        """Refuse a call that would be answered too late, or that would wait behind too many tokens.

        A call with a deadline is refused if it will probably miss it; a call without one if it would wait for more than
        `most_s`, since HTTP callers send no deadline and disconnect when theirs has passed. Messages of streams have
        back-pressure instead.

        A call that may not wait is refused if more than `max_queued_tokens` tokens would wait.

        Raises:
            Overloaded: its `retry_after_s` is the time in which the work ahead is expected to be done.
        """
        if (engine := self._engine) is None or call.streamed:
            return
        if (most := self.spec.max_queued_tokens) and jobs and not call.may_wait:
            share = self._tenants.share(call)
            ahead, own = engine.queued_tokens(call.lane, jobs, share)
            if ahead and ahead + own > most:
                raise Overloaded(retry_after_s=engine.expected_s(call.lane, jobs, share))
        if call.has_deadline:
            most_s = (call.deadline - time.monotonic()) * _PART_OF_DEADLINE
        elif most_s is None:
            return
        expected_s = engine.expected_s(call.lane, jobs if call.has_deadline else (), self._tenants.share(call))
        if expected_s and expected_s > most_s:
            raise Overloaded(retry_after_s=expected_s)

    def admit_async(
        self, call: WorkerCall, proceed: Callable[[], Coroutine[Any, Any, None]], *, computes: bool = True
    ) -> None:
        """Like `admit`, for a coroutine that ends with `submit` or `answer`; also for a call that is admitted already.
        `computes`: it needs the model, not only a tokenizer."""
        if computes:
            self._interactive.enter(call, self._tenants.share(call))
        self.admit(call, lambda: self._spawn(call, proceed()))

    def is_admitted(self, call: WorkerCall) -> bool:
        return call in self._call_limiter

    def run(self, call: WorkerCall, answering: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that answers `call` by further calls, which are admitted separately; the first of them
        takes the admission of `call` (`pass_on`). `cancel` cancels it."""
        self._idle.clear()

        def forget(_: asyncio.Task[None]) -> None:
            del self._answering[call]
            if call in self._call_limiter:
                self._release(call)
            self._check_idle()

        task = self._answering[call] = self._loop.create_task(answering)
        task.add_done_callback(forget)

    def pass_on(self, call: WorkerCall, to: WorkerCall) -> None:
        """Transfer the admission of `call`, whose message has been read, to `to`."""
        self._call_limiter.pass_on(call, to)

    async def reserve(self, call: WorkerCall, size_bytes: int) -> None:
        """Wait until `size_bytes` of a decoded request fit into memory; they are held until the admitted call ends."""
        if call not in self._call_limiter:
            raise Cancelled("the caller has gone")
        granted = self._awaiting[call] = self._loop.create_future()
        self._decoded_budget.enter(call, size_bytes, partial(granted.set_result, None))
        try:
            await granted
        finally:
            self._awaiting.pop(call, None)

    async def read_off_loop(self, call: WorkerCall, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Like `off_loop`, to read the message of an admitted call: skipped, or its result dropped, once the call has
        ended.

        Raises:
            Cancelled, DeadlineExceeded: as `check_awaited`, also if the call ended while the work ran.
        """

        def read() -> ResultT:
            self.check_awaited(call)
            return work(*arguments)

        with short_turns():
            result = asyncio.wrap_future(self._codec.submit(read))
            self._awaiting[call] = result
            try:
                found = await result
            finally:
                self._awaiting.pop(call, None)
                del result  # an error refers to this frame: breaks the cycle that would keep the result
        self.check_awaited(call)
        return found

    def check_awaited(self, call: WorkerCall) -> None:
        """Raise if the call has ended; called on codec threads between the steps of its work.

        Raises:
            Cancelled: the call was cancelled or answered.
            DeadlineExceeded: its deadline has passed.
        """
        if call not in self._call_limiter:
            raise Cancelled("the caller has gone")
        if time.monotonic() > call.deadline:
            raise DeadlineExceeded

    # Stages 2 and 3: result memory and the engine.

    def submit(self, call: WorkerCall, parts: Sequence[Part], encode: Encode, result_bytes: int | None = None) -> None:
        """Like `infer`, for a call that was admitted before its inputs were read; no-op if it was cancelled since.

        `encode` gets all inputs, in the order of the call. `result_bytes` is as in `Submission`.
        """
        self._enter(Submission(call, parts, encode, has_waited=True, result_bytes=result_bytes))

    def _enter(self, submission: Submission) -> None:
        """Start the engine jobs of an admitted call once the result budget has room."""
        call = submission.call
        if call not in self._call_limiter:
            return
        if submission.has_waited:
            self._check_wait(call, submission.jobs)
        info = self.engine.info
        if info.listwise and not isinstance(submission, ListSubmission):
            self._spawn(call, self._enter_lists(submission))
            return
        self._submissions[call] = submission
        if (size_bytes := submission.result_bytes) is None:
            size_bytes = sum([max_token_bytes(info, job.options.outputs, job.inputs) for job in submission.jobs])
        if size_bytes:
            self._result_budget.enter(call, size_bytes, partial(self._start, submission))
        else:
            self._start(submission)

    async def _enter_lists(self, submission: Submission) -> None:
        """Build the prompts of a listwise reranker from the pairs of a call, and enter them as one job."""
        call, parts = submission.call, submission.parts
        for part in parts:
            self.engine.check(part.options)
        prompt, width = self.engine.tokenizer.lists, self.engine.info.multi_vector_dimension
        assert prompt is not None  # set for listwise models
        check = partial(self.check_awaited, call)
        lists = await self.on_tokenizer_thread(lists_of, parts)
        prompts = await prompts_of(lists, prompt, self.on_tokenizer_thread, check)
        pairs = await self.on_tokenizer_thread(job_of, parts, call.lane)
        self._enter(ListSubmission(call, pairs, submission.encode, prompts, width))

    def _start(self, submission: Submission) -> None:
        self._starting.append(submission)
        if len(self._starting) == 1:
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        starting, self._starting = self._starting, []
        engine = self.engine
        for submission in starting:
            if submission.call not in self._call_limiter:  # cancelled meanwhile
                continue
            try:
                self._tenants.charge(submission)
                for job in submission.jobs:
                    engine.submit(job, starts=False)
            except Exception as error:
                self._fail(submission.call, error)
        engine.start()

    # Stage 4: encoding.

    def deliver(self, jobs: list[Job]) -> None:
        """Encode the replies of one batch on the calling thread, which finished it, then send them from the loop."""
        outcomes: list[Outcome] = []
        for job in jobs:
            submission = job.context
            assert isinstance(submission, Submission)
            if job.account is not None:
                job.account.settle(job.tokens)
            if job.refused is not None:
                submission.cancel()  # cancels its other jobs; the answer refunds them
                outcomes.append((submission.call, job, job.refused))
                continue
            if (whole := submission.complete()) is None:
                continue
            reply: CallReply | DeferredReply | TeimgrError
            try:
                reply = self._pooled(submission, whole) if whole.options.pool_factor > 1 else submission.encode(whole)
            except TeimgrError as error:
                reply = error
            except Exception as error:
                reply = masked(error, submission.call.context)
            outcomes.append((submission.call, whole, reply))
        if threading.get_ident() == self._loop_thread:
            self._finish_all(outcomes)
        else:
            self._loop.call_soon_threadsafe(self._finish_all, outcomes)

    def _pooled(self, submission: Submission, job: Job) -> DeferredReply:
        """Encode the reply with token pooling, which may take a large part of a second for each document."""

        def encode() -> CallReply:
            pool_documents(job, self.engine.info, partial(self.check_awaited, submission.call))
            reply = submission.encode(job)
            return reply.encode() if isinstance(reply, DeferredReply) else reply

        return DeferredReply(encode, pools=True)

    async def off_loop(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Run `work` on a codec thread; callers take turns (`TURNS_OF`)."""
        with short_turns():
            return await self._codec.run(work, *arguments)

    async def in_steps(self, steps: Steps[ResultT]) -> ResultT:
        """Run slow Python on a codec thread, alternating between the steps of several calls, so that none waits for
        another."""
        with short_turns():
            return await self._rereading.run(steps)

    def renderer(self) -> PageRenderer:
        """Return the renderer of PDF pages; its threads start at the first use."""
        if self._renderer is None:
            from teimgr.worker.media_links import PageRenderer

            self._renderer = PageRenderer()
        return self._renderer

    def free_off_loop(self, value: object) -> None:
        """Free the members of an unused `value` in parts on a thread: freeing them in one call could take 30 ms."""
        weakref.finalize(value, self._free_members, vars(value)).atexit = False

    def _free_members(self, members: dict[str, Any]) -> None:
        """May run during a garbage collection, while this thread holds the locks of `submit`."""
        with suppress(RuntimeError):  # the process is stopping
            self._loop.call_soon_threadsafe(self._free_on_codec_thread, members)

    def _free_on_codec_thread(self, values: dict[str, Any] | list[Sequence[Input]]) -> None:
        with suppress(RuntimeError):
            self._codec.submit(_freed_in_short_turns, values)

    async def on_tokenizer_thread(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Run `work` that tokenizes a caller's texts on its own thread, so that codecs are not held up."""
        return await self.in_tokenizer_turns(_one_step(work, *arguments))

    async def in_tokenizer_turns(self, steps: Steps[ResultT]) -> ResultT:
        """Run steps on the tokenizer thread, alternating between callers."""
        with short_turns():
            return await self._tokenizing.run(steps)

    async def _encode_deferred(self, call: WorkerCall, job: Job, deferred: DeferredReply) -> None:
        if call in self._call_limiter:  # it leaves the limiter only after encoding, when it holds the most memory
            with short_turns():
                threads = self._pooling if deferred.pools else self._codec
                reply = await threads.run(deferred.encode)
            self._finish(call, job, reply)

    # Stage 5: the reply.

    def answer(self, call: WorkerCall, outcome: CallReply | TeimgrError) -> bool:
        """Release what `call` holds and answer it; False if it was answered or cancelled before."""
        if not self._release(call):
            return False
        if isinstance(outcome, TeimgrError):
            call.fail(outcome)
        else:
            call.reply(outcome)
        return True

    def refuse(self, call: WorkerCall, error: TeimgrError) -> None:
        """Fail a call, whether or not it is admitted."""
        self._release(call)
        call.fail(error)

    def cancel(self, call: WorkerCall) -> None:
        """Withdraw a call whose caller has gone; inputs that have not started never start. No-op if it was answered."""
        if call not in self._call_limiter and call not in self._answering:
            return
        if (submission := self._submissions.get(call)) is not None:
            submission.cancel()
        if (task := self._answering.get(call)) is not None:
            task.cancel()
        if self._release(call):
            self.metrics.dropped()

    def _finish_all(self, outcomes: list[Outcome]) -> None:
        for call, job, outcome in outcomes:
            if isinstance(outcome, DeferredReply):
                self._spawn(call, self._encode_deferred(call, job, outcome))
            else:
                self._finish(call, job, outcome)

    def _finish(self, call: WorkerCall, job: Job, outcome: CallReply | TeimgrError) -> None:
        call.add_stats(job)
        error = outcome if isinstance(outcome, TeimgrError) else None
        if (submission := self._submissions.get(call)) is not None:  # first: clients find answered calls counted
            self._tenants.finished(submission, job, error)
        if not self.answer(call, outcome):
            return
        if job.refused is not None:
            self.metrics.failed(job.refused)
            return
        self.metrics.finished(job, call, error)
        if log.isEnabledFor(logging.DEBUG):
            fields: dict[str, object] = {"instance": self.spec.name, "rows": len(job.inputs), "tokens": job.tokens}
            fields["rows_failed"] = len(job.errors)
            with use_context(call.context):
                log.debug("call answered", extra=fields | ({"code": error.code.name} if error else {}))

    def _fail(self, call: WorkerCall, error: Exception) -> None:
        """Fail a call whose handler, submission or deferred encoding raised."""
        if (submission := self._submissions.get(call)) is not None:
            submission.cancel()
        known = error if isinstance(error, TeimgrError) else masked(error, call.context)
        if self.answer(call, known):
            self.metrics.failed(known)

    def _release(self, call: WorkerCall) -> bool:
        if (submission := self._submissions.pop(call, None)) is not None:
            if submission.accounts:
                submission.settle()
            many = [part.inputs for part in submission.parts if len(part.inputs) > _MANY_INPUTS]
            if many:  # scheduled, so that no frame here refers to them
                self._loop.call_soon(self._free_on_codec_thread, many)
        self._result_budget.leave(call)
        if (awaited := self._awaiting.pop(call, None)) is not None:
            awaited.cancel()  # ends the waiting task
        self._decoded_budget.leave(call)
        self._interactive.leave(call)
        was_held = self._call_limiter.leave(call)
        self._check_idle()
        return was_held

    def _spawn(self, call: WorkerCall, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            # Not the context of the call whose end admitted this one.
            CURRENT.set(call.context)
            TURNS_OF.set(call.turns_of)
            try:
                await work
            except Exception as error:
                self._fail(call, error)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Draining.

    def stop_accepting(self) -> None:
        """Refuse new calls; admitted and queued calls go on."""
        self._closed = True

    async def drained(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain ended with %d calls unanswered", self.calls, extra={"instance": self.spec.name})

    def close(self) -> None:
        """Stop the codec and tokenizer threads; the owner of the engine closes it."""
        for pool in (self._codec, self._tokenizing, self._pooling, self._rereading):
            pool.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self._renderer is not None:
            self._renderer.close()

    def _check_idle(self) -> None:
        if not self._answering and not self._call_limiter:
            self._idle.set()


def masked(error: Exception, context: RequestContext | None = None) -> Internal:
    """Log an unexpected error and return the error for the client, which discloses no details.

    The log line has the call's `context`; None stands for the context of the task.
    """
    with use_context(context or CURRENT.get()):
        log.error("request failed", exc_info=error)
    return Internal("Internal error: see the worker's log")


def _link_fetcher(spec: WorkerSpec) -> LinkFetcher | None:
    """Return the fetcher of files that requests link to; None if the settings allow no host."""
    if not spec.media_url_hosts:
        return None
    from teimgr.worker.media_links import LinkFetcher  # here: its HTTP client is needed only with this setting

    return LinkFetcher(spec.media_url_hosts, spec.media_url_networks, spec.max_message_bytes)


def _freed_in_short_turns(values: dict[str, Any] | list[Sequence[Input]]) -> None:
    with short_turns():
        free(values)


def _one_step(work: Callable[..., ResultT], *arguments: object) -> Steps[ResultT]:
    yield from ()
    return work(*arguments)
