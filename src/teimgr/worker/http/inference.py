"""HTTP inference: jobs of a request submitted to the dispatcher, and their answers awaited and encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from teimgr.engine.job import InferOptions, Input, Job, Lane, Pair
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.wire.error_bodies import JSON_TYPE
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.calls import CallReply, Unwritten, WorkerCall, raise_first
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.http.bodies import JSON_BODY, Body, BodyFormat, BodyT, check_content_type, number_count, parse
from teimgr.worker.limits import over_limit

# A call of more inputs than this is bulk work, whichever lane the request came in.
_INTERACTIVE_INPUTS = 4
# Writing more numbers than this takes over a millisecond: done on a codec thread, other answers need not wait.
_LARGE_ANSWER = 2**16
# A body beyond this size is parsed on a codec thread; the loop serves others meanwhile.
_LARGE_BODY_BYTES = 128 * 1024
# Batch limit of the dialects that document none.
MOST_INPUTS = 10_000

# The names under which models keep the prompts for the two sides of a search, in order of preference.
QUERY_PROMPTS = ("query", "search_query", "queries", "s2p_query", "web_search_query")
DOCUMENT_PROMPTS = ("document", "search_document", "passage", "corpus", "doc", "text")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model and its instance's settings."""

    model: LoadedModel
    spec: WorkerSpec

    @property
    def name(self) -> str:
        """The model's name in answers of the OpenAI dialect."""
        return self.spec.served_model_name or self.model.model_id


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Inputs and options of an engine job, and the encoder of its answer when no input failed.

    `limit` is how many inputs the dialect lets a client send at once. `encode` is None where the answer is made of
    several jobs (`HttpInference.jobs`).
    """

    inputs: Sequence[Input]
    options: InferOptions
    encode: Callable[[Job], bytes] | None = None
    limit: int = MOST_INPUTS

    @property
    def size_bytes(self) -> int:
        """About what the inputs take in memory."""
        return sum(map(_size, self.inputs))


class InferenceRequest(Body):
    """A body that describes one job."""

    def job(self, served: ServedModel) -> JobSpec:
        """The job.

        Raises:
            EmptyInput, WrongModelKind: refused before the inputs are counted.
        """
        raise NotImplementedError


def _size(one: Input) -> int:
    if isinstance(one, Pair):
        return len(one.first) + len(one.second)
    return one.nbytes if isinstance(one, np.ndarray) else len(one or "")


class HttpCall(WorkerCall):
    """A job of an HTTP request, answered through a future; `job` is the finished job where it is kept unencoded."""

    __slots__ = ("future", "job")

    def __init__(self, size_bytes: int, lane: Lane, deadline: float | None = None) -> None:
        super().__init__(size_bytes, lane, deadline)
        self.future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self.job: Job | None = None

    def reply(self, reply: CallReply) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: TeimgrError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def forget(self) -> None:
        """Cancel the future, or mark its exception as retrieved: asyncio would log it otherwise."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()


MakeJob = Callable[[ServedModel], JobSpec]


class HttpInference:
    """Inference for one HTTP request; `deadline` is a `time.monotonic` value or None."""

    def __init__(self, dispatcher: Dispatcher, lane: Lane = Lane.INTERACTIVE, deadline: float | None = None) -> None:
        self.dispatcher = dispatcher
        self._lane = lane
        self._deadline = deadline

    @property
    def served(self) -> ServedModel:
        """The model of this worker.

        Raises:
            Unavailable: the model is still loading.
        """
        return ServedModel(self.dispatcher.engine.info, self.dispatcher.spec)

    async def read(self, request: HttpRequest, kind: type[BodyT], body_format: BodyFormat = JSON_BODY) -> BodyT:
        """The request's body.

        Raises:
            BadRequest: 415 another content type, otherwise as `parse`.
        """
        check_content_type(request.headers.get("content-type", ""), body_format.accepts)
        if len(request.body) > _LARGE_BODY_BYTES:
            return await self.dispatcher.off_loop(parse, kind, request.body, body_format)
        return parse(kind, request.body, body_format)

    async def respond(self, make: MakeJob, *, timings: bool = False) -> HttpReply:
        """The response of a request that is one job, with TEI's cost headers where `timings`; errors as `run`."""
        [reply] = await self.run([make])
        return json_reply(reply.payload, reply.timings.headers() if timings and reply.timings is not None else {})

    async def run(self, makers: Sequence[MakeJob]) -> list[CallReply]:
        """The encoded answers of the jobs, in order; cancelling the await cancels the jobs.

        Raises:
            TeimgrError: of the first job that failed; the others are cancelled.
        """
        return [reply for _, reply in await self._submitted(makers, _encode)]

    async def jobs(self, makers: Sequence[MakeJob]) -> list[Job]:
        """The finished jobs themselves, for an answer that is made of several; errors as `run`."""
        return [call.job for call, _ in await self._submitted(makers, _keep) if call.job is not None]

    async def truncated(self, texts: list[str], limit: int | None, *, left: bool = False) -> list[str]:
        """The texts cut to `limit` tokens, at the head where `left`; unchanged where the model takes no more anyway."""
        engine = self.dispatcher.engine
        if limit is None or limit >= engine.info.max_input_length:
            return texts
        return await self.dispatcher.off_loop(lambda: [engine.cut(text, limit, left=left) for text in texts])

    async def _submitted(
        self, makers: Sequence[MakeJob], encode: Callable[[HttpCall, JobSpec, Job], CallReply | Unwritten]
    ) -> list[tuple[HttpCall, CallReply]]:
        specs = [self._job(make) for make in makers]
        calls = [self._submit(spec, encode) for spec in specs]
        try:
            return [(call, await call.future) for call in calls]
        finally:
            for call in calls:
                self.dispatcher.cancel(call)
                call.forget()

    def _job(self, make: MakeJob) -> JobSpec:
        metrics = self.dispatcher.metrics
        try:
            spec = make(self.served)
        except TeimgrError as error:
            metrics.received(0)
            metrics.failed(error)
            raise
        metrics.received(len(spec.inputs))
        if (message := over_limit(len(spec.inputs), spec.limit)) is not None:
            metrics.batch_too_large()
            raise InvalidInput(message)
        return spec

    def _submit(self, spec: JobSpec, encode: Callable[[HttpCall, JobSpec, Job], CallReply | Unwritten]) -> HttpCall:
        lane = Lane.BULK if len(spec.inputs) > _INTERACTIVE_INPUTS else self._lane
        call = HttpCall(spec.size_bytes, lane, self._deadline)
        encoder = partial(encode, call, spec)
        self.dispatcher.infer(call, spec.inputs, spec.options, encoder)
        return call


def _encode(call: HttpCall, spec: JobSpec, job: Job) -> CallReply | Unwritten:
    """Finisher thread: the answer, unless it is a large one."""
    raise_first(job)
    encode = spec.encode
    assert encode is not None

    def write() -> CallReply:
        return CallReply(encode(job), call.timings(job))

    return Unwritten(write) if number_count(job) > _LARGE_ANSWER else write()


def _keep(call: HttpCall, spec: JobSpec, job: Job) -> CallReply:
    """Finisher thread: keep the job for the handler, which encodes the answer."""
    raise_first(job)
    call.job = job
    return CallReply(b"", call.timings(job))


HttpHandler = Callable[[HttpInference, HttpRequest], Coroutine[Any, Any, HttpReply]]
RouteTable = Mapping[tuple[str, str], HttpHandler]  # by HTTP method and path


def single(kind: type[InferenceRequest]) -> HttpHandler:
    """The handler of a route whose request is one job and whose answer is the whole reply."""

    async def handle(inference: HttpInference, request: HttpRequest) -> HttpReply:
        return await inference.respond((await inference.read(request, kind)).job)

    return handle


def json_reply(body: bytes, headers: Mapping[str, str] | None = None) -> HttpReply:
    """200 with a JSON body."""
    return HttpReply(200, {**JSON_TYPE, **(headers or {})}, body)


def prompt_among(model: LoadedModel, names: Sequence[str]) -> str | None:
    """The first of `names` that is a prompt of the model; None where none is, which means the model's default."""
    return next((name for name in names if name in model.prompts), None)


def need_texts(texts: Sequence[object], field: str) -> None:
    """Raises EmptyInput where there are no texts or one of them is empty."""
    if not texts:
        raise EmptyInput(f"`{field}` cannot be empty")
    if any(isinstance(text, str) and not text for text in texts):
        raise EmptyInput(f"`{field}` cannot have an empty text")


def need_kind(model: LoadedModel, kinds: Sequence[str], doing: str) -> None:
    """Raises WrongModelKind where the model is of none of `kinds`."""
    if model.kind not in kinds:
        raise WrongModelKind(f"The model '{model.model_id}' is of kind {model.kind} and does not do {doing}")
