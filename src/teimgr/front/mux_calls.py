"""The mux without its transport: from a message's bytes to the worker's answer, one call or a stream of them.

Nothing here knows gRPC: another server can carry the same calls.
"""

from __future__ import annotations

import asyncio
import contextlib

from teimgr.errors import InvalidInput, Unsupported
from teimgr.front.mux_counters import Note
from teimgr.route.links import Call, Reply
from teimgr.route.router import Lease, Router, check_target
from teimgr.wire.fields import TARGET_FIELD, Envelope, Slice, Target, read_envelope, read_target, without_fields
from teimgr.wire.frames import Flag, Method
from teimgr.wire.rpc import ARROW_FIELD, Payload, Rpc

# With this many messages of a stream in flight it is no conversation any more, and goes to the bulk lane.
_FEW_IN_FLIGHT = 4
# Arrow batches are megabytes each: enough to keep a worker busy, few enough for memory to stay flat.
_BATCH_WINDOW = 4


async def answer_one(rpc: Rpc, router: Router, message: bytes, timeout_s: float | None, note: Note) -> Reply:
    """The worker's answer to a unary message.

    Raises:
        TeimgrError: target, inner request, lookup and worker are checked in this order; the first that fails.
    """
    envelope = read_envelope(message, rpc.inner_field)
    target = _target(envelope)
    payload = _payload(rpc, message, envelope)
    if payload is None:
        raise InvalidInput(rpc.missing)
    with router.lease(target) as lease:
        note.instance = lease.instance
        note.messages = 1
        return await lease.call(_method(rpc), payload, flags=rpc.lane, timeout_s=timeout_s)


def refuse_stream(rpc: Rpc, router: Router, first: bytes | None, note: Note) -> Unsupported:
    """What a stream that no worker serves is told, once its first message (None = there was none) has a good target."""
    if first is None:
        raise InvalidInput("Empty stream")
    with router.lease(_target(read_envelope(first, rpc.inner_field))) as lease:
        note.instance = lease.instance
    return Unsupported(f"{rpc.name} is not served by this version")


class StreamRelay:
    """The messages of one stream, on their way to workers and back in order.

    One task calls `feed` for each message and `end` after the last; another calls `next` until None. At most `window`
    messages are in flight: `feed` waits for room. A message without target goes where the one before went.
    """

    def __init__(self, rpc: Rpc, router: Router, window: int, note: Note) -> None:
        self.opened = asyncio.Event()
        self._rpc = rpc
        self._router = router
        self._note = note
        self._slots = asyncio.Semaphore(min(window, _BATCH_WINDOW) if rpc.payload is Payload.WHOLE else window)
        self._answers: asyncio.Queue[Call | Exception | None] = asyncio.Queue()
        self._current: Call | None = None
        self._in_flight = 0
        self._target: Target | None = None
        self._target_bytes: Slice | None = None
        self._lease: Lease | None = None
        self._leases = contextlib.ExitStack()
        self._options: bytes | None = None

    @property
    def has_target(self) -> bool:
        """Whether a worker was found for the first message."""
        return self._lease is not None

    async def room(self) -> None:
        """Wait until another message may be read from the client."""
        await self._slots.acquire()

    async def feed(self, message: bytes) -> None:
        """Send one message on; `room` was awaited for it. Its failure comes out of `next`, in its place.

        Raises:
            TeimgrError: the message cannot be sent; nothing may follow it but `fail`.
        """
        envelope = read_envelope(message, self._rpc.inner_field)
        lease = self._lease_for(envelope)
        if not self.opened.is_set():
            self.opened.set()
        payload = self._whole(message) if self._rpc.payload is Payload.WHOLE else envelope.inner
        if payload is None:
            self._slots.release()
            return
        call = await lease.start(_method(self._rpc), payload, flags=self._flags())
        self._in_flight += 1
        self._answers.put_nowait(call)

    def end(self) -> None:
        """The client has said everything."""
        if self._target is None:
            self.fail(InvalidInput("Empty stream"))
        else:
            self._answers.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """The stream ends with `error` once the messages before are answered."""
        self._answers.put_nowait(error)
        self.opened.set()

    async def next(self) -> bytes | None:
        """The next answer, or None after the last.

        Raises:
            TeimgrError: the message in this place failed.
        """
        item = await self._answers.get()
        if item is None:
            return None
        if isinstance(item, Exception):
            raise item
        self._current = item
        reply = await item.answer
        self._in_flight -= 1
        self._note.messages += 1
        self._slots.release()
        return reply.payload

    def close(self) -> None:
        """Give up what is in flight."""
        if self._current is not None:
            self._current.cancel()
        while not self._answers.empty():
            item = self._answers.get_nowait()
            if isinstance(item, Call):
                item.cancel()
        self._leases.close()

    def _lease_for(self, envelope: Envelope) -> Lease:
        """The lease of the message's target; that of the message before while its worker serves."""
        if envelope.target is not None and envelope.target != self._target_bytes:
            self._target = _target(envelope)
            self._target_bytes = envelope.target
            self._lease = None
        if self._target is None:
            raise InvalidInput("Missing target")
        if self._lease is None or self._lease.is_over:
            self._leases.close()
            self._lease = self._leases.enter_context(self._router.lease(self._target))
            self._note.instance = self._lease.instance
        return self._lease

    def _whole(self, message: bytes) -> bytes:
        """The message with the options of the stream's first one in front, where its own fields win."""
        if self._options is None:
            self._options = without_fields(message, TARGET_FIELD, ARROW_FIELD)
            return message
        return self._options + message if self._options else message

    def _flags(self) -> Flag:
        if self._rpc.lane:
            return self._rpc.lane
        return Flag.WAIT | Flag.BULK if self._in_flight >= _FEW_IN_FLIGHT else Flag.WAIT


def _target(envelope: Envelope) -> Target:
    if envelope.target is None:
        raise InvalidInput("Missing target")
    target = read_target(envelope.target)
    check_target(target)
    return target


def _payload(rpc: Rpc, message: bytes, envelope: Envelope) -> Slice | None:
    if rpc.payload is Payload.INNER:
        return envelope.inner
    return message if rpc.payload is Payload.WHOLE else b""


def _method(rpc: Rpc) -> Method:
    if rpc.method is None:
        raise Unsupported(f"{rpc.name} is not served by this version")
    return rpc.method
