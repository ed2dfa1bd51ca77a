"""What a connection sends: data of its streams, a frame of each in turn, as flow control and the transport allow."""

from __future__ import annotations

import asyncio
from collections import deque

from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from teimgr.http2.stream import Headers, Stalled, Stream, StreamLost
from teimgr.http_protocol import LEAST_READ_BYTES, STALL_S

_FRAME_BYTES = 16 * 1024


class Sender:
    """Sends on one connection; `pause` and `resume` follow the transport's write buffer."""

    def __init__(self, h2: H2Connection, transport: asyncio.Transport) -> None:
        self._h2 = h2
        self._transport = transport
        self._ready: deque[Stream] = deque()  # streams with data to send, whose own window was not found empty since
        self._writable = asyncio.Event()
        self._writable.set()
        self._data_sent = 0

    def pause(self) -> None:
        self._writable.clear()

    def resume(self) -> None:
        self._writable.set()
        self.send_waiting()

    def flush(self) -> None:
        """Write the frames that h2 has made."""
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    async def send_headers(self, stream: Stream, headers: Headers, end: bool) -> None:
        """Send a block of headers once the client reads what was written; raises StreamLost."""
        await self._writable.wait()
        stream.check_open()
        try:
            self._h2.send_headers(stream.number, headers, end_stream=end)
        except ProtocolError as error:  # the connection ends
            raise StreamLost(str(error)) from error
        stream.has_ended = end
        self.flush()

    async def send_data(self, stream: Stream, data: memoryview, end: bool) -> None:
        """Send all of `data`.

        Raises:
            StreamLost: the stream or the connection ended first.
            Stalled: the client read too little of it.
        """
        stream.unsent, stream.ends_after = data, end
        stream.sent = sent = asyncio.get_running_loop().create_future()
        self.take_turn(stream)
        self.send_waiting()
        try:
            while not sent.done():
                left, sent_before = len(stream.unsent), self._data_sent
                await asyncio.wait({sent}, timeout=STALL_S)
                if not sent.done() and self._is_stalled(stream, left, sent_before):
                    raise Stalled(f"a part of it waited {STALL_S:g} s")
            sent.result()
        finally:
            stream.unsent, stream.sent = memoryview(b""), None

    def take_turn(self, stream: Stream) -> None:
        """Line a stream up, where it has data to send."""
        if stream.sent is not None and not stream.has_turn:
            stream.has_turn = True
            self._ready.append(stream)

    def send_waiting(self) -> None:
        """Send what flow control and the transport allow."""
        while self._ready and self._writable.is_set() and not self._transport.is_closing():
            if self._ready[0].unsent and self._h2.outbound_flow_control_window <= 0:
                return
            stream = self._ready.popleft()
            stream.has_turn = False
            if stream.sent is not None and not stream.sent.done():
                try:
                    self._send_frame(stream, stream.sent)
                except ProtocolError:  # the connection ends
                    stream.lose()

    def _send_frame(self, stream: Stream, sent: asyncio.Future[None]) -> None:
        """Send a frame, and line the stream up for the next one; not where its window is empty: until that opens."""
        size = left = len(stream.unsent)
        if left:
            window = self._h2.local_flow_control_window(stream.number)
            size = min(left, window, self._h2.max_outbound_frame_size, _FRAME_BYTES)
            if size <= 0:
                return
        is_last = size == left
        self._h2.send_data(stream.number, stream.unsent[:size], end_stream=is_last and stream.ends_after)
        self.flush()
        self._data_sent += size
        stream.unsent = stream.unsent[size:]
        if is_last:
            stream.has_ended = stream.ends_after
            sent.set_result(None)
        else:
            self.take_turn(stream)

    def _is_stalled(self, stream: Stream, left: int, sent_before: int) -> bool:
        """Whether the client keeps the window of a stream closed, or reads too little of the connection."""
        if left - len(stream.unsent) >= LEAST_READ_BYTES:
            return False
        is_own_window = self._h2.local_flow_control_window(stream.number) <= 0 < self._h2.outbound_flow_control_window
        return is_own_window or self._data_sent - sent_before < LEAST_READ_BYTES
