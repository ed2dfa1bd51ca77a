"""A stream through the mux without its transport: messages to workers, answers back in order, memory bounded."""

from __future__ import annotations

import asyncio
import contextlib

from teimgr.errors import InvalidInput
from teimgr.front.mux_calls import lease_for, method_of, target_of
from teimgr.front.mux_counters import Note
from teimgr.route.links import Call
from teimgr.route.router import Lease, Router
from teimgr.wire.fields import TARGET_FIELD, Envelope, Slice, Target, read_envelope, without_fields
from teimgr.wire.frames import Flag
from teimgr.wire.rpc import ARROW_FIELD, Payload, Rpc

# With more messages of a stream in flight it is no conversation any more, and goes to the bulk lane.
FEW = 4
# Answers that a slow client has not taken lie in memory: large ones shrink the window to about this much.
HELD_BYTES = 64 * 1024 * 1024
# Arrow batches are megabytes each: enough to keep a worker busy, few enough for memory to stay flat.
_BATCH_WINDOW = 4


class Window:
    """How many messages of one stream may be in flight: `limit`, fewer while the answers are large.

    For one task that enters.
    """

    def __init__(self, limit: int) -> None:
        self.in_flight = 0
        self._limit = limit
        self._allowed = limit
        self._room = asyncio.Event()

    async def enter(self) -> None:
        """Wait for room, and take it."""
        while self.in_flight >= self._allowed:
            self._room.clear()
            await self._room.wait()
        self.in_flight += 1

    def leave(self, answer_bytes: int = 0) -> None:
        """A message is done with; its answer had that many bytes."""
        self.in_flight -= 1
        if answer_bytes:
            self._allowed = min(self._limit, max(FEW, HELD_BYTES // answer_bytes))
        self._room.set()


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
        self._window = Window(min(window, _BATCH_WINDOW) if rpc.payload is Payload.WHOLE else window)
        self._answers: asyncio.Queue[Call | Exception | None] = asyncio.Queue()
        self._current: Call | None = None
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
        await self._window.enter()

    async def feed(self, message: bytes) -> None:
        """Send one message on; `room` was awaited for it. Its failure comes out of `next`, in its place.

        Raises:
            TeimgrError: the message cannot be sent; nothing may follow it but `fail`.
        """
        envelope = read_envelope(message, self._rpc.inner_field)
        lease = self._lease_for(envelope, message)
        if not self.opened.is_set():
            self.opened.set()
        payload = self._whole(message) if self._rpc.payload is Payload.WHOLE else envelope.inner
        if payload is None:
            self._window.leave()
            return
        call = await lease.start(method_of(self._rpc), payload, flags=self._flags())
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
        self._note.messages += 1
        self._window.leave(len(reply.payload))
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

    def _lease_for(self, envelope: Envelope, message: bytes) -> Lease:
        """The lease of the message's target; that of the message before while its worker serves."""
        if envelope.target is not None and envelope.target != self._target_bytes:
            self._target = target_of(envelope)
            self._target_bytes = envelope.target
            self._lease = None
        if self._target is None:
            raise InvalidInput("Missing target")
        if self._lease is None or self._lease.is_over:
            self._leases.close()
            self._lease = self._leases.enter_context(lease_for(self._rpc, self._router, self._target, message))
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
        return Flag.WAIT | Flag.BULK if self._window.in_flight > FEW else Flag.WAIT
