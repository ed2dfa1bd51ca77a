"""The way of inference over HTTP: a body read, its calls at the desk, their replies, and a client that may hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from teimgr.engine.job import Job, Lane
from teimgr.errors import Cancelled, InvalidInput, TeimgrError
from teimgr.listening import read_limited
from teimgr.worker.calls import Call, Reply, raise_first
from teimgr.worker.desk import Desk
from teimgr.worker.tei import answers
from teimgr.worker.tei.fields import Body, BodyRefused, expect_json, parse
from teimgr.worker.tei.inference import Inference, InferenceRequest, Served

# A call of more inputs than this is bulk work, whoever waits for it.
_INTERACTIVE_INPUTS = 4
# To write more numbers than this takes more than a millisecond, which the answers of others need not wait for.
_LARGE_ANSWER = 2**16

BodyT = TypeVar("BodyT", bound=Body)


class HttpCall(Call):
    """A request of the instance port, answered through a future.

    `late` is the finished job of a call whose answer is large: it is written on a codec thread, after the call.
    """

    __slots__ = ("future", "late")

    def __init__(self, size_bytes: int, lane: Lane) -> None:
        super().__init__(size_bytes, lane)
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


class Exchange:
    """Asks the desk on behalf of HTTP clients."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def served(self) -> Served:
        """What is served here, and how."""
        return Served(self._desk.engine.info, self._desk.spec)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The request's body.

        Raises:
            BodyRefused: it is not said to be JSON, is over the instance's limit (413), or is no `kind`.
            ClientDisconnect: the client went away while it sent.
        """
        expect_json(request.headers.get("content-type", ""))
        body = await read_limited(request.stream(), self._desk.spec.payload_limit_bytes)
        if body is None:
            raise BodyRefused(413, "Failed to buffer the request body: length limit exceeded")
        return parse(kind, body)

    async def infer(self, asked: Sequence[InferenceRequest], request: Request) -> list[Reply]:
        """The replies to `asked`, in order; they are cancelled when the client of `request` hangs up.

        Raises:
            TeimgrError: why the first that failed did; the others are given up.
        """
        inferences = [self._inference(one) for one in asked]
        calls = [self._enter(inference) for inference in inferences]
        try:
            replies = await _unless_hung_up(calls, request)
            pairs = zip(inferences, calls, replies, strict=True)
            return [await self._written(inference, call, reply) for inference, call, reply in pairs]
        finally:
            for call in calls:
                self._desk.cancel(call)
                call.forget()

    def _inference(self, asked: InferenceRequest) -> Inference:
        metrics = self._desk.metrics
        try:
            inference = asked.inference(self.served)
        except TeimgrError as error:
            metrics.received(0)
            metrics.failed(error)
            raise
        metrics.received(len(inference.inputs))
        if inference.over_limit is not None:
            metrics.batch_too_large()
            raise InvalidInput(inference.over_limit)
        return inference

    def _enter(self, inference: Inference) -> HttpCall:
        inputs = inference.inputs
        lane = Lane.INTERACTIVE if len(inputs) <= _INTERACTIVE_INPUTS else Lane.BULK
        call = HttpCall(inference.size_bytes, lane)
        encode = partial(_reply, call, inference)
        self._desk.enter(call, lambda: self._desk.infer(call, inputs, inference.options, encode))
        return call

    async def _written(self, inference: Inference, call: HttpCall, reply: Reply) -> Reply:
        if call.late is None:
            return reply
        return reply._replace(payload=await self._desk.off_loop(inference.answer, call.late))


def _reply(call: HttpCall, inference: Inference, job: Job) -> Reply:
    """Finisher thread: the answer, unless it is a large one."""
    raise_first(job)
    if answers.values(job) <= _LARGE_ANSWER:
        return Reply(inference.answer(job), call.timings(job))
    call.late = job
    return Reply(b"", call.timings(job))


async def _unless_hung_up(calls: Sequence[HttpCall], request: Request) -> list[Reply]:
    """The replies to `calls`.

    Raises:
        TeimgrError: what the first that failed was answered with; Cancelled when nobody will read the answer.
    """
    answered = asyncio.ensure_future(_in_order(calls))
    hung_up = asyncio.ensure_future(_hung_up(request))
    either: set[asyncio.Future[Any]] = {answered, hung_up}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise Cancelled("the client hung up")
    finally:
        for one in either:
            one.cancel()


async def _in_order(calls: Sequence[HttpCall]) -> list[Reply]:
    return [await call.future for call in calls]


async def _hung_up(request: Request) -> None:
    """Return when the client of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
