"""Calls of a worker: one request from its arrival to its one reply, over a link, gRPC or HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from teimgr.engine.job import Job, Lane
from teimgr.errors import InvalidInput, TeimgrError, TooLarge
from teimgr.observability.request_context import CURRENT, CallStats, RequestContext
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.frames import Flag, FrameProtocol, FrameType, Header, Timings, pack_error

MessageT = TypeVar("MessageT", bound=Message)


class CallReply(NamedTuple):
    """The bytes a caller gets, and what they cost where the interface reports it."""

    payload: bytes
    timings: Timings | None = None


class Unwritten(NamedTuple):
    """A reply so large that a codec thread encodes it, by `write`: replies of other calls need not wait for it."""

    write: Callable[[], CallReply]


class WorkerCall:
    """A request that is owed exactly one `reply` or `fail`, both on the loop's thread; subclasses implement them.

    `deadline` is a `time.monotonic` value or None; `size_bytes` is the size of the request. `may_wait`: queue it when
    the worker is full instead of refusing it. `streamed`: a message of a stream, which TEI does not count as a request.
    """

    __slots__ = ("context", "deadline", "lane", "may_wait", "output_dtype", "received", "size_bytes", "streamed")

    def __init__(self, size_bytes: int, lane: Lane, deadline: float | None = None, may_wait: bool = False) -> None:
        self.received = time.monotonic()
        self.size_bytes = size_bytes
        self.lane = lane
        self.deadline = deadline
        self.may_wait = self.streamed = may_wait
        self.context = CURRENT.get()
        self.output_dtype = "f32"

    def reply(self, reply: CallReply) -> None:
        raise NotImplementedError

    def fail(self, error: TeimgrError) -> None:
        raise NotImplementedError

    def add_stats(self, job: Job) -> None:
        """Add the engine's work for the call to its statistics, where its trace is sampled."""
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
        """Cost of the finished `job` of this call, with the total up to now."""
        total_ns = int((time.monotonic() - self.received) * 1e9)
        return Timings(job.chars, job.tokens, total_ns, job.tokenization_ns, job.queue_ns, job.inference_ns)


class MethodCall(WorkerCall):
    """A call of a method of `wire/frames.py`; `payload` is its serialised message, `size_bytes` long."""

    __slots__ = ("method", "payload")

    def __init__(
        self, method: int, payload: bytes, lane: Lane, deadline: float | None = None, may_wait: bool = False
    ) -> None:
        super().__init__(len(payload), lane, deadline, may_wait)
        self.method = method
        self.payload = payload

    def message(self, kind: type[MessageT]) -> MessageT:
        """The payload as a protobuf message of type `kind`.

        Raises:
            InvalidInput: it is no such message.
        """
        try:
            return kind.FromString(self.payload)
        except DecodeError as error:
            raise InvalidInput(f"Malformed {kind.DESCRIPTOR.full_name}: {error}") from error


class LinkCall(MethodCall):
    """A REQUEST frame, answered by one REPLY or ERROR frame.

    `unanswered` has the open calls of the link by frame id: the call adds itself, and removes itself when answered.
    """

    __slots__ = ("header", "link", "unanswered")

    def __init__(self, link: FrameProtocol, unanswered: dict[int, LinkCall], header: Header, payload: bytes) -> None:
        deadline = time.monotonic() + header.deadline_ms / 1000 if header.deadline_ms else None
        lane = Lane.BULK if header.flags & Flag.BULK else Lane.INTERACTIVE
        super().__init__(header.method, payload, lane, deadline, bool(header.flags & Flag.WAIT))
        self.link = link
        self.header = header
        if header.context:
            self.context = RequestContext.unpack(header.context)
        self.unanswered = unanswered
        unanswered[header.id] = self

    def reply(self, reply: CallReply) -> None:
        payload, flags = reply.payload, Flag.NONE
        if reply.timings is not None:
            payload, flags = reply.timings.pack() + payload, Flag.TIMINGS
        self.unanswered.pop(self.header.id, None)
        stats = self.context.stats if self.context is not None else None
        context = b"" if stats is None else stats.pack()
        self.link.send(FrameType.REPLY, self.header.method, self.header.id, payload, flags=flags, context=context)

    def fail(self, error: TeimgrError) -> None:
        self.unanswered.pop(self.header.id, None)
        self.link.send(FrameType.ERROR, self.header.method, self.header.id, pack_error(error))


def raise_first(job: Job) -> None:
    """Raise the error of the first input that failed, where a call fails as a whole."""
    if job.errors:
        raise job.errors[min(job.errors)]


def within(payload: bytes, limit_bytes: int) -> bytes:
    """`payload`, checked against the limit of a reply.

    Raises:
        TooLarge: it is over `limit_bytes`.
    """
    if len(payload) > limit_bytes:
        raise TooLarge(f"Reply of {len(payload)} bytes is larger than the limit of {limit_bytes} bytes")
    return payload


def truncates_left(direction: int) -> bool:
    """Whether texts are truncated at their beginning: a `tei.v1.TruncationDirection` as a bool.

    Raises:
        InvalidInput: a number that is not in the enum.
    """
    if direction not in (tei_pb2.TRUNCATION_DIRECTION_RIGHT, tei_pb2.TRUNCATION_DIRECTION_LEFT):
        raise InvalidInput(f"`truncation_direction` {direction} is unknown: 0 (right) or 1 (left)")
    return bool(direction == tei_pb2.TRUNCATION_DIRECTION_LEFT)
