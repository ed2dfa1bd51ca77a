"""The way of a call through a worker: let in, given to the engine, encoded, answered, exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from teimgr.engine.engine import Engine
from teimgr.engine.job import InferOptions, Input, Job
from teimgr.errors import Internal, TeimgrError, Unavailable
from teimgr.observability.request_context import CURRENT, RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.worker.calls import CallReply, Unwritten, WorkerCall
from teimgr.worker.limits import CallLimiter, ResultBudget, most_token_bytes
from teimgr.worker.metrics import TeiMetrics

Encode = Callable[[Job], CallReply | Unwritten]


class Part(NamedTuple):
    """Inputs that share their options, and their rows in the call."""

    rows: Sequence[int]
    inputs: Sequence[Input]
    options: InferOptions


class Submission:
    """The jobs of `call`; `encode` makes its answer of them. Several parts are for scores alone.

    `complete` is for the finisher thread, the rest for the loop's.
    """

    __slots__ = ("_parts", "_unfinished", "call", "encode", "jobs")

    def __init__(self, call: WorkerCall, parts: Sequence[Part], encode: Encode) -> None:
        self.call = call
        self.encode = encode
        self.jobs = [Job(part.inputs, part.options, call.lane, call.deadline, context=self) for part in parts]
        self._parts = parts
        self._unfinished = len(parts)

    def cancel(self) -> None:
        """What has not started will not."""
        for job in self.jobs:
            job.cancel()

    def complete(self) -> Job | None:
        """One more job is finished; after the last one, a job with the results of all."""
        self._unfinished -= 1
        if self._unfinished:
            return None
        # Jobs know their work: if it went on knowing them, tables would stay until the cycle collector comes by.
        jobs, self.jobs = self.jobs, []
        return jobs[0] if len(jobs) == 1 else _joined(self._parts, jobs)


def parts_of(inputs: Sequence[Input], options: Sequence[InferOptions]) -> list[Part]:
    """As few parts as there are different options; `options` has one for each input."""
    rows_of: dict[InferOptions, list[int]] = {}
    for row, option in enumerate(options):
        rows_of.setdefault(option, []).append(row)
    return [Part(rows, [inputs[row] for row in rows], option) for option, rows in rows_of.items()]


def _joined(parts: Sequence[Part], jobs: Sequence[Job]) -> Job:
    inputs: list[Input] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        for row, item in zip(part.rows, part.inputs, strict=True):
            inputs[row] = item
    whole = Job(inputs, parts[0].options, jobs[0].lane)
    whole.scores = np.zeros((len(inputs), jobs[0].scores.shape[1]), np.float32)
    for part, job in zip(parts, jobs, strict=True):
        whole.scores[part.rows] = job.scores
        whole.errors |= {part.rows[row]: error for row, error in job.errors.items()}
        served = len(job.inputs) - len(job.errors)
        whole.tokens += job.tokens
        whole.tokenization_ns += job.tokenization_ns * served
        whole.queue_ns += job.queue_ns * served
        whole.inference_ns += job.inference_ns * served
    whole.average_times()
    return whole


log = logging.getLogger(__name__)

# Room beyond the requests that run: what bounds memory when callers outrun the device.
_QUEUED_PER_RUNNING = 4
_MAX_PAYLOADS = 8
_MAX_WAITING = 65536

ResultT = TypeVar("ResultT")
Outcome = tuple[WorkerCall, Job, CallReply | Unwritten | TeimgrError]


class Dispatcher:
    """Where calls wait for the engine's answer. Loop thread, except `deliver`.

    Until `attach` gives it the engine, and after `stop_accepting`, calls are UNAVAILABLE.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.metrics = TeiMetrics()
        self._loop = asyncio.get_running_loop()
        self._engine: Engine | None = None
        self._closed = False
        self.max_bytes = spec.max_message_bytes * _MAX_PAYLOADS
        self._admission = CallLimiter(
            max_calls=spec.max_concurrent_requests * (1 + _QUEUED_PER_RUNNING),
            max_bytes=self.max_bytes,
            max_waiting=_MAX_WAITING,
            max_waiting_bytes=self.max_bytes,
        )
        self._room = ResultBudget(self.max_bytes)
        self._work: dict[WorkerCall, Submission] = {}
        self._codec = ThreadPoolExecutor(2, "codec")
        self._tasks: set[asyncio.Task[None]] = set()
        self._attended: dict[WorkerCall, asyncio.Task[None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def attach(self, engine: Engine) -> None:
        """From now on inference is served."""
        self._engine = engine
        self.metrics.attach(engine.stats, engine.info.max_input_length)

    @property
    def engine(self) -> Engine:
        """The loaded engine.

        Raises:
            Unavailable: it is still loading.
        """
        if self._engine is None:
            raise Unavailable(f"Instance '{self.spec.name}' is loading its model")
        return self._engine

    @property
    def calls(self) -> int:
        """Calls not answered yet."""
        return len(self._admission) + len(self._attended)

    def enter(self, call: WorkerCall, proceed: Callable[[], None]) -> None:
        """Let `call` in, then `proceed`; whatever goes wrong on the way answers it, here too."""
        self._empty.clear()
        try:
            if self._closed:
                raise Unavailable(f"Instance '{self.spec.name}' is stopping")
            self._admission.enter(call, lambda: self._guarded(call, proceed))
        except TeimgrError as error:
            self.metrics.failed(error)
            call.fail(error)
            self._note_if_empty()

    def enter_async(self, call: WorkerCall, proceed: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """As `enter`, for what has to await something first."""
        self.enter(call, lambda: self._spawn(call, proceed()))

    def attend(self, call: WorkerCall, answering: Coroutine[Any, Any, None]) -> None:
        """Let a coroutine answer `call`, with calls of its own at the dispatcher; who cancels `call` cancels it.

        It takes no room by itself. A draining worker waits for it.
        """
        self._empty.clear()
        task = self._attended[call] = self._loop.create_task(answering)
        task.add_done_callback(lambda _: self._attended_to(call))

    def serve(self, call: WorkerCall, inputs: Sequence[Input], options: InferOptions, encode: Encode) -> None:
        """The whole way of a call whose inputs are known: counted, weighed against the model, let in, inferred.

        Raises:
            TeimgrError: the model cannot do what `options` ask for, whether or not there is room.
        """
        if not call.streamed:
            self.metrics.received(len(inputs))
        self.engine.check(options)
        self.enter(call, lambda: self.infer(call, inputs, options, encode))

    def infer(self, call: WorkerCall, inputs: Sequence[Input], options: InferOptions, encode: Encode) -> None:
        """Give the inputs of an admitted call to the engine; `encode` runs on the finisher thread.

        A call that was cancelled since it came in is left alone.
        """
        self._submit(Submission(call, [Part(range(len(inputs)), inputs, options)], encode))

    def infer_parts(self, call: WorkerCall, parts: Sequence[Part], encode: Encode) -> None:
        """As `infer`, for scores, where inputs differ in their options; `encode` gets all in their rows again."""
        self._submit(Submission(call, parts, encode))

    async def off_loop(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Run blocking codec work on one of the codec threads."""
        return await self._loop.run_in_executor(self._codec, work, *arguments)

    def deliver(self, jobs: list[Job]) -> None:
        """Finisher thread: encode the answers of one batch, then wake the loop once."""
        outcomes = [outcome for job in jobs if (outcome := _encoded(job)) is not None]
        self._loop.call_soon_threadsafe(self._answer_all, outcomes)

    def answer(self, call: WorkerCall, outcome: CallReply | TeimgrError) -> bool:
        """Answer `call`; False when it was answered or cancelled before."""
        if not self._leave(call):
            return False
        if isinstance(outcome, TeimgrError):
            call.fail(outcome)
        else:
            call.reply(outcome)
        return True

    def cancel(self, call: WorkerCall) -> None:
        """The caller went away: what has not started will not."""
        if (work := self._work.get(call)) is not None:
            work.cancel()
        if (task := self._attended.get(call)) is not None:
            task.cancel()
        if self._leave(call):
            self.metrics.dropped()

    def stop_accepting(self) -> None:
        """Refuse new calls; those inside and in line go on."""
        self._closed = True

    async def drained(self, grace_s: float) -> None:
        """Wait until nothing is unanswered, at most `grace_s`."""
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("drain ended with %d calls unanswered", self.calls, extra={"instance": self.spec.name})

    def close(self) -> None:
        """Stop the codec threads; whoever loaded the engine closes it."""
        self._codec.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Submission) -> None:
        if work.call not in self._admission:
            return
        self._work[work.call] = work
        size_bytes = sum(most_token_bytes(self.engine.info, job.options.outputs, job.inputs) for job in work.jobs)
        self._room.enter(work.call, size_bytes, lambda: self._guarded(work.call, partial(self._start, work)))

    def _start(self, work: Submission) -> None:
        for job in work.jobs:
            self.engine.submit(job)

    def _leave(self, call: WorkerCall) -> bool:
        self._work.pop(call, None)
        self._room.leave(call)
        left = self._admission.leave(call)
        self._note_if_empty()
        return left

    def _attended_to(self, call: WorkerCall) -> None:
        del self._attended[call]
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self.calls:
            self._empty.set()

    def _answer_all(self, outcomes: list[Outcome]) -> None:
        for call, job, outcome in outcomes:
            if isinstance(outcome, Unwritten):
                self._spawn(call, self._write(call, job, outcome))
            else:
                self._finish(call, job, outcome)

    async def _write(self, call: WorkerCall, job: Job, unwritten: Unwritten) -> None:
        """The call stays inside: its answer takes more memory now than ever before."""
        if call in self._admission:
            self._finish(call, job, await self.off_loop(unwritten.write))

    def _finish(self, call: WorkerCall, job: Job, outcome: CallReply | TeimgrError) -> None:
        call.add_stats(job)
        if self.answer(call, outcome):
            self.metrics.finished(job, call, outcome if isinstance(outcome, TeimgrError) else None)
            if log.isEnabledFor(logging.DEBUG):
                self._say(call, job, outcome)

    def _say(self, call: WorkerCall, job: Job, outcome: CallReply | TeimgrError) -> None:
        facts: dict[str, object] = {"instance": self.spec.name, "rows": len(job.inputs), "tokens": job.tokens}
        facts["rows_failed"] = len(job.errors)
        code = {"code": outcome.code.name} if isinstance(outcome, TeimgrError) else {}
        with use_context(call.context):
            log.debug("call answered", extra=facts | code)

    def _guarded(self, call: WorkerCall, proceed: Callable[[], None]) -> None:
        try:
            proceed()
        except Exception as error:
            self._fail(call, error)

    def _spawn(self, call: WorkerCall, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._guarded_async(call, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded_async(self, call: WorkerCall, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._fail(call, error)

    def _fail(self, call: WorkerCall, error: Exception) -> None:
        """It came to nothing between the door and the engine, or in the midst of being handed over."""
        if (work := self._work.get(call)) is not None:
            work.cancel()
        known = error if isinstance(error, TeimgrError) else masked(error, call.context)
        if self.answer(call, known):
            self.metrics.failed(known)


def masked(error: Exception, context: RequestContext | None = None) -> Internal:
    """What a caller is told of a defect of ours; the log has the rest. `context` is the call's, if not the task's."""
    with use_context(context or CURRENT.get()):
        log.error("request failed", exc_info=error)
    return Internal("Internal error: see the worker's log")


def _encoded(job: Job) -> Outcome | None:
    """The answer that `job` completes, if it does."""
    work = job.context
    assert isinstance(work, Submission)
    if (whole := work.complete()) is None:
        return None
    try:
        return work.call, whole, work.encode(whole)
    except TeimgrError as error:
        return work.call, whole, error
    except Exception as error:
        return work.call, whole, masked(error, work.call.context)
