"""Calls of a worker, from arrival to reply, and `Submission`: the engine jobs of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message

from teimgr.engine.job import (
    Account,
    InferOptions,
    Input,
    Job,
    Lane,
    Output,
    characters,
    pictures_of,
    total_characters,
    total_media_tokens,
)
from teimgr.errors import InvalidInput, Refused, TeimgrError, TooLarge
from teimgr.http.turns import TURNS_OF
from teimgr.observability.request_context import CURRENT, CallStats
from teimgr.spec import MAX_TEXT_BYTES, LoadedModel
from teimgr.wire.frames import (
    Flag,
    Method,
    Payload,
    Received,
    Timings,
)
from teimgr.wire.json_scan import LONG_TEXT, too_large
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.protobuf import MAX_FIELDS, UNCOUNTED_BYTES, Slice, scan, split_off
from teimgr.wire.text_column import SharedTexts, TextColumn

# Time limit of a call without a deadline: over half an hour for the largest table at 50 texts/s.
MAX_CALL_S = 3600.0
_NUMBER_BYTES = 4
_TABLE_FIELD = "arrow_ipc"
# Methods that are queued if the worker is full, even without `Flag.WAIT`. TEI refuses other unary calls at once.
_ALWAYS_WAITING = frozenset({Method.RERANK, Method.RERANK_STREAM})
# Methods that may wait like messages of streams, but count as requests.
_WAITING_REQUESTS = frozenset({Method.RERANK, Method.EMBED_ARROW, Method.EMBED_SPARSE_ARROW, Method.INFER_ARROW})
# Tokens of an input in addition to one per character: special tokens, a prompt, the padding of a query.
_EXTRA_TOKENS = 64

MessageT = TypeVar("MessageT", bound=Message)


class CallReply(NamedTuple):
    """The reply's bytes, and its cost if the interface reports it."""

    payload: Payload
    timings: Timings | None = None
    head: bytes = b""
    """Bytes to send before the payload."""


class DeferredReply(NamedTuple):
    """A reply that is slow to encode: a codec thread runs `encode`, so that other replies do not wait. If it `pools`
    tokens, a dedicated thread runs it, so that the codec threads stay free.
    """

    encode: Callable[[], CallReply]
    pools: bool = False


# A codec thread encodes replies with more numbers than this, which takes over a millisecond.
MANY_NUMBERS = 2**16


def number_count(job: Job) -> int:
    """Return how many numbers the results of a job have, which measures the time to encode them."""
    per_row = sum(0 if rows is None else rows.size for rows in (*job.tokens_of, *job.multi_vectors))
    entries = sum(0 if vector is None else vector.values.size for vector in job.sparse)
    return int(job.vectors.size + job.scores.size + per_row + entries)


INTERACTIVE_TOKENS = 4096
"""Requests with more estimated tokens run in the bulk lane, unless the caller has chosen a lane."""
_CHARS_PER_TOKEN = 4
_CHEAP_BYTES = INTERACTIVE_TOKENS * 3  # one text of this size is always below the limit


def lane_of(chars: int, texts: int, max_length: int, image_tokens: int = 0) -> Lane:
    """Choose the lane of a request by its cost: the tokens of its images, and the estimated tokens of its texts, each
    of at most `max_length`.
    """
    tokens = min(chars // _CHARS_PER_TOKEN, texts * max_length) + texts + image_tokens
    return Lane.BULK if tokens > INTERACTIVE_TOKENS else Lane.INTERACTIVE


class WorkerCall:
    """A request that gets exactly one `reply` or `fail`, both on the loop's thread; subclasses implement them.

    Attributes:
        deadline: A `time.monotonic` value, by default `MAX_CALL_S` from now.
        has_deadline: Whether the client gave one, as the mux does for every unary call.
        may_wait: Whether to queue it, instead of refusing it, if the worker is full.
        streamed: Whether it is a message of a stream, which TEI does not count as a request.
        turns_of: The caller in whose turns its work runs (`TURNS_OF`).
    """

    __slots__ = (
        *("context", "deadline", "gave_way", "has_deadline", "is_part", "lane", "may_wait", "output_dtype", "received"),
        *("size_bytes", "streamed", "turns_of"),
    )

    def __init__(
        self,
        size_bytes: int,
        lane: Lane,
        deadline: float | None = None,
        *,
        may_wait: bool = False,
        streamed: bool = False,
    ) -> None:
        self.received = time.monotonic()
        self.size_bytes = size_bytes
        self.lane = lane
        self.has_deadline = deadline is not None
        self.deadline = deadline if deadline is not None else self.received + MAX_CALL_S
        self.may_wait = may_wait
        self.streamed = streamed
        self.is_part = False
        self.gave_way = False
        self.context = CURRENT.get()
        self.turns_of = TURNS_OF.get()
        self.output_dtype = "f32"

    @property
    def tenant(self) -> int:
        """The number of the caller's key, 0 without one."""
        return 0 if self.context is None else self.context.tenant

    def mark_part(self) -> None:
        """Mark it as a further call of its request, which counts as one."""
        self.is_part = True

    def allow_to_wait(self) -> None:
        """Queue it if the worker is full."""
        self.may_wait = True

    def give_way(self) -> None:
        """Compute it in the bulk lane."""
        self.lane = Lane.BULK
        self.gave_way = True

    def note_output_dtype(self, name: str) -> None:
        """Name the number format of its vectors, for traces."""
        self.output_dtype = name

    def price(self, texts: int, max_length: int) -> None:
        """Choose the lane by the cost of its texts, unless the lane is fixed."""

    def reply(self, reply: CallReply) -> None:
        raise NotImplementedError

    def fail(self, error: TeimgrError) -> None:
        raise NotImplementedError

    def add_stats(self, job: Job) -> None:
        """Add the engine's work for the call to its statistics, if its trace is sampled."""
        if self.context is None or not self.context.is_sampled:
            return
        spent = self.timings(job)
        self.context.add_stats(
            CallStats(
                received_ns=int(self.received * 1e9),
                total_ns=spent.total_ns,
                tokenization_ns=job.tokenization_ns,
                queue_ns=job.queue_ns,
                inference_ns=job.inference_ns,
                rows=len(job.inputs),
                rows_failed=len(job.errors),
                tokens=job.tokens,
                chars=job.chars,
                output_dtype=self.output_dtype,
            )
        )

    def timings(self, job: Job) -> Timings:
        """Return the cost of the finished `job` of this call, with the total time until now."""
        total_ns = int((time.monotonic() - self.received) * 1e9)
        return Timings(job.chars, job.tokens, total_ns, job.tokenization_ns, job.queue_ns, job.inference_ns)


class MethodCall(WorkerCall):
    """A call of a method of `wire/frames.py`; `payload` is its serialised message of `size_bytes`.

    `flags` are the flags of the request's frame; `fixed_lane` is the lane that they name, if any.
    """

    __slots__ = ("_parsed", "fixed_lane", "method", "payload")

    def __init__(self, method: int, payload: Received, flags: int, deadline: float | None = None) -> None:
        self.fixed_lane = _named_lane(flags)
        lane = self.fixed_lane or Lane.INTERACTIVE
        may_wait = bool(flags & Flag.WAIT) or method in _ALWAYS_WAITING
        streamed = may_wait and method not in _WAITING_REQUESTS
        super().__init__(len(payload), lane, deadline, may_wait=may_wait, streamed=streamed)
        if method == Method.HTTP:
            self.has_deadline = False  # HTTP has no deadlines: `deadline` is the gateway's limit
        self.method = method
        self.payload = payload
        self._parsed: Message | None = None

    def price(self, texts: int, max_length: int) -> None:
        """Move to the bulk lane if it costs too much, unless the caller chose the lane or it is part of a stream."""
        if self.size_bytes > _CHEAP_BYTES and self.fixed_lane is None and not self.streamed:
            self.lane = lane_of(self.size_bytes, texts, max_length)

    def message(self, kind: type[MessageT], most_fields: int = MAX_FIELDS) -> MessageT:
        """Return the payload as a protobuf message of type `kind`; raises InvalidInput as `parsed`."""
        if self._parsed is None:
            return parsed(kind, self.payload, most_fields)
        found, self._parsed = self._parsed, None  # frees it early: it takes as much memory as the payload
        return cast(MessageT, found)

    def parse(self, kind: type[Message], most_fields: int) -> None:
        """Parse the payload for the next `message`, on a thread; raises InvalidInput as `parsed`."""
        self._parsed = parsed(kind, self.payload, most_fields)

    def table_message(self, kind: type[MessageT]) -> tuple[MessageT, bytes | memoryview]:
        """Return the message without its `arrow_ipc`, and the latter: a view of the payload if it is large.

        Protobuf's parser would copy the table, and copy it again at each access, while it holds the GIL.

        Raises:
            InvalidInput: as `parsed`, or the other fields are in parts of more than `MAX_JOINED_BYTES`.
        """
        if len(self.payload) <= UNCOUNTED_BYTES:
            message = self.message(kind)
            return message, getattr(message, _TABLE_FIELD)
        rest, table = split_off(self.payload, kind.DESCRIPTOR.fields_by_name[_TABLE_FIELD].number)
        return parsed(kind, rest), table


def parsed(kind: type[MessageT], payload: Slice, most_fields: int = MAX_FIELDS) -> MessageT:
    """Parse a protobuf message of type `kind`.

    Raises:
        InvalidInput: it is malformed, or larger than 64 KiB with more than `most_fields` fields or as many bytes of
            packed numbers, or has a text of more than `MAX_TEXT_BYTES`.
    """
    stops = _stops_of_pieces(kind, payload, most_fields) if len(payload) > UNCOUNTED_BYTES else [len(payload)]
    try:
        if len(stops) <= 1:
            return kind.FromString(cast(bytes, payload))  # also takes a bytearray; a view would be copied
        message, begin = kind(), 0
        for stop in stops:
            message.MergeFromString(bytes(payload[begin:stop]))
            begin = stop
        return message
    except DecodeError as error:
        raise InvalidInput(f"Malformed {kind.DESCRIPTOR.full_name}: {error}") from error


# Bytes of fields that protobuf parses in one call, which holds the GIL; the largest text takes 8 ms.
_PIECE_BYTES = 2 * 2**20


def _stops_of_pieces(kind: type[Message], payload: Slice, most_fields: int) -> list[int]:
    """Return the ends of the pieces that are given to protobuf's parser, so that no call of it takes long.

    Each piece has whole fields; merging them gives the message.
    """
    least = min(most_fields, MAX_TEXT_BYTES)
    stops, begin = [], 0
    for number, _, start, end in scan(payload, most_fields):
        if end - begin > _PIECE_BYTES:
            stops.append(end)
            begin = end
        if (size := end - start) <= least or (field := kind.DESCRIPTOR.fields_by_number.get(number)) is None:
            continue
        if field.type == field.TYPE_STRING and size > MAX_TEXT_BYTES:
            raise too_large(LONG_TEXT)
        if field.is_packed and size > most_fields:
            raise InvalidInput(f"`{field.name}` has {size} bytes of numbers, more than {most_fields}")
    return stops if begin == len(payload) else [*stops, len(payload)]


def _named_lane(flags: int) -> Lane | None:
    if flags & Flag.INTERACTIVE:
        return Lane.INTERACTIVE
    return Lane.BULK if flags & Flag.BULK else None


class AwaitedReply:
    """Mixin for calls that are answered through a future, `answer`."""

    __slots__ = ()
    answer: asyncio.Future[CallReply]

    def reply(self, reply: CallReply) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)

    def fail(self, error: TeimgrError) -> None:
        if not self.answer.done():
            # Without its traceback, whose frames refer to this call: the cycle would keep the payload.
            self.answer.set_exception(error.with_traceback(None))
            self.answer.exception()  # marks it retrieved: asyncio would log the failure of a cancelled call


def raise_first(job: Job) -> None:
    """Raise the error of the first row that has one; the text names the row if the job has several."""
    if not job.errors:
        return
    row = min(job.errors)
    error = job.errors[row]
    if isinstance(error, Refused) and len(job.inputs) > 1:
        error.name_input(row)
    raise error


def within(payload: Payload, limit_bytes: int) -> Payload:
    """Return `payload`; raises TooLarge if it exceeds `limit_bytes`, the limit of a reply."""
    if len(payload) > limit_bytes:
        raise TooLarge(f"Reply of {len(payload)} bytes is larger than the limit of {limit_bytes} bytes")
    return payload


def request_options(message: Any, output: Output | frozenset[Output], **more: Any) -> InferOptions:
    """Make the options of a request of `tei.v1` or Arrow; `more` are other fields of `InferOptions`.

    Raises:
        InvalidInput: `truncation_direction` is not in its enum.
    """
    direction = message.truncation_direction
    if direction not in (tei_pb2.TRUNCATION_DIRECTION_RIGHT, tei_pb2.TRUNCATION_DIRECTION_LEFT):
        raise InvalidInput(f"`truncation_direction` {direction} is unknown: 0 (right) or 1 (left)")
    return InferOptions(
        frozenset((output,)) if isinstance(output, Output) else output,
        truncate=message.truncate,
        # An absent field also reads as RIGHT, so RIGHT means the default side of the model's files.
        truncation_left=direction == tei_pb2.TRUNCATION_DIRECTION_LEFT,
        **more,
    )


def optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def max_token_bytes(model: LoadedModel, outputs: frozenset[Output], inputs: Iterable[Input]) -> int:
    """Return an upper bound of the float32 bytes of the vectors per token of `inputs`, at a token per character;
    else 0."""
    width = sum(token_width(model, output) for output in outputs)
    if not width:
        return 0
    if isinstance(inputs, TextColumn | SharedTexts):
        tokens = int(np.minimum(inputs.characters_of_each() + _EXTRA_TOKENS, model.max_input_length).sum())
    else:
        tokens = sum(
            min(characters(item) + _EXTRA_TOKENS, model.max_input_length)
            + sum([one.tokens for one in pictures_of(item)])
            for item in inputs
        )
    return tokens * width * _NUMBER_BYTES


def token_width(model: LoadedModel, output: Output) -> int:
    """Return the size of a vector per token; 0 for an output without these."""
    if output is Output.MULTI_VECTOR:
        return model.multi_vector_dimension
    return model.token_dimension if output is Output.TOKENS else 0


def over_limit(count: int, limit: int) -> str | None:
    """Return TEI's sentence for a batch of too many inputs; None if it is within the limit."""
    return f"batch size {count} > maximum allowed batch size {limit}" if count > limit else None


Encode = Callable[[Job], CallReply | DeferredReply]


class Part(NamedTuple):
    """Inputs that share their options, and their rows in the call."""

    rows: Sequence[int]
    inputs: Sequence[Input]
    options: InferOptions
    chars: int = -1
    """Their characters, if the reading thread counted them; 60,000 pairs would hold the loop for 20 ms."""
    media_tokens: int = -1
    """The tokens of their images and sounds, if the reading thread counted them."""


def counted(inputs: Sequence[Input], options: InferOptions, rows: Sequence[int] | None = None) -> Part:
    """Make a part, on a thread, with what the loop would count; `rows` defaults to all inputs of the call."""
    of_all = range(len(inputs)) if rows is None else rows
    return Part(of_all, inputs, options, total_characters(inputs), total_media_tokens(inputs))


def parts_of(inputs: Sequence[Input], options: Sequence[InferOptions]) -> list[Part]:
    """Return one part for each different set of options; `options` has one for each input."""
    rows_of: dict[InferOptions, list[int]] = {}
    for row, option in enumerate(options):
        rows_of.setdefault(option, []).append(row)
    return [counted([inputs[row] for row in rows], option, rows) for option, rows in rows_of.items()]


class Submission:
    """The engine jobs of one call, one per part. `complete` runs on the thread that finished the batch, all else on the
    loop.

    Several parts are supported only for the SCORES output. If it `has_waited`, for admission or for its inputs to be
    read, its wait is estimated again. `result_bytes` is the size of the results that the jobs hold until the reply,
    by default estimated from their inputs.
    """

    __slots__ = ("_unfinished", "accounts", "call", "encode", "has_waited", "jobs", "parts", "result_bytes")

    def __init__(
        self,
        call: WorkerCall,
        parts: Sequence[Part],
        encode: Encode,
        *,
        has_waited: bool = False,
        result_bytes: int | None = None,
    ) -> None:
        self.call = call
        self.encode = encode
        self.has_waited = has_waited
        self.result_bytes = result_bytes
        self.jobs = [
            Job(one.inputs, one.options, call.lane, call.deadline, self, call.tenant, one.chars, one.media_tokens)
            for one in parts
        ]
        self.accounts: tuple[Account, ...] = ()
        self.parts = parts
        self._unfinished = len(parts)

    def wait(self) -> None:
        self.has_waited = True

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    def charge_to(self, job: Job, account: Account) -> None:
        """Charge one of its jobs to a tenant's account."""
        self.accounts += (account,)
        job.charge_to(account)

    def settle(self) -> None:
        """Refund the tokens that were not taken into a batch, when the call is over."""
        for account in self.accounts:
            account.settle(None)

    def complete(self) -> Job | None:
        """Count one finished job; after the last one, return a job with the results of all."""
        self._unfinished -= 1
        if self._unfinished:
            return None
        # Breaks the cycle of job and submission, which would keep results until the next garbage collection.
        jobs, self.jobs = self.jobs, []
        return jobs[0] if len(jobs) == 1 else _joined(self.parts, jobs)


def job_of(parts: Sequence[Part], lane: Lane) -> Job:
    """Make a job with all inputs of a call, in its order, to be filled with results."""
    if len(parts) == 1:
        return Job(parts[0].inputs, parts[0].options, lane, chars=parts[0].chars)
    inputs: list[Input] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        for row, item in zip(part.rows, part.inputs, strict=True):
            inputs[row] = item
    return Job(inputs, parts[0].options, lane)


def _joined(parts: Sequence[Part], jobs: Sequence[Job]) -> Job:
    whole = job_of(parts, jobs[0].lane)
    for part, job in zip(parts, jobs, strict=True):
        whole.take_scores(job, part.rows)
    whole.average_times()
    return whole
