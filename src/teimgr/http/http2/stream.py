"""HTTP/2 streams of a server: received data and end of each `Stream`, and the `Sender` of a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from teimgr.http.connection_gate import MIN_READ_BYTES, STALL_S
from teimgr.http.http2.frame_reader import ErrorCode, Payload
from teimgr.http.http2.framing import Framing
from teimgr.http.http2.headers import Headers, RequestHead


class Connection(Protocol):
    """A stream's view of its connection; `keep_open` extends its idle limit. Connections of one `caller`, set by
    `belongs_to`, share turns of the event loop."""

    transport: asyncio.Transport
    caller: Hashable

    @property
    def sender(self) -> Sender: ...

    def keep_open(self) -> None: ...

    def belongs_to(self, caller: str) -> None: ...

    def reset(self, stream: Stream, code: ErrorCode) -> None: ...

    def acknowledge(self, stream: Stream, size: int) -> None: ...


# Longest DATA frame sent, so that other streams get their turn.
_FRAME_BYTES = 256 * 1024
# More than this is written at once, so that the write buffer shows whether the client reads.
_WAITING_BYTES = 64 * 1024
_COPIED_BYTES = 256 * 1024


class StreamLost(Exception):
    """The client has reset the stream, or its connection is closed."""


class Stalled(Exception):
    """The client does not read the stream's data."""


def _ignore(size: int) -> None:
    pass


class ReceiveBuffer:
    """The received bytes of a stream; `acknowledge` adds bytes to the client's window.

    The window reopens only when a reader waits for data, so unread data throttles the client.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._data = bytearray()
        self._unacknowledged = 0
        self._failure: Exception | None = None
        self._change: asyncio.Future[None] | None = None  # awaited by the reader
        self.has_ended = False

    def __len__(self) -> int:
        return len(self._data)

    @property
    def whole_bytes(self) -> int | None:
        """The size of what was received and not taken, once that is all; None while more may come."""
        return len(self._data) if self.has_ended else None

    async def read(self, size: int) -> bytes | bytearray:
        """Return exactly `size` bytes; fewer, or none, at the end of the stream.

        Raises:
            Exception: the error given to `fail`, once all received bytes are read.
        """
        while len(self._data) < size and not self.has_ended:
            await self._wait()
        return self.take(min(size, len(self._data)))

    async def read_some(self) -> bytes | bytearray:
        """Return the received bytes, at least one; none at the end of the stream. Raises as `read`."""
        while not self._data and not self.has_ended:
            await self._wait()
        return self.take()

    async def more(self) -> None:
        """Wait until more is received, or the end; raises like `read`."""
        before = len(self._data)
        while len(self._data) == before and not self.has_ended:
            await self._wait()

    def peek(self, size: int) -> bytes:
        """Return the first `size` bytes, or fewer if fewer are received, without reading them."""
        return bytes(self._data[:size])

    def take(self, size: int | None = None) -> bytes | bytearray:
        """Return the first `size` received bytes, or all. Many bytes are not copied, which would take a millisecond per
        MB."""
        if size is None:
            size = len(self._data)
        if size > _COPIED_BYTES:
            taken, self._data = self._data, self._data[size:]  # the rest is at most one window
            del taken[size:]
            return taken
        found = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return found

    def fail(self, error: Exception) -> None:
        """Stop waiting for data."""
        self._failure = error
        self._wake()

    def add(self, data: Payload) -> None:
        """Append received bytes, which took as many of the client's window."""
        self._data += data
        self._unacknowledged += len(data)
        self._wake()

    def end(self) -> None:
        """Note that the client sends no more."""
        self.has_ended = True
        self._wake()

    def unacknowledged(self) -> int:
        """Return the bytes to acknowledge now; each is counted once."""
        size, self._unacknowledged = self._unacknowledged, 0
        return size

    def forget_reader(self) -> None:
        """Break the reference cycles with the stream, once nothing reads it any more."""
        self._acknowledge = _ignore
        self._failure = None

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._change is not None:
            raise RuntimeError("a stream has one reader at a time")
        self._acknowledge(self.unacknowledged())
        self._change = asyncio.get_running_loop().create_future()
        try:
            await self._change
        finally:
            self._change = None

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)


class Stream:
    """A stream, opened by its client with `headers`; `head` is None if these are malformed.

    Attributes:
        received: The received data.
        on_lost: Called once when the client resets the stream or the connection ends; the connection sets it to the
            cancellation of the task that serves the stream.
        on_leaving: Called when the server answers its last calls, while the stream is open.
        on_stopping: Called when the server ends, while the stream is open.
        discards_rest: Whether the rest of an answered request is discarded; otherwise the stream is reset.
        is_lost: Whether the stream has failed, as `received` does with `StreamLost`.
    """

    def __init__(self, connection: Connection, number: int, headers: Headers, head: RequestHead | None) -> None:
        self.connection = connection
        self.number = number
        self.headers = headers
        self._head = head
        self.received = ReceiveBuffer(self._acknowledge)
        self.length = None if head is None else head.length  # of the request's content
        self.received_bytes = 0
        self._ahead = 0  # unread bytes already returned to the connection's window
        self.on_lost: Callable[[], object] | None = None
        self.on_leaving: Callable[[], object] | None = None
        self.on_stopping: Callable[[], object] | None = None
        self.discards_rest = False
        self.is_lost = False
        self.has_ended = False
        """Whether the server has sent its last frame."""
        # Data of `send_data` that waits for flow control.
        self.unsent = memoryview(b"")
        self.ends_after = False
        self.is_sending = False
        self._sent: asyncio.Future[None] | None = None  # resolved when all is sent or lost
        self.has_turn = False

    @property
    def head(self) -> RequestHead:
        """The head of the request; streams that are served have one."""
        assert self._head is not None
        return self._head

    @property
    def is_malformed(self) -> bool:
        """True if the length of the content differs, or will differ, from the head's (RFC 9113, section 8.1.1)."""
        if self.length is None:
            return False
        return self.received_bytes > self.length or (self.received.has_ended and self.received_bytes < self.length)

    async def send_headers(self, headers: Headers, end: bool = False) -> None:
        """Send a block of headers, the last frame if `end`.

        Raises:
            StreamLost: it cannot be sent.
        """
        await self.connection.sender.send_headers(self, headers, end)

    async def send_data(self, data: bytes | bytearray | memoryview, end: bool = False) -> None:
        """Send bytes as flow control allows; return when all are written to the connection.

        Raises:
            StreamLost: they cannot be sent.
            Stalled: the client did not read for too long; the rest of them is discarded.
        """
        self.check_open()
        await self.connection.sender.send_data(self, memoryview(data), end)

    def begin_sending(self, data: memoryview, *, end: bool) -> None:
        """Called by the sender: `data` is to be sent, as the last frames if `end`."""
        self.unsent, self.ends_after, self.is_sending = data, end, True

    def sending_ended(self) -> asyncio.Future[None]:
        """Done when all of `unsent` is sent or lost."""
        self._sent = asyncio.get_running_loop().create_future()
        return self._sent

    def mark_sent(self, size: int = 0, *, end: bool = False) -> None:
        """Called by the sender after a frame with the first `size` bytes of `unsent`; `end`: it was the last frame."""
        self.has_ended = end
        if size:
            self.unsent = self.unsent[size:]

    def discard_unsent(self) -> None:
        """Called by the sender when it has sent all, or gives up."""
        self.unsent, self.is_sending, self._sent = memoryview(b""), False, None

    def line_up(self) -> None:
        """Called by the sender, which has lined the stream up."""
        self.has_turn = True

    def take_turn(self) -> None:
        """Called by the sender, which sends a frame of the stream now."""
        self.has_turn = False

    def receive(self, data: Payload) -> None:
        """Called by the connection with a part of the request's content."""
        self.received.add(data)
        self.received_bytes += len(data)

    def open_ahead(self, size: int) -> None:
        """Called by the connection, which opened its window for this many unread bytes."""
        self._ahead += size

    def read_ahead(self, size: int) -> int:
        """Return how many of `size` bytes just read were covered by the enlarged connection window; each counts
        once."""
        ahead = min(self._ahead, size)
        self._ahead -= ahead
        return ahead

    def call_when(
        self,
        *,
        lost: Callable[[], object] | None = None,
        leaving: Callable[[], object] | None = None,
        stopping: Callable[[], object] | None = None,
    ) -> None:
        """Set what is called at these events, in place of what was called before; see `on_lost` and the others."""
        self.on_lost = lost or self.on_lost
        self.on_leaving = leaving or self.on_leaving
        self.on_stopping = stopping or self.on_stopping

    def discard_rest(self) -> None:
        """Let a client whose request was answered go on sending it."""
        self.discards_rest = True

    def reset(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """End the stream in both directions, if it has not ended."""
        if not self.is_lost and not (self.has_ended and self.received.has_ended):
            self.has_ended = True
            self.connection.reset(self, code)

    def lose(self, ends_later: Callable[[Callable[[], object]], bool] | None = None) -> None:
        """Called by the connection when nothing can be received or sent any more.

        Its task learns it now, or if `ends_later` returns True when that calls what it was given.
        """
        if not self.is_lost:
            self.is_lost = True
            if ends_later is None or not ends_later(self._tell_loss):
                self._tell_loss()

    def _tell_loss(self) -> None:
        self.received.fail(StreamLost(f"stream {self.number} is lost"))
        self.end_sending()
        if self.on_lost is not None:
            self.on_lost()

    def end_sending(self) -> None:
        """Called by the connection when all of `unsent` is sent or lost."""
        self.is_sending = False
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def forget_callbacks(self) -> None:
        """Break the reference cycles of the stream, so that it is freed at once. Called by the connection when it was
        served.

        A garbage collection over the objects of thousands of streams would block the event loop while it runs.
        """
        self.received.forget_reader()
        self.on_lost = self.on_leaving = self.on_stopping = None

    def check_open(self) -> None:
        """Raise StreamLost if nothing can be sent any more."""
        if self.is_lost or self.has_ended:
            raise StreamLost(f"stream {self.number} has ended")

    def _acknowledge(self, size: int) -> None:
        self.connection.acknowledge(self, size)


class Sender:
    """Sends the data of one connection's streams, one frame of each in turn, within flow control.

    `pause` and `resume` follow the transport's write buffer. Frames of one turn of the event loop, such as headers,
    data and status of a reply, are sent in one write.
    """

    def __init__(self, framing: Framing, transport: asyncio.Transport) -> None:
        self._framing = framing
        self._transport = transport
        self._ready: deque[Stream] = deque()  # streams with data and an open window
        self._writable = asyncio.Event()
        self._writable.set()
        self._data_sent = 0
        self._loop = asyncio.get_running_loop()
        self._is_write_due = False

    def pause(self) -> None:
        self._writable.clear()

    def resume(self) -> None:
        self._writable.set()
        self.send_waiting()
        self.write()

    def flush(self) -> None:
        """Write the frames that were made, with others of this turn of the event loop."""
        if self._framing.waiting_bytes > _WAITING_BYTES:
            self.write()
        elif self._framing.waiting_bytes and not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self._write_due)

    def _write_due(self) -> None:
        self._is_write_due = False
        self.write()

    def write(self) -> None:
        """Write the frames that were made now."""
        parts = self._framing.take()
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)

    async def send_headers(self, stream: Stream, headers: Headers, end: bool) -> None:
        """Send a block of headers, once the client reads the bytes written before; raises StreamLost.

        The last block of a stream does not wait: a client that does not read would hold a task for each of its calls.
        Such a client opens no more streams, as the connection is not read either.
        """
        if not end and not self._writable.is_set():
            await self._writable.wait()
        stream.check_open()
        try:
            self._framing.headers(stream.number, headers, end)
        except KeyError:  # the connection ends
            raise StreamLost(f"stream {stream.number} is closed") from None
        stream.mark_sent(end=end)
        self.flush()

    async def send_data(self, stream: Stream, data: memoryview, end: bool) -> None:
        """Send all of `data`.

        Raises:
            StreamLost: the stream or the connection ended first.
            Stalled: the client read too little of it.
        """
        stream.begin_sending(data, end=end)
        try:
            self.take_turn(stream)
            self.send_waiting()
            self.flush()
            while stream.is_sending:
                await self._progress(stream)
            if stream.is_lost:
                raise StreamLost(f"stream {stream.number} is lost")
        finally:
            stream.discard_unsent()

    async def _progress(self, stream: Stream) -> None:
        """Wait until all is sent, or for the time within which a client must read some; raises Stalled."""
        left, sent_before = len(stream.unsent), self._data_sent
        await asyncio.wait({stream.sending_ended()}, timeout=STALL_S)
        if stream.is_sending and self._is_stalled(stream, left, sent_before):
            raise Stalled(f"no progress for {STALL_S:g} s")

    def take_turn(self, stream: Stream) -> None:
        """Queue a stream that has data to send."""
        if stream.is_sending and not stream.has_turn:
            stream.line_up()
            self._ready.append(stream)

    def send_waiting(self) -> None:
        """Make the frames that flow control and the transport allow."""
        while self._ready and self._writable.is_set() and not self._transport.is_closing():
            if self._ready[0].unsent and self._framing.send_window <= 0:
                return
            stream = self._ready.popleft()
            stream.take_turn()
            if stream.is_sending:
                try:
                    self._send_frame(stream)
                except KeyError:  # the connection ends
                    stream.lose()

    def _send_frame(self, stream: Stream) -> None:
        """Send a frame, and queue the stream for the next one, unless its window is empty: then it waits until that
        opens."""
        size = left = len(stream.unsent)
        if left:
            window = min(self._framing.window_of(stream.number), self._framing.send_window)
            size = min(left, window, self._framing.max_frame, _FRAME_BYTES)
            if size <= 0:
                return
        is_last = size == left
        self._framing.data(stream.number, stream.unsent[:size], is_last and stream.ends_after)
        self._data_sent += size
        if is_last:
            stream.mark_sent(end=stream.ends_after)
            stream.end_sending()
            self.flush()
        else:
            self.write()  # updates the size of the transport's buffer
            stream.mark_sent(size)
            self.take_turn(stream)

    def _is_stalled(self, stream: Stream, left: int, sent_before: int) -> bool:
        """True if the client keeps the window of a stream closed, or reads too little of the connection."""
        if left - len(stream.unsent) >= MIN_READ_BYTES:
            return False
        is_own_window = self._framing.window_of(stream.number) <= 0 < self._framing.send_window
        return is_own_window or self._data_sent - sent_before < MIN_READ_BYTES
