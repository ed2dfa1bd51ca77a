"""Inference over HTTP, on the instance port and behind the gateway: calls to the dispatcher, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from teimgr.engine.job import InferOptions, Input, Job, Lane, Pair
from teimgr.errors import InvalidInput, TeimgrError
from teimgr.spec import ModelInfo, WorkerSpec
from teimgr.wire.error_bodies import JSON_TYPE
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.calls import CallReply, Unwritten, WorkerCall, raise_first
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.http import answers
from teimgr.worker.http.bodies import Body

if TYPE_CHECKING:  # it would bring torch along, which who only speaks the dialect can do without
    pass


Answer = Callable[[Job], bytes]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a route, and the terms on which it is served."""

    model: ModelInfo
    spec: WorkerSpec

    @property
    def name(self) -> str:
        """What the OpenAI dialect calls the model."""
        return self.spec.served_model_name or self.model.model_id


@dataclass(frozen=True, slots=True)
class Inference:
    """Inputs and options for a job, and the bytes that a finished job without errors is answered with.

    `limit` is how many inputs the dialect lets a client send at once.
    """

    inputs: Sequence[Input]
    options: InferOptions
    answer: Answer
    limit: int

    @property
    def size_bytes(self) -> int:
        """About what the inputs take in memory."""
        return sum(map(_size, self.inputs))

    @property
    def over_limit(self) -> str | None:
        """TEI's sentence for too many inputs, None where they are not too many."""
        if len(self.inputs) <= self.limit:
            return None
        return f"batch size {len(self.inputs)} > maximum allowed batch size {self.limit}"


class InferenceRequest(Body):
    """A body that asks for inference."""

    def inference(self, served: ServedModel) -> Inference:
        """What it asks for.

        Raises:
            EmptyInput, WrongModelKind: TEI refuses it before it counts the inputs.
        """
        raise NotImplementedError


def _size(one: Input) -> int:
    if isinstance(one, Pair):
        return len(one.first) + len(one.second)
    if isinstance(one, np.ndarray):
        return one.nbytes
    return len(one or "")


# A call of more inputs than this is bulk work, whoever waits for it.
_INTERACTIVE_INPUTS = 4
# To write more numbers than this takes more than a millisecond, which the answers of others need not wait for.
_LARGE_ANSWER = 2**16

Asking = Callable[[ServedModel], Inference]


class HttpCall(WorkerCall):
    """An inference that an HTTP request asks for, answered through a future.

    `late` is the finished job of a call whose answer is made by whoever asked.
    """

    __slots__ = ("future", "late")

    def __init__(self, size_bytes: int, lane: Lane, deadline: float | None = None) -> None:
        super().__init__(size_bytes, lane, deadline)
        self.future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self.late: Job | None = None

    def reply(self, reply: CallReply) -> None:
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


class CallOptions(NamedTuple):
    """On which terms a request is served: who waits for it, and until when (`time.monotonic`)."""

    lane: Lane = Lane.INTERACTIVE
    deadline: float | None = None


Encode = Callable[[HttpCall, Inference, Job], CallReply | Unwritten]


class HttpInference:
    """Asks the dispatcher on behalf of HTTP clients."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def dispatcher(self) -> Dispatcher:
        """Where it asks."""
        return self._dispatcher

    @property
    def served(self) -> ServedModel:
        """What is served here, and how.

        Raises:
            Unavailable: the model is still loading.
        """
        return ServedModel(self._dispatcher.engine.info, self._dispatcher.spec)

    async def infer(self, asked: Sequence[Asking], terms: CallOptions) -> list[CallReply]:
        """The replies to `asked`, in order; cancelling the await gives them up.

        Raises:
            TeimgrError: why the first that failed did; the others are given up.
        """
        with self._entered(asked, terms, _reply) as entered:
            return [await call.future for _, call in entered]

    async def jobs(self, asked: Sequence[Asking], terms: CallOptions) -> list[Job]:
        """The finished jobs of `asked` themselves, for an answer that is made of several; errors as `infer`."""
        with self._entered(asked, terms, _kept) as entered:
            for _, call in entered:
                await call.future
            return [call.late for _, call in entered if call.late is not None]

    @contextmanager
    def _entered(
        self, asked: Sequence[Asking], terms: CallOptions, encode: Encode
    ) -> Iterator[list[tuple[Inference, HttpCall]]]:
        """The inferences at the dispatcher; those that are unanswered when the block ends are given up."""
        inferences = [self._inference(one) for one in asked]
        entered = [(inference, self._enter(inference, terms, encode)) for inference in inferences]
        try:
            yield entered
        finally:
            for _, call in entered:
                self._dispatcher.cancel(call)
                call.forget()

    def _inference(self, asked: Asking) -> Inference:
        metrics = self._dispatcher.metrics
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

    def _enter(self, inference: Inference, terms: CallOptions, encode: Encode) -> HttpCall:
        inputs = inference.inputs
        lane = Lane.INTERACTIVE if len(inputs) <= _INTERACTIVE_INPUTS else Lane.BULK
        call = HttpCall(inference.size_bytes, Lane.BULK if terms.lane is Lane.BULK else lane, terms.deadline)
        kept = partial(encode, call, inference)
        self._dispatcher.enter(call, lambda: self._dispatcher.infer(call, inputs, inference.options, kept))
        return call


def _reply(call: HttpCall, inference: Inference, job: Job) -> CallReply | Unwritten:
    """Finisher thread: the answer, unless it is a large one."""
    raise_first(job)
    written = partial(_written, call, inference, job)
    return Unwritten(written) if answers.values(job) > _LARGE_ANSWER else written()


def _written(call: HttpCall, inference: Inference, job: Job) -> CallReply:
    return CallReply(inference.answer(job), call.timings(job))


def _kept(call: HttpCall, inference: Inference, job: Job) -> CallReply:
    """Finisher thread: nothing is written yet."""
    raise_first(job)
    call.late = job
    return CallReply(b"", call.timings(job))


HttpHandler = Callable[[HttpInference, HttpRequest, CallOptions], Coroutine[Any, Any, HttpReply]]

# A body beyond this size is parsed on a codec thread; the loop serves others meanwhile.
LARGE_BODY_BYTES = 128 * 1024


def json_reply(body: bytes, headers: Mapping[str, str] | None = None) -> HttpReply:
    """200 with a body of JSON."""
    return HttpReply(200, {**JSON_TYPE, **(headers or {})}, body)
