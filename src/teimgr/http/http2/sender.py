"""What a connection sends: data of its streams, a frame of each in turn, as flow control and the transport allow."""

from __future__ import annotations

import asyncio
from collections import deque

from teimgr.http.connection_gate import MIN_READ_BYTES, STALL_S
from teimgr.http.http2.framing import Framing
from teimgr.http.http2.headers import Headers
from teimgr.http.http2.stream import Stalled, Stream, StreamLost

# Longest DATA frame that is sent: others have their turn after it.
_FRAME_BYTES = 256 * 1024
# Frames of more than this are written at once: then the transport says whether the client reads them.
_WAITING_BYTES = 64 * 1024


class Sender:
    """Sends on one connection; `pause` and `resume` follow the transport's write buffer.

    The frames of one turn of the event loop, such as headers, data and status of a reply, leave in one write.
    """

    def __init__(self, framing: Framing, transport: asyncio.Transport) -> None:
        self._framing = framing
        self._transport = transport
        self._ready: deque[Stream] = deque()  # streams with data to send, whose own window was not found empty since
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
        """Send a block of headers, once the client reads what was written; raises StreamLost.

        The last one of a stream does not wait: a client that does not read would hold a task for each of its calls,
        and opens no more streams, as the connection is not read either.
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
        """Wait until all is sent, or for the time in which a client must read some; raises Stalled."""
        left, sent_before = len(stream.unsent), self._data_sent
        await asyncio.wait({stream.sending_ended()}, timeout=STALL_S)
        if stream.is_sending and self._is_stalled(stream, left, sent_before):
            raise Stalled(f"a part of it waited {STALL_S:g} s")

    def take_turn(self, stream: Stream) -> None:
        """Line a stream up, where it has data to send."""
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
        """Send a frame, and line the stream up for the next one; not where its window is empty: until that opens."""
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
            self.write()  # so that the transport's buffer is known
            stream.mark_sent(size)
            self.take_turn(stream)

    def _is_stalled(self, stream: Stream, left: int, sent_before: int) -> bool:
        """Whether the client keeps the window of a stream closed, or reads too little of the connection."""
        if left - len(stream.unsent) >= MIN_READ_BYTES:
            return False
        is_own_window = self._framing.window_of(stream.number) <= 0 < self._framing.send_window
        return is_own_window or self._data_sent - sent_before < MIN_READ_BYTES
