"""The way of inference over HTTP, whichever door it came in by: inferences at the desk, and their answers written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from teimgr.engine.job import Job, Lane
from teimgr.errors import InvalidInput, TeimgrError
from teimgr.worker.calls import Call, Reply, Unwritten, raise_first
from teimgr.worker.desk import Desk
from teimgr.worker.tei import answers
from teimgr.worker.tei.inference import Inference, Served

# A call of more inputs than this is bulk work, whoever waits for it.
_INTERACTIVE_INPUTS = 4
# To write more numbers than this takes more than a millisecond, which the answers of others need not wait for.
_LARGE_ANSWER = 2**16

Asking = Callable[[Served], Inference]


class HttpCall(Call):
    """An inference that an HTTP request asks for, answered through a future.

    `late` is the finished job of a call whose answer is made by whoever asked.
    """

    __slots__ = ("future", "late")

    def __init__(self, size_bytes: int, lane: Lane, deadline: float | None = None) -> None:
        super().__init__(size_bytes, lane, deadline)
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.late: Job | None = None

    def reply(self, reply: Reply) -> None:
        """Let the handler go on."""
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: TeimgrError) -> None:
        """Let the handler raise."""
        if not self.future.done():
            self.future.set_exception(error)

    def forget(self) -> None:
        """Nobody will ask for the answer."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # an exception that nobody looked at would be logged


class Terms(NamedTuple):
    """On which terms a request is served: who waits for it, and until when (`time.monotonic`)."""

    lane: Lane = Lane.INTERACTIVE
    deadline: float | None = None


Encode = Callable[[HttpCall, Inference, Job], Reply | Unwritten]


class Exchange:
    """Asks the desk on behalf of HTTP clients."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def desk(self) -> Desk:
        """Where it asks."""
        return self._desk

    @property
    def served(self) -> Served:
        """What is served here, and how.

        Raises:
            Unavailable: the model is still loading.
        """
        return Served(self._desk.engine.info, self._desk.spec)

    async def infer(self, asked: Sequence[Asking], terms: Terms) -> list[Reply]:
        """The replies to `asked`, in order; cancelling the await gives them up.

        Raises:
            TeimgrError: why the first that failed did; the others are given up.
        """
        with self._entered(asked, terms, _reply) as entered:
            return [await call.future for _, call in entered]

    async def jobs(self, asked: Sequence[Asking], terms: Terms) -> list[Job]:
        """The finished jobs of `asked` themselves, for an answer that is made of several; errors as `infer`."""
        with self._entered(asked, terms, _kept) as entered:
            for _, call in entered:
                await call.future
            return [call.late for _, call in entered if call.late is not None]

    @contextmanager
    def _entered(
        self, asked: Sequence[Asking], terms: Terms, encode: Encode
    ) -> Iterator[list[tuple[Inference, HttpCall]]]:
        """The inferences at the desk; those that are unanswered when the block ends are given up."""
        inferences = [self._inference(one) for one in asked]
        entered = [(inference, self._enter(inference, terms, encode)) for inference in inferences]
        try:
            yield entered
        finally:
            for _, call in entered:
                self._desk.cancel(call)
                call.forget()

    def _inference(self, asked: Asking) -> Inference:
        metrics = self._desk.metrics
        try:
            inference = asked(self.served)
        except TeimgrError as error:
            metrics.received(0)
            metrics.failed(error)
            raise
        metrics.received(len(inference.inputs))
        if inference.over_limit is not None:
            metrics.batch_too_large()
            raise InvalidInput(inference.over_limit)
        return inference

    def _enter(self, inference: Inference, terms: Terms, encode: Encode) -> HttpCall:
        inputs = inference.inputs
        lane = Lane.INTERACTIVE if len(inputs) <= _INTERACTIVE_INPUTS else Lane.BULK
        call = HttpCall(inference.size_bytes, Lane.BULK if terms.lane is Lane.BULK else lane, terms.deadline)
        kept = partial(encode, call, inference)
        self._desk.enter(call, lambda: self._desk.infer(call, inputs, inference.options, kept))
        return call


def _reply(call: HttpCall, inference: Inference, job: Job) -> Reply | Unwritten:
    """Finisher thread: the answer, unless it is a large one."""
    raise_first(job)
    written = partial(_written, call, inference, job)
    return Unwritten(written) if answers.values(job) > _LARGE_ANSWER else written()


def _written(call: HttpCall, inference: Inference, job: Job) -> Reply:
    return Reply(inference.answer(job), call.timings(job))


def _kept(call: HttpCall, inference: Inference, job: Job) -> Reply:
    """Finisher thread: nothing is written yet."""
    raise_first(job)
    call.late = job
    return Reply(b"", call.timings(job))
