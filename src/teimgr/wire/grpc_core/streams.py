"""Streaming RPCs, independent of a transport: pump of a bidi stream, in-flight window, collected client stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from teimgr.errors import DeadlineExceeded, InvalidInput, TooLarge
from teimgr.http.byte_budget import Charge, UnreadReplies
from teimgr.http.connection_gate import STALL_S
from teimgr.http.turns import TURNS_OF, Turns
from teimgr.wire.frames import Flag
from teimgr.wire.grpc_core.rpc import Rpc
from teimgr.wire.protobuf import Octets, Slice, varint

# Messages of a stream beyond this many in flight go to the bulk lane.
INTERACTIVE_MESSAGES = 4
# Unread replies stay in memory. If replies are large, the window shrinks until they take about this many bytes.
HELD_BYTES = 64 * 1024 * 1024
# How long a client of a bidi stream may pause, on either port.
STREAM_PAUSE_S = 3600.0
# Messages in flight until the size of a reply is known; each reply that the client reads allows one more.
FIRST_MESSAGES = 64
# Arrow batches in flight: each has megabytes, so a few keep a worker busy and bound the memory.
ARROW_WINDOW = 4

# Messages of all streams in one turn of the event loop; each costs 5 to 100 µs. Further ones wait, callers in rotation.
_turns = Turns(64)

# Returns the next message of a request stream, None after the last.
Receive = Callable[[], Awaitable[Octets | None]]


class StreamWindow:
    """Bound on the messages of one stream in flight: `limit`, or fewer while the replies are large or few are read.

    Only one task may enter.
    """

    def __init__(self, limit: int) -> None:
        self.in_flight = 0
        self._limit = limit
        self._begun = self._allowed = min(limit, FIRST_MESSAGES)
        self._has_room = asyncio.Event()

    @property
    def flags(self) -> int:
        """Lane of the message that entered last; messages of a stream wait for room in the worker."""
        return Flag.WAIT | Flag.BULK if self.in_flight > INTERACTIVE_MESSAGES else Flag.WAIT

    async def enter(self) -> None:
        while self.in_flight >= self._allowed:
            self._has_room.clear()
            await self._has_room.wait()
        self.in_flight += 1

    def leave(self, reply_bytes: int = 0) -> None:
        self.in_flight -= 1
        self._begun = min(self._limit, self._begun + 1)
        if reply_bytes:
            self._allowed = min(self._begun, max(INTERACTIVE_MESSAGES, HELD_BYTES // reply_bytes))
        self._has_room.set()


class StreamReply(Protocol):
    """Reply to one message of a stream."""

    @property
    def payload(self) -> Slice:
        """The response message, serialised: bytes, except on a worker's own port, which also sends views."""


class StreamCall(Protocol):
    """One message of a stream in flight."""

    @property
    def answer(self) -> asyncio.Future[Any]:
        """Resolves to the reply, a `StreamReply`, or raises TeimgrError."""

    def cancel(self) -> None:
        """Drop the call; no effect once it is answered."""


class _HeldCall:
    """A message in flight. Its reply is charged to the client as soon as it arrives."""

    __slots__ = ("_call", "_charge", "_is_over")

    def __init__(self, call: StreamCall, unread: UnreadReplies) -> None:
        self._call = call
        self._charge = Charge(unread)
        self._is_over = False
        call.answer.add_done_callback(self._arrived)

    @property
    def answer(self) -> asyncio.Future[Any]:
        return self._call.answer

    def end(self) -> None:
        """Drop the call or, once it is answered, its reply; called once that is sent, too."""
        self._is_over = True
        self._call.cancel()
        self._charge.release()

    def _arrived(self, answer: asyncio.Future[Any]) -> None:
        if not self._is_over and not answer.cancelled() and answer.exception() is None:
            self._charge.add(len(answer.result().payload))


class StreamPump:
    """Pump of a bidi stream: processes its messages concurrently within a window, and answers them in request order.

    `receive` reads from the client, `send` writes to it. `start` sends a message to the worker, and returns None if the
    message gets no reply. `window` bounds the messages in flight. `unread` counts replies unread by the client: above
    its limit no further message is read.
    """

    def __init__(
        self,
        rpc: Rpc,
        window: int,
        unread: UnreadReplies,
        *,
        receive: Receive,
        start: Callable[[Octets, int], Awaitable[StreamCall | None]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._rpc = rpc
        self._window = StreamWindow(min(window, ARROW_WINDOW) if rpc.arrow_field else window)
        self._unread = unread
        self._receive = receive
        self._start = start
        self._send = send
        # In request order; an exception fails the stream at that position, None ends it.
        self._calls: asyncio.Queue[_HeldCall | Exception | None] = asyncio.Queue()

    async def run(self) -> None:
        """Return once the client has half-closed and every reply is sent; calls in flight are cancelled on any error.

        Raises:
            TeimgrError: the error of the first message, in request order, that failed.
            Overloaded: the client does not read its replies.
        """
        reader = asyncio.create_task(self._read())
        current: _HeldCall | None = None
        try:
            while (item := await self._calls.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                current = item
                reply: StreamReply = await current.answer
                self._window.leave(len(reply.payload))
                await self._send(reply.payload)
                current.end()
        finally:
            reader.cancel()
            try:
                await asyncio.wait((reader,))
            finally:  # a second cancellation may end the wait: a deadline and a reset can arrive together
                if current is not None:
                    current.end()
                while not self._calls.empty():
                    rest = self._calls.get_nowait()
                    if rest is not None and not isinstance(rest, Exception):
                        rest.end()
                item = current = rest = None  # breaks the cycle of call, error and this frame

    async def _read(self) -> None:
        """Run ahead of the replies as far as the window allows."""
        try:
            while True:
                await self._window.enter()
                if not self._unread.has_room:
                    await self._unread.room(STALL_S)
                message = await self._receive()
                if message is None:
                    break
                await _turns.go_on(TURNS_OF.get())
                call = await self._start(message, self._rpc.lane if self._rpc.arrow_field else self._window.flags)
                if call is None:
                    self._window.leave()
                else:
                    self._calls.put_nowait(_HeldCall(call, self._unread))
        except Exception as error:  # `run` raises it after the earlier replies
            self._calls.put_nowait(error)
        else:
            self._calls.put_nowait(None)


# Field 1 of teimgr.v1.RerankPairs, wire type 2.
_REQUEST = b"\x0a"
# An encoded pair of two bytes takes hundreds of bytes once decoded.
MAX_PAIRS = 100_000
# Bytes per copy, which holds the loop for a millisecond per MB.
_COPIED_BYTES = 4 * 2**20


class PairCollector:
    """Collects the messages of a RerankStream into one `teimgr.v1.RerankPairs` of at most `limit_bytes`, undecoded."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._count = 0

    async def collect(
        self,
        receive: Receive,
        message_timeout_s: float | None,
        request_of: Callable[[Octets], Slice | None] | None = None,
    ) -> None:
        """Add the whole stream. `request_of` unwraps a message, whose request may be missing.

        `message_timeout_s` bounds the wait for each message, since earlier messages are held in memory; None: no bound.

        Raises:
            InvalidInput: the stream has no messages.
            DeadlineExceeded: the next message did not arrive in time.
            TooLarge: see `add`.
        """
        is_empty = True
        while True:
            await _turns.go_on(TURNS_OF.get())
            try:
                async with asyncio.timeout(message_timeout_s) as limit:
                    message = await receive()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineExceeded(f"Request timeout: no further message within {message_timeout_s:g} s") from None
            if message is None:
                break
            is_empty = False
            request = message if request_of is None else request_of(message)
            if request is not None:
                await self.add(request)
        if is_empty:
            raise InvalidInput("Empty stream")

    async def add(self, request: Slice) -> None:
        """Append one `tei.v1.RerankStreamRequest`, a large one in several turns of the loop.

        Raises:
            TooLarge: the stream exceeds the limit in bytes or in messages.
        """
        head = _REQUEST + varint(len(request))
        size = len(self._buffer) + len(head) + len(request)
        if size > self._limit_bytes:
            raise TooLarge(f"Stream larger than max ({size} vs. {self._limit_bytes} bytes)")
        if self._count == MAX_PAIRS:
            raise TooLarge(f"Stream longer than max ({MAX_PAIRS + 1} vs. {MAX_PAIRS} messages)")
        self._count += 1
        self._buffer += head
        self._buffer += memoryview(request)[:_COPIED_BYTES]
        for at in range(_COPIED_BYTES, len(request), _COPIED_BYTES):
            await asyncio.sleep(0)
            self._buffer += memoryview(request)[at : at + _COPIED_BYTES]

    @property
    def flags(self) -> int:
        """The lane of this many pairs."""
        return Flag.WAIT | Flag.BULK if self._count > INTERACTIVE_MESSAGES else Flag.WAIT

    def payload(self) -> bytearray:
        """Return the `RerankPairs` message, once; raises InvalidInput if no message had a request."""
        if not self._count:
            raise InvalidInput("Missing rerank request")
        return self._buffer
