"""One HTTP/2 connection of a server: streams, flow control in both directions, bounds on what a client costs, GOAWAY.

Protocol: RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    UnknownFrameReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from teimgr.http2.sender import Sender
from teimgr.http2.stream import Headers, Stream, StreamLost
from teimgr.http_protocol import HEAD_LIMIT_S, KEEP_ALIVE_S, ServerConnections, StallGuard

log = logging.getLogger(__name__)
# At lower levels hpack logs every header, API keys included.
logging.getLogger("hpack").setLevel(logging.WARNING)

MAX_STREAMS = 1024
# Tasks of the streams of all connections: each takes some kilobytes. More are refused unprocessed.
MAX_TASKS = 8192
# Bytes that clients may send before they are read: fewer per stream, so that a stalled one does not block the rest.
_STREAM_WINDOW = 1 << 18
_CONNECTION_WINDOW = 1 << 20
# Control frames (PING, SETTINGS, RST_STREAM, PRIORITY, empty DATA, unknown ones) and refused streams that a connection
# may send at once, and per second after that. Each costs an acknowledgement or a task; a client that cancels calls
# sends one for each. A change of the initial window costs more, as it concerns every stream.
_CONTROL_BURST = 2000
_CONTROL_PER_S = 500.0
_STREAMS_PER_CONTROL = 64
# After GOAWAY a client closes; the server does so only after this time, as data that arrives at a closed connection
# makes the kernel reset it, and the client might lose the GOAWAY, by which it knows that calls can be made again.
_GOAWAY_S = 1.0
# What an answered client still sends is read and discarded within these, then its stream is reset: clients such as curl
# before 8.7 lose the response with the stream.
_DISCARD_S = 30.0
_DISCARDED_BYTES = 64 * 2**20
_SETTINGS = {
    SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
    SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
    SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
}
_CONFIG = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,  # by what serves the stream, so that one bad request does not end the others
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)

Serve = Callable[[Stream], Coroutine[Any, Any, None]]
"""Serves one stream; runs as a task, cancelled when the stream is lost, unless it sets `Stream.on_lost`."""


class _Answered:
    """A stream answered before its client has sent all; the bytes that may still come, and their time limit."""

    __slots__ = ("left", "stream", "timer")

    def __init__(self, stream: Stream, timer: asyncio.TimerHandle) -> None:
        self.stream = stream
        self.timer = timer
        self.left = _DISCARDED_BYTES


class Connection(asyncio.Protocol):
    """One connection; registers with the server, which calls `shutdown` at its end and cancels tasks that take longer.

    A connection without streams is closed after a time, by GOAWAY; `stays_open` is set for clients of which that is
    not expected.
    """

    def __init__(self, serve: Serve, state: ServerConnections) -> None:
        self._serve = serve
        self._state = state
        self._h2 = H2Connection(_CONFIG)
        self._h2.local_settings = Settings(client=False, initial_values=_SETTINGS)
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: dict[int, _Answered] = {}  # whose clients still send
        self._allowance = float(_CONTROL_BURST)
        self._allowance_at = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._is_stopping = self._sent_goaway = self._lingers = False
        self.stays_open = False

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self.sender = Sender(self._h2, self.transport)
        self._stall_guard = StallGuard(self.transport)
        self._state.connections.add(cast(Any, self))
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW - self._h2.inbound_flow_control_window)
        self.sender.flush()
        self._await_request(HEAD_LIMIT_S)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; a protocol error ends this connection only."""
        if self.transport.is_closing():
            return
        try:
            for event in self._h2.receive_data(data):
                process = _PROCESS.get(event.__class__)
                if process is not None and not self.transport.is_closing():
                    process(self, event)
        except ProtocolError as error:
            log.debug("an HTTP/2 connection broke: %r", error)
            self._break()
        except Exception as error:
            log.warning("an HTTP/2 connection broke: %r", error)
            self._break()
        else:
            self.sender.send_waiting()
            self.sender.flush()

    def pause_writing(self) -> None:
        """Backpressure: while the client does not read, nothing is read that would need an answer."""
        self.sender.pause()
        self._stall_guard.paused()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._stall_guard.resumed()
        if not self.transport.is_closing():
            self.transport.resume_reading()
        self.sender.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall_guard.resumed()
        self._stop_idle()
        self._state.connections.discard(cast(Any, self))
        self._lose_streams()
        self.sender.resume()

    # Called by the server.

    def leave(self) -> None:
        """Send GOAWAY: the client makes later calls on other connections, those on the way included. Close once the
        calls here are answered and the client had time to close.
        """
        self._lingers = True
        self._send_goaway()
        self._loop.call_later(_GOAWAY_S, self._end_lingering)

    def shutdown(self) -> None:
        """Answer the open streams, take no more, close."""
        if not self._is_stopping and not self.transport.is_closing():
            self._is_stopping = True
            for stream in tuple(self._streams.values()):
                if stream.on_stopping is not None:
                    stream.on_stopping()
        self._send_goaway()
        self._end_lingering()

    # Called by streams.

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        try:
            self._h2.reset_stream(stream.number, code)
        except ProtocolError:  # the connection ends
            return
        self.sender.flush()

    def acknowledge(self, stream: Stream, size: int) -> None:
        if size and not self.transport.is_closing():
            try:
                self._h2.acknowledge_received_data(size, stream.number)
            except ProtocolError:  # the connection ends
                return
            self.sender.flush()

    # Receiving

    def _on_request(self, event: RequestReceived) -> None:
        stream = Stream(self, event.stream_id, cast(Headers, event.headers))
        if self._sent_goaway or len(self._tasks) >= MAX_STREAMS or len(self._state.tasks) >= MAX_TASKS:
            stream.reset(ErrorCodes.REFUSED_STREAM)
            self._count()
            return
        self._stop_idle()
        self._streams[stream.number] = stream
        task = self._loop.create_task(self._run(stream))
        stream.on_lost = task.cancel
        for tasks in (self._tasks, self._state.tasks):
            tasks.add(task)
        task.add_done_callback(partial(self._ended, stream))

    def _on_data(self, event: DataReceived) -> None:
        stream, size = self._streams.get(event.stream_id), event.flow_controlled_length or 0
        if stream is None or stream.is_lost:  # refused, or answered before its end
            self._h2.acknowledge_received_data(size, event.stream_id)
            self._discard(event.stream_id, size)
        else:
            stream.received.add(event.data or b"", size)
        if not event.data and event.stream_ended is None:
            self._count()

    def _on_end(self, event: StreamEnded) -> None:
        if (stream := self._streams.get(event.stream_id)) is not None:
            stream.received.end()
        self._forget(event.stream_id)

    def _on_reset(self, event: StreamReset) -> None:
        if (stream := self._streams.get(event.stream_id)) is not None:
            stream.lose()
        self._forget(event.stream_id)
        self._count()

    def _on_window(self, event: WindowUpdated) -> None:
        if event.stream_id and (stream := self._streams.get(event.stream_id)) is not None:
            self.sender.take_turn(stream)

    def _on_settings(self, event: RemoteSettingsChanged) -> None:
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            for stream in self._streams.values():
                self.sender.take_turn(stream)
            self._count(1 + len(self._streams) // _STREAMS_PER_CONTROL)
        else:
            self._count()

    def _on_goaway(self, event: ConnectionTerminated) -> None:
        self._break()  # h2 sends nothing on this connection any more

    def _on_control(self, event: Event) -> None:
        self._count()

    def _count(self, frames: int = 1) -> None:
        """Count control frames; close the connection of a client that sends too many."""
        now = self._loop.time()
        self._allowance += (now - self._allowance_at) * _CONTROL_PER_S
        self._allowance = min(self._allowance, _CONTROL_BURST) - frames
        self._allowance_at = now
        if self._allowance < 0 and not self.transport.is_closing():
            log.warning("a client flooded its HTTP/2 connection with control frames")
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._break()

    # The end of streams and of the connection

    async def _run(self, stream: Stream) -> None:
        try:
            await self._serve(stream)
        except StreamLost as lost:
            log.debug("a client left: %s", lost)

    def _ended(self, stream: Stream, task: asyncio.Task[None]) -> None:
        del self._streams[stream.number]
        self._tasks.discard(task)
        self._state.tasks.discard(task)
        self._state.total_requests += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed", exc_info=error)
        if stream.has_ended and not stream.received.has_ended and stream.discards_rest and not stream.is_lost:
            timer = self._loop.call_later(_DISCARD_S, self._discard, stream.number, _DISCARDED_BYTES + 1)
            self._answered[stream.number] = _Answered(stream, timer)
        else:
            stream.reset(ErrorCodes.NO_ERROR if stream.has_ended else ErrorCodes.INTERNAL_ERROR)
        self.acknowledge(stream, stream.received.unacknowledged())
        if self._sent_goaway:
            self._close_when_idle()
        elif not self._tasks and not self.stays_open and not self.transport.is_closing():
            self._await_request(KEEP_ALIVE_S)

    def _discard(self, number: int, size: int) -> None:
        """Count received bytes of an answered stream; reset one whose client sends too much."""
        answered = self._answered.get(number)
        if answered is not None:
            answered.left -= size
            if answered.left < 0:
                self._forget(number)
                answered.stream.reset(ErrorCodes.NO_ERROR)

    def _forget(self, number: int) -> None:
        if (answered := self._answered.pop(number, None)) is not None:
            answered.timer.cancel()

    def _await_request(self, limit_s: float) -> None:
        self._idle = self._loop.call_later(limit_s, self.leave)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _send_goaway(self) -> None:
        if not self._sent_goaway and not self.transport.is_closing():
            self._sent_goaway = True
            # The GOAWAY of h2 itself closes the connection at once.
            goaway = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
            self.transport.write(goaway.serialize())

    def _end_lingering(self) -> None:
        self._lingers = False
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._tasks and not self._lingers:
            self._close()

    def _break(self) -> None:
        self.sender.flush()
        self._close()
        self._lose_streams()

    def _close(self) -> None:
        if not self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self._stall_guard.paused()  # the close waits until the client has read what was sent
            self.transport.close()

    def _lose_streams(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.lose()
        for number in tuple(self._answered):
            self._forget(number)


_PROCESS: dict[type[Event], Callable[[Connection, Any], None]] = {
    RequestReceived: Connection._on_request,
    DataReceived: Connection._on_data,
    StreamEnded: Connection._on_end,
    StreamReset: Connection._on_reset,
    WindowUpdated: Connection._on_window,
    RemoteSettingsChanged: Connection._on_settings,
    ConnectionTerminated: Connection._on_goaway,
    **dict.fromkeys((PingReceived, PingAckReceived, SettingsAcknowledged), Connection._on_control),
    **dict.fromkeys((PriorityUpdated, UnknownFrameReceived), Connection._on_control),
}
