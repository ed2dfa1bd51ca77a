"""HTTP inference, shared by all dialects: bodies, calls through the dispatcher, parts of JSON answers. No sockets.

The instance's own port and the frames of the daemon's gateway both call `HttpInference`. As in TEI, the first matching
member of a union is used: `[1, 2]` is one input of two ids, `[]` one of no ids.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, InstanceOf, ValidationError, WithJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from teimgr.engine.job import InferOptions, Job, Lane, MediaFile, are_texts, characters, pictures_of
from teimgr.engine.job import Input as EngineInput
from teimgr.errors import InvalidInput, TeimgrError, shortened
from teimgr.http.bodies import is_json
from teimgr.models.source import names_a_path
from teimgr.observability.shown_text import in_own_words
from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.wire import json_pieces, json_scan
from teimgr.wire.error_bodies import JSON_TYPE, TEI, TEI_OPENAI, refusal
from teimgr.wire.frames import Buffer, HttpReply, HttpRequest
from teimgr.wire.gil import free
from teimgr.wire.spaces import EXPECT_FIELD
from teimgr.wire.status import INPUT_INDEX
from teimgr.worker import body_validation
from teimgr.worker.calls import (
    MANY_NUMBERS,
    AwaitedReply,
    CallReply,
    DeferredReply,
    WorkerCall,
    lane_of,
    number_count,
    over_limit,
    raise_first,
)
from teimgr.worker.dispatcher import Dispatcher

if TYPE_CHECKING:  # importing the tokenizer imports torch
    from teimgr.engine.text.tokenizer import TextTokenizer

JSON = "application/json"

# Batch limit of dialects that document no limit.
MAX_INPUTS = 10_000
# Jobs of one request started in one turn of the event loop: some milliseconds.
_JOBS_AT_ONCE = 32
_U32_MAX = 2**32 - 1
_NO_MATCH = "no_match"
MISMATCH = "data did not match any of its forms"


class _FirstMatch:
    """Annotation of a union that tries its members from left to right and reports a mismatch as one error."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        union = handler(source)
        assert union["type"] == "union"
        error = {"custom_error_type": _NO_MATCH, "custom_error_message": MISMATCH}
        return {**union, "mode": "left_to_right", **error}


_FIRST_MATCH = _FirstMatch()

U32 = Annotated[int, Field(ge=0, le=_U32_MAX)]
# Strict even in a lenient body: "12" is a text, never a token id.
_Id = Annotated[int, Field(strict=True, ge=0, le=_U32_MAX)]
# A list of another type fails at its first element, instead of collecting thousands of errors.
Ids = Annotated[list[_Id], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]

InputType = TypeAliasType("InputType", Annotated[str | Ids, _FIRST_MATCH])
Input = TypeAliasType("Input", Annotated[InputType | Annotated[list[InputType], Field(fail_fast=True)], _FIRST_MATCH])
InputIds = TypeAliasType("InputIds", Annotated[Ids | Annotated[list[Ids], Field(fail_fast=True)], _FIRST_MATCH])
TokenizeInput = TypeAliasType("TokenizeInput", Annotated[str | Texts, _FIRST_MATCH])
PredictInput = TypeAliasType(
    "PredictInput",
    Annotated[str | OneOrTwo | Annotated[list[OneOrTwo], Field(min_length=1, fail_fast=True)], _FIRST_MATCH],
)
TruncationDirection = TypeAliasType(
    "TruncationDirection",
    Annotated[Literal["Left", "left", "Right", "right"], WithJsonSchema({"type": "string", "enum": ["Left", "Right"]})],
)
# An object with any content, not validated: pydantic would visit 50,000 members in one call.
AnyObject = InstanceOf[dict[str, Any]]
PoolFactor = Annotated[
    float,
    Field(
        strict=False, description="1 / pool_factor of a document's vectors per token are left; 1: all (token pooling)"
    ),
]
ModelName = Annotated[str | None, Field(description="an instance, a model id or an alias")]


ExpectedSpace = Annotated[
    str | None,
    Field(description="the space, or <space>/<precision>, that the vectors must be of; else nothing is computed"),
]
"""The field `expect_fingerprint` of dialects that allow it; others have only the header."""


class Body(BaseModel):
    """A JSON object: types are strict, unknown fields are ignored, null is accepted where a field declares it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schema = handler(source)
        body_validation.fail_fast(handler.resolve_ref_schema(schema))
        return schema


class LenientObject(Body):
    """A JSON object whose values are converted as in pydantic's lax mode: `"3"` to an integer, `"true"` to a boolean.

    Some clients rely on this in dialects whose own servers do it: vLLM, which also serves Cohere's, Infinity, Jina.
    """

    model_config = ConfigDict(strict=False)


class LenientBody(LenientObject):
    """A body with values converted like `LenientObject`."""

    expect_fingerprint: ExpectedSpace = None


BodyT = TypeVar("BodyT", bound=Body)


class BadRequest(Exception):
    """A request whose body is invalid: HTTP status, message, and the field at fault if there is one.

    `input_index` is the index of the input at fault, for TEI's dialects, whose messages do not name it.
    """

    def __init__(self, status: int, message: str, param: str | None = None, input_index: int | None = None) -> None:
        message = shortened(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.input_index = input_index

    def reply(self, dialect: str) -> HttpReply:
        """The response in `dialect`; TEI's web framework answers in plain text."""
        reply = refusal(dialect, self.status, self.message, self.param)
        if dialect not in (TEI, TEI_OPENAI):
            return reply
        index = {} if self.input_index is None else {INPUT_INDEX: str(self.input_index)}
        headers = {**reply.headers, "content-type": "text/plain; charset=utf-8", **index}
        return HttpReply(self.status, headers, self.message.encode())


def broken_text(body: Buffer) -> BadRequest | None:
    """Return the refusal of a body with a text that is not Unicode, such as half an emoji; None for any other body."""
    found = json_scan.broken_text(body)
    if found is None:
        return None
    place = ".".join(map(str, found.path)) or "body"
    index = next((step for step in reversed(found.path) if isinstance(step, int)), None)
    return BadRequest(400, f"{place}: the text is {found.fault}", str(found.path[0]) if found.path else None, index)


class BodyFormat(NamedTuple):
    """How a body is decoded, and the message for an undecodable one, in which `{}` is the decoder's error.

    `decode_large` decodes large bodies on a thread, since `decode` holds the GIL throughout. `reparse` reads a body in
    steps by the rules of the dialect's own parser, if they differ from `parse`. It gets the request class, and None for
    bodies that `parse` refuses or the result of `parse` for those that are `is_ambiguous`. It is slow, and raises
    BadRequest.
    """

    decode: Callable[[Buffer], Any] = orjson.loads
    decode_large: Callable[[Buffer], Any] = json_scan.loads
    accepts: Callable[[str], bool] = is_json
    undecodable: str = "The body is not valid JSON: {}"
    is_ambiguous: Callable[[type[Body], Buffer], bool] | None = None
    reparse: Callable[[type[Any], Buffer, Any], json_scan.Steps[Any]] | None = None


def _is_json_or_unnamed(content_type: str) -> bool:
    """Accept a missing content type: some clients name none, and only TEI refuses that."""
    return not content_type.strip() or is_json(content_type)


JSON_BODY = BodyFormat(accepts=_is_json_or_unnamed)


def check_content_type(content_type: str, accepts: Callable[[str], bool] = is_json) -> None:
    """Raise BadRequest 415 for a Content-Type header that does not name JSON (or what `accepts`)."""
    if not accepts(content_type):
        raise BadRequest(415, f"Expected request with `Content-Type: {JSON}`")


def parse(kind: type[BodyT], body: Buffer, body_format: BodyFormat = JSON_BODY) -> BodyT:
    """Decode and validate a body.

    Raises:
        BadRequest: it cannot be decoded, or is not a `kind`; with the field at fault.
        InvalidInput: a large body has more lists and objects than any client sends.
    """
    found, is_sure = _parse_quickly(kind, body, body_format)
    return found if is_sure and found is not None else json_scan.completed(_reparse(kind, body, body_format, found))


# Fields for images, sounds or chats in any of the APIs.
_MEDIA = frozenset(
    (
        *("image", "images", "image_url", "image_urls", "audio", "audios", "audio_url", "audio_urls", "input_audio"),
        *("video", "videos", "video_url", "video_urls", "multi_modal_data", "messages"),
    )
)


class NotOfRoute(BadRequest):
    """A field with images, sounds or a chat that the route does not read: ignoring it would change the answer."""


def _check_media(kind: type[Body], value: Any) -> None:
    if not isinstance(value, dict) or value.keys().isdisjoint(_MEDIA):  # takes time by `_MEDIA`, not by the keys
        return
    for name in sorted((value.keys() & _MEDIA) - kind.model_fields.keys()):
        if value[name] not in (None, "", [], {}):
            message = (
                f"{name}: this route does not read it; /v1/embeddings takes images and sounds, and /v1/rerank images"
            )
            raise NotOfRoute(400, message, name)


def decoded(kind: type[BodyT], body: Buffer, body_format: BodyFormat) -> BodyT:
    """Decode a body by orjson and pydantic alone; raises as `parse`, without the sentences of the format's own
    parser."""
    is_large = _is_large(body)
    try:
        value = (body_format.decode_large if is_large else body_format.decode)(body)
    except (ValueError, RecursionError) as error:
        raise broken_text(body) or BadRequest(400, body_format.undecodable.format(error)) from error
    _check_media(kind, value)
    if is_large:
        return _validated_large(kind, value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


def _is_large(body: Buffer) -> bool:
    if len(body) <= 4 * _FEW_CONTAINERS:
        return False
    return len(body) > _LARGE_BODY_BYTES or sum(map(bytes(body).count, (b"[", b"{"))) > _FEW_CONTAINERS


def _validated_large(kind: type[BodyT], value: Any) -> BodyT:
    """Validate a decoded value and free it; an error with `value` in its traceback would keep it alive."""
    try:
        return body_validation.validated(kind, value)
    except ValidationError as error:
        refusal = _refusal(error)
    finally:
        free(value)
    raise refusal


def _parse_quickly(kind: type[BodyT], body: Buffer, body_format: BodyFormat) -> tuple[BodyT | None, bool]:
    """Parse a body by `parse`; return it and whether that is final. If not, the format's own parser decides."""
    if body_format.reparse is None:
        return decoded(kind, body, body_format), True
    try:
        found = decoded(kind, body, body_format)
    except NotOfRoute:
        raise
    except BadRequest:
        return None, False
    return found, body_format.is_ambiguous is None or not body_format.is_ambiguous(kind, body)


def _reparse(kind: type[BodyT], body: Buffer, body_format: BodyFormat, quick: BodyT | None) -> json_scan.Steps[BodyT]:
    assert body_format.reparse is not None
    return body_format.reparse(kind, body, quick)


def _refusal(error: ValidationError) -> BadRequest:
    """The refusal `place: message` of the first wrong value."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [*first["loc"], *(_odd_one(first["input"]) if first["type"] == _NO_MATCH else ())]
    where = ".".join(map(str, place)) or "body"
    return BadRequest(400, f"{where}: {in_own_words(first['msg'])}", str(place[0]) if place else None)


def _odd_one(value: object) -> Iterator[int]:
    """Yield the indices that lead to the first value of an `Input` that is neither a text nor an id."""
    if not isinstance(value, list) or not value:
        return
    are_ids = _is_id(value[0])
    for place, one in enumerate(value):
        if are_ids and not _is_id(one):
            yield place
            return
        if not are_ids and not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
            yield place
            if isinstance(one, list):
                yield next(index for index, id in enumerate(one) if not _is_id(id))
            return


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _U32_MAX


def engine_inputs(inputs: str | Sequence[Any], limit: int = MAX_INPUTS) -> list[EngineInput]:
    """Convert an `Input` for the engine: a text or one list of ids is a single input, anything else a batch.

    Raises:
        TooManyInputs: more than `limit`, checked before any input is converted.
    """
    if isinstance(inputs, str) or not inputs or isinstance(inputs[0], int):
        return [_engine_input(inputs)]
    check_count(len(inputs), limit)
    return [*inputs] if are_texts(inputs) else [_engine_input(one) for one in inputs]


class TooManyInputs(InvalidInput):
    """The batch has more inputs than the dialect allows."""

    def __init__(self, given: int, message: str) -> None:
        super().__init__(message)
        self.given = given


def check_count(count: int, limit: int = MAX_INPUTS) -> None:
    """Raise TooManyInputs; call this before any work per input."""
    if (message := over_limit(count, limit)) is not None:
        raise TooManyInputs(count, message)


def _engine_input(one: str | Sequence[int]) -> EngineInput:
    if isinstance(one, str):
        return one
    # The upper half of TEI's range becomes negative, which the engine refuses: vocabularies are smaller.
    return np.asarray(array("I", one)).view(np.int32)  # numpy's conversion of a list takes three times as long


def to_json(value: object, weight: int | None = None) -> bytes:
    """Write `value` as JSON, with numpy arrays and scalars; float32 in the fewest digits that round-trip. `weight`
    is as for `json_pieces.dumps`."""
    return json_pieces.dumps(value, weight)


def usage(tokens: int) -> dict[str, int]:
    """Return OpenAI's usage object; it counts all input tokens, including special ones and the prompt."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def unix_time() -> int:
    return int(time.time())


def encoded_vector(values: NDArray[Any], in_base64: bool) -> NDArray[Any] | str | json_pieces.Base64:
    """Prepare a vector or matrix for `to_json`: as numbers, or as base64 of its little-endian bytes."""
    return json_pieces.in_base64(_little_endian(values)) if in_base64 else np.ascontiguousarray(values)


def encoded_rows(rows: Iterable[NDArray[Any]], in_base64: bool) -> list[Any]:
    """Apply `encoded_vector` to each row; for a matrix, in half the time."""
    if not isinstance(rows, np.ndarray):
        return [encoded_vector(row, in_base64) for row in rows]
    return json_pieces.rows_in_base64(_little_endian(rows)) if in_base64 else [*np.ascontiguousarray(rows)]


def _little_endian(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values if sys.byteorder == "little" else values.astype(values.dtype.newbyteorder("<")))


def best_first(scores: NDArray[np.float32], top_n: int | None = None) -> list[int]:
    """Return the rows by falling score (float32 [N]), equal ones in their order; only the first `top_n` if given."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n]


# A codec thread reads bodies that are larger or have more lists and objects, in pieces: 9,000 objects take 20 ms.
_LARGE_BODY_BYTES, _FEW_CONTAINERS = 128 * 1024, 2048
# Larger bodies are reparsed on a thread, which takes a microsecond per byte.
_REPARSED_BYTES = 512

# Names of prompts for queries and for documents, in order of preference.
QUERY_PROMPTS = ("query", "search_query", "queries", "s2p_query", "web_search_query", "retrieval.query")
DOCUMENT_PROMPTS = ("document", "search_document", "passage", "corpus", "doc", "text", "retrieval.passage")


@dataclass(slots=True)  # not frozen, which would cost each query half a microsecond
class ServedModel:
    """The loaded model and its instance's settings."""

    model: LoadedModel
    spec: WorkerSpec
    tokenizer: TextTokenizer | None = None

    @property
    def name(self) -> str:
        """Name for answers to requests without a model: one that requests may have, never a path of the host."""
        model_id = self.model.model_id
        return self.spec.served_model_name or (self.spec.name if names_a_path(model_id) else model_id)

    @property
    def tei_name(self) -> str:
        """The model id that the instance was created with, as in TEI."""
        return self.spec.served_model_name or self.model.model_id


@dataclass(slots=True)  # not frozen, which would cost each query half a microsecond
class JobSpec:
    """Inputs and options of an engine job, and the encoder of its answer when no input failed.

    `limit` is the dialect's limit on inputs per request. `encode` is None if the answer is made of several jobs
    (`HttpInference.jobs`). `is_slow` if encoding takes longer than its count of numbers suggests.
    """

    inputs: Sequence[EngineInput]
    options: InferOptions
    encode: Callable[[Job], bytes] | None = None
    limit: int = MAX_INPUTS
    is_slow: bool = False


class InferenceRequest(Body):
    """A body that describes one job."""

    def job(self, served: ServedModel) -> JobSpec:
        """Return the job; raises EmptyInput or WrongModelKind before the inputs are counted."""
        raise NotImplementedError


def _size_bytes(one: EngineInput) -> int:
    if isinstance(one, np.ndarray):
        return one.nbytes
    return len(one) if type(one) is str else characters(one) + sum([picture.nbytes for picture in pictures_of(one)])


class HttpCall(AwaitedReply, WorkerCall):
    """A job of an HTTP request; `job` is the finished job if it was not encoded."""

    __slots__ = ("answer", "job")

    def __init__(self, size_bytes: int, lane: Lane, deadline: float | None = None) -> None:
        super().__init__(size_bytes, lane, deadline)
        self.has_deadline = False  # HTTP has no deadlines: `deadline` is the gateway's limit
        self.answer = asyncio.get_running_loop().create_future()
        self.job: Job | None = None


MakeJob = Callable[[ServedModel], JobSpec]


class HttpInference:
    """Inference for HTTP requests in `lane`; None chooses the lane by the request's cost.

    `deadline` is a `time.monotonic` value or None. `whole` is the call that brought the request, if any.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        lane: Lane | None = None,
        deadline: float | None = None,
        whole: WorkerCall | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._whole = whole
        self._lane = lane
        self._deadline = deadline

    @property
    def served(self) -> ServedModel:
        """Return the model of this worker; raises Unavailable while it is loading."""
        engine = self.dispatcher.engine
        return ServedModel(engine.info, self.dispatcher.spec, engine.tokenizer)

    async def read(self, request: HttpRequest, kind: type[BodyT], body_format: BodyFormat = JSON_BODY) -> BodyT:
        """Read the request's body; raises BadRequest 415 for another content type, otherwise as `parse`."""
        found = await self._read(request, kind, body_format)
        # `getattr` would take 20 µs for an undeclared field.
        self.dispatcher.check_space(vars(found).get(EXPECT_FIELD))
        return found

    async def _read(self, request: HttpRequest, kind: type[BodyT], body_format: BodyFormat) -> BodyT:
        check_content_type(request.headers.get("content-type", ""), body_format.accepts)
        dispatcher, is_large = self.dispatcher, _is_large(request.body)
        quickly = partial(_parse_quickly, kind, request.body, body_format)
        found, is_sure = await (dispatcher.off_loop(quickly) if is_large else dispatcher.turns.run(quickly))
        if not is_sure or found is None:
            again = _reparse(kind, request.body, body_format, found)
            if len(request.body) <= _REPARSED_BYTES:
                found = await dispatcher.turns.run(partial(json_scan.completed, again))
            else:
                found = await dispatcher.in_steps(again)
        if is_large:
            dispatcher.free_off_loop(found)
        return found

    async def mentions(self, request: HttpRequest, word: bytes) -> bool:
        """True if a word is in the request's body."""
        search = partial(json_scan.mentions, request.body, word)
        return await self.dispatcher.off_loop(search) if len(request.body) > _LARGE_BODY_BYTES else search()

    def inputs(self, given: str | Sequence[Any], limit: int = MAX_INPUTS) -> list[EngineInput]:
        """Like `engine_inputs`, and count refused inputs."""
        self.check_count(1 if isinstance(given, str) or not given or isinstance(given[0], int) else len(given), limit)
        return engine_inputs(given, limit)

    def check_count(self, count: int, limit: int = MAX_INPUTS) -> None:
        """Raise InvalidInput for more inputs than a client may send; call this before looking at them."""
        if count > limit:
            self.dispatcher.metrics.batch_too_large(count)
            check_count(count, limit)

    async def respond(self, make: MakeJob, *, timings: bool = False) -> HttpReply:
        """Respond to a request that is one job, with TEI's cost headers if `timings`; errors as `run`."""
        [(_, reply)] = await self._submitted([make], _encode)
        return json_reply(reply.payload, reply.timings.headers() if timings and reply.timings is not None else {})

    async def run(self, makers: Sequence[MakeJob]) -> list[CallReply]:
        """Return the encoded answers of the jobs, in order; cancelling the await cancels the jobs.

        Raises:
            TeimgrError: the error of the first job that failed; the others are cancelled.
        """
        return [reply for _, reply in await self._submitted(makers, _encode)]

    async def jobs(self, makers: Sequence[MakeJob]) -> list[Job]:
        """Return the finished jobs themselves, for an answer that is made of several; errors as `run`."""
        return [call.job for call, _ in await self._submitted(makers, _keep) if call.job is not None]

    async def as_texts(self, inputs: list[EngineInput]) -> list[EngineInput]:
        """Convert or refuse token ids by the instance's `token_inputs`; raises InvalidInput."""
        spec = self.dispatcher.spec
        if spec.token_inputs == body_validation.ACCEPT or not body_validation.has_token_ids(inputs):
            return inputs
        return await self.dispatcher.off_loop(body_validation.read_token_ids, inputs, spec)

    async def truncated(self, texts: list[str], limit: int | None, *, left: bool = False) -> list[str]:
        """Cut the texts to `limit` tokens, at the head if `left`; unchanged if the model takes no more anyway."""
        engine = self.dispatcher.engine
        if limit is None or limit >= engine.info.max_input_length:
            return texts

        cut = partial(engine.tokenizer.cut, max_tokens=limit, left=left)
        return await self.dispatcher.in_tokenizer_turns(json_scan.in_steps(cut, texts))

    async def _submitted(
        self, makers: Sequence[MakeJob], encode: Callable[[HttpCall, JobSpec, Job], CallReply | DeferredReply]
    ) -> list[tuple[HttpCall, CallReply]]:
        specs: list[JobSpec] = []
        for make in makers:
            if len(specs) % _JOBS_AT_ONCE == _JOBS_AT_ONCE - 1:
                await asyncio.sleep(0)
            specs.append(self._job(make))
        if self.dispatcher.spec.token_inputs != body_validation.ACCEPT:
            specs = [await self._in_texts(spec) for spec in specs]
        calls: list[HttpCall] = []
        try:
            for spec in specs:
                if len(calls) % _JOBS_AT_ONCE == _JOBS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                calls.append(self._submit(spec, encode, is_part=bool(calls)))
            return [(calls[number], await calls[number].answer) for number in range(len(calls))]
        finally:
            while calls:  # breaks the cycle of call, error and this frame, which would keep the inputs
                self._give_up(calls.pop())

    def _give_up(self, call: HttpCall) -> None:
        self.dispatcher.cancel(call)
        call.answer.cancel()

    def _job(self, make: MakeJob) -> JobSpec:
        metrics = self.dispatcher.metrics
        try:
            spec = make(self.served)
            check_count(len(spec.inputs), spec.limit)
        except TooManyInputs as error:
            metrics.batch_too_large(error.given)
            raise
        except TeimgrError as error:
            metrics.received(0)
            metrics.failed(error)
            raise
        metrics.received(len(spec.inputs))
        return spec

    async def _in_texts(self, spec: JobSpec) -> JobSpec:
        try:
            return replace(spec, inputs=await self.as_texts(list(spec.inputs)))
        except TeimgrError as error:
            self.dispatcher.metrics.failed(error)
            raise

    def _submit(
        self, spec: JobSpec, encode: Callable[[HttpCall, JobSpec, Job], CallReply | DeferredReply], *, is_part: bool
    ) -> HttpCall:
        inputs = spec.inputs
        size = sum(map(len, inputs)) if are_texts(inputs) else sum(map(_size_bytes, inputs))
        lane = self._lane or self._lane_of(spec.inputs, size)
        call = HttpCall(size, lane, self._deadline)
        if is_part:
            call.mark_part()
        if self._whole is not None:
            self.dispatcher.pass_on(self._whole, call)
        self.dispatcher.infer(call, spec.inputs, spec.options, partial(encode, call, spec))
        return call

    def _lane_of(self, inputs: Sequence[EngineInput], size_bytes: int) -> Lane:
        """Choose the lane by the tokens of images, not by their file sizes, which say little about the forward."""
        limit = self.dispatcher.max_length
        if self.dispatcher.engine.info.modalities == ("text",):
            return lane_of(size_bytes, len(inputs), limit)
        images = [one for item in inputs for one in pictures_of(item)]
        chars = size_bytes - sum([one.nbytes for one in images])
        texts = len(inputs) - sum([isinstance(one, MediaFile) for one in inputs])
        return lane_of(chars, texts, limit, sum([one.tokens for one in images]))


def _encode(call: HttpCall, spec: JobSpec, job: Job) -> CallReply | DeferredReply:
    """Encode the answer on the finisher's thread, or defer it if it is large."""
    raise_first(job)
    encode = spec.encode
    assert encode is not None

    def write() -> CallReply:
        return CallReply(encode(job), call.timings(job))

    return DeferredReply(write) if spec.is_slow or number_count(job) > MANY_NUMBERS else write()


def _keep(call: HttpCall, spec: JobSpec, job: Job) -> CallReply:
    """Keep the job for the handler, which encodes the answer; runs on the finisher's thread."""
    raise_first(job)
    call.job = job
    return CallReply(b"", call.timings(job))


HttpHandler = Callable[[HttpInference, HttpRequest], Coroutine[Any, Any, HttpReply]]
RouteTable = Mapping[tuple[str, str], HttpHandler]  # by HTTP method and path


def single(kind: type[InferenceRequest]) -> HttpHandler:
    async def handle(inference: HttpInference, request: HttpRequest) -> HttpReply:
        return await inference.respond((await inference.read(request, kind)).job)

    return handle


def json_reply(body: Buffer, headers: Mapping[str, str] | None = None) -> HttpReply:
    return HttpReply(200, {**JSON_TYPE, **(headers or {})}, body)


def prompt_among(model: LoadedModel, names: Sequence[str]) -> str | None:
    """Return the first of `names` that is a prompt of the model; None (the default prompt) without one."""
    return next((name for name in names if name in model.prompts), None)
