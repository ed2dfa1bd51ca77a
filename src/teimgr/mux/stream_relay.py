"""A stream through the mux without its transport: messages to workers, answers back in order, memory bounded."""

from __future__ import annotations

import asyncio
import contextlib

from teimgr.errors import InvalidInput
from teimgr.mux.calls import lease_for, method_of, open_message, target_of
from teimgr.mux.counters import CallRecord
from teimgr.routing.links import PendingCall
from teimgr.routing.router import Lease, RouterView
from teimgr.wire.frames import Flag
from teimgr.wire.protobuf import TARGET_FIELD, Envelope, Slice, Target, without_fields
from teimgr.wire.rerank_stream import StreamWindow
from teimgr.wire.rpc import Rpc

# Arrow batches are megabytes each: enough to keep a worker busy, few enough for memory to stay flat.
_BATCH_WINDOW = 4


class StreamRelay:
    """The messages of one stream, on their way to workers and back in order.

    One task calls `feed` for each message and `end` after the last; another calls `next` until None. At most `window`
    messages are in flight: `feed` waits for room. A message without target goes where the one before went, the first to
    `named`.
    """

    def __init__(self, rpc: Rpc, router: RouterView, named: Target | None, window: int, note: CallRecord) -> None:
        self.opened = asyncio.Event()
        self._rpc = rpc
        self._router = router
        self._note = note
        self._window = StreamWindow(min(window, _BATCH_WINDOW) if rpc.arrow_field else window)
        self._answers: asyncio.Queue[PendingCall | Exception | None] = asyncio.Queue()
        self._current: PendingCall | None = None
        self._target = named
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
        envelope = open_message(self._rpc, message)
        lease = self._lease_for(envelope, message)
        if not self.opened.is_set():
            self.opened.set()
        if envelope.inner is None:
            self._window.leave()
            return
        payload = self._whole(message) if self._rpc.arrow_field else envelope.inner
        call = await lease.start(method_of(self._rpc), payload, flags=self._flags())
        self._answers.put_nowait(call)

    def end(self) -> None:
        """The client has said everything."""
        if self._target is None:
            self.fail(InvalidInput("Empty stream"))
        else:
            self._answers.put_nowait(None)
            self.opened.set()

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
            if isinstance(item, PendingCall):
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
            self._options = without_fields(message, TARGET_FIELD, self._rpc.arrow_field)
            return message
        return self._options + message if self._options else message

    def _flags(self) -> Flag:
        if self._rpc.arrow_field:
            return self._rpc.lane
        return Flag.WAIT | Flag.BULK if self._window.is_busy else Flag.WAIT
