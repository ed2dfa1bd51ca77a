"""One HTTP/2 connection of a server: streams, flow control, limits on the cost of a client, GOAWAY.

Protocol: RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, NamedTuple, cast

from teimgr.http.byte_budget import ByteBudget
from teimgr.http.connection_gate import LIMITS, MIN_READ_BYTES, ConnectionGate, Phase, StallGuard, Ticket
from teimgr.http.http1 import ListenerState
from teimgr.http.http2.frame_reader import ConnectionBroken, ErrorCode, Payload
from teimgr.http.http2.framing import Framing
from teimgr.http.http2.headers import Headers, InvalidHead, RequestHead, read_head
from teimgr.http.http2.stream import Sender, Stalled, Stream, StreamLost
from teimgr.http.turns import LoopTurns

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
# Limit of stream tasks of all connections; one caller may have half of them. Further streams are refused.
MAX_TASKS = 8192
_CALLERS_SHARE = 2
# Receive windows in bytes.
_STREAM_WINDOW = 1 << 18
_CONNECTION_WINDOW = 1 << 20
# If unread streams hold half of the connection's window, the window grows so that they cannot block other streams.
# Limit of the process, and the largest share of one connection (a quarter).
_AHEAD = ByteBudget(64 * 2**20)
_AHEAD_SHARE = 4
# Rate limit of control frames and of refused or malformed requests per connection, since each costs a reply or a task.
# Control frames are PING, SETTINGS, RST_STREAM, PRIORITY, CONTINUATION, excess WINDOW_UPDATE, empty DATA and unknown
# ones. A change of the initial window costs more, since it affects every stream.
_CONTROL_BURST = 2000
_CONTROL_PER_S = 500.0
_STREAMS_PER_CONTROL = 64
# Limit for a frame or a header block to end or to grow by `MIN_READ_BYTES`.
_FRAME_S = LIMITS[Phase.HEAD].seconds
# Time without a stream after which a connection that `stays_open` is closed, despite PINGs. One that never had a stream
# is closed after the limit of `Phase.IDLE`.
_UNUSED_S = 900.0
# After GOAWAY the client should close. The server closes later, since the kernel resets a closed connection that
# receives data, and the client could lose the GOAWAY, without which it cannot retry its calls.
_GOAWAY_S = 1.0
# An answered client may send the rest of its request within these limits; then its stream is reset. Some clients, such
# as curl before 8.7, lose the response if the stream is reset.
_DISCARD_S = LIMITS[Phase.DISCARD].seconds
_DISCARDED_BYTES = cast(int, LIMITS[Phase.DISCARD].bytes)

_AGE_SPREAD = 0.1  # random part of an age, so that connections opened together do not end together

_MALFORMED: Headers = ((b":status", b"400"), (b"content-type", b"text/plain; charset=utf-8"))

Serve = Callable[[Stream], Coroutine[Any, Any, None]]
"""Serves one stream; runs as a task, cancelled when the stream is lost, unless it sets `Stream.on_lost`."""


class MaxAge(NamedTuple):
    """A connection gets GOAWAY after `seconds`; calls still open `grace_s` later are aborted."""

    seconds: float
    grace_s: float


class _Answered:
    """A stream answered before the end of its request: the bytes that may still arrive, and their time limit."""

    __slots__ = ("left", "stream", "timer")

    def __init__(self, stream: Stream, timer: asyncio.TimerHandle) -> None:
        self.stream = stream
        self.timer = timer
        self.left = _DISCARDED_BYTES


class Connection(asyncio.Protocol):
    """One connection. The server calls `shutdown` at its end and cancels tasks that take longer.

    A malformed request is answered 400 without `serve`, and its stream is reset. An idle connection is closed with
    GOAWAY, later if it `stays_open` and has had a stream. `ticket` counts the connection. With a `max_age` clients
    reconnect regularly, so they reach other servers behind the same name.

    Received bytes are processed in parts within the turns of `LoopTurns`.
    """

    _turns = LoopTurns()  # shared by all connections

    def __init__(
        self,
        serve: Serve,
        state: ListenerState,
        ticket: Ticket | None = None,
        *,
        stays_open: bool = False,
        max_age: MaxAge | None = None,
    ) -> None:
        self._serve = serve
        self._state = state
        self._framing = Framing(
            self, max_streams=MAX_STREAMS, stream_window=_STREAM_WINDOW, connection_window=_CONNECTION_WINDOW
        )
        self._streams: dict[int, Stream] = {}
        self._known_headers: Headers | None = None  # of the last request
        self._known_head: RequestHead
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: dict[int, _Answered] = {}
        self._ahead = ByteBudget(_AHEAD.limit_bytes // _AHEAD_SHARE, _AHEAD)
        self._allowance = float(_CONTROL_BURST)
        self._allowance_at = 0.0
        self._ticket = ticket
        self.caller: Hashable = ticket.network if ticket else ""  # shares turns with the caller's other connections
        self._idle_since: float | None = None  # set after its first stream
        self._frame_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._is_behind = self._is_full = False  # bytes wait to be processed; the client does not read
        self._is_reading = True
        self._has_settings = False
        self._is_stopping = self._sent_goaway = self._lingers = False
        self.stays_open = stays_open
        self._max_age = max_age
        self._age_timer: asyncio.TimerHandle | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self.sender = Sender(self._framing, self.transport)
        self._stall_guard = StallGuard(self.transport)
        ticket = self._ticket = self._ticket or ConnectionGate(1).admit("")
        assert ticket is not None
        if not ticket.hand_to(self) or self._state.has_ended:
            self.transport.abort()
            return
        self._state.connections.add(cast(Any, self))
        self.sender.flush()
        ticket.enter(Phase.HEAD)
        if self._max_age is not None:
            spread = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)
            self._age_timer = self._loop.call_later(self._max_age.seconds * spread, self._retire, self._max_age.grace_s)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; a protocol error ends this connection only."""
        self._received_bytes += len(data)
        if self._is_behind:
            self._framing.receive(data, 0)
            self._read_or_pause()
        else:
            self._is_behind = self._process(data) > 0
            if self._is_behind:
                self._turns.wait(self.caller, self._catch_up)

    def _process(self, data: bytes = b"") -> int:
        """Process received bytes as far as this turn of the event loop allows; return the units that the next frame
        needs, or 0."""
        if self.transport.is_closing():
            return 0
        units = self._turns.units
        try:
            left = self._framing.receive(data, units)
        except ConnectionBroken as error:
            self._break(error)
        except Exception as error:
            log.warning("HTTP/2 connection failed: %r", error)
            self._break()
        else:
            self._turns.spend(units - left)
            self.sender.send_waiting()
            self.sender.write()  # replies to control frames, so that a client that does not read is throttled
            framing, ticket = self._framing, cast(Ticket, self._ticket)
            is_inside = framing.is_inside
            if is_inside and self._frame_timer is None:
                self._await_frame()
            if not framing.needed_units and (held := framing.held_bytes if is_inside else 0) != ticket.held:
                ticket.hold(held)
            return framing.needed_units
        return 0

    def _catch_up(self) -> int:
        if self._is_full:
            return 0  # until `resume_writing`
        needed = self._process()
        self._is_behind = needed > 0
        self._read_or_pause()
        return needed

    def _read_or_pause(self) -> None:
        """Read from the client, unless it does not read or received bytes are still processed."""
        reads = not (self._is_full or self._is_behind)
        if reads != self._is_reading and not self.transport.is_closing():
            self._is_reading = reads
            if reads:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _await_frame(self) -> None:
        progress = self._framing.frames, self._received_bytes
        self._frame_timer = self._loop.call_later(_FRAME_S, self._check_frame, *progress)

    def _check_frame(self, frames: int, received_bytes: int) -> None:
        """End the connection of a client that leaves a frame unfinished."""
        self._frame_timer = None
        if not self._framing.is_inside or self.transport.is_closing():
            return
        is_slow = self._framing.frames == frames and self._received_bytes - received_bytes < MIN_READ_BYTES
        if is_slow and self._is_reading:
            self._break(ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"a frame did not end within {_FRAME_S:g} s"))
        else:
            self._await_frame()

    def pause_writing(self) -> None:
        """Backpressure: while the client does not read, nothing is read that would need an answer."""
        self.sender.pause()
        self._stall_guard.paused()
        self._is_full = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        self._stall_guard.resumed()
        self._is_full = False
        if self._is_behind:
            self._turns.wait(self.caller, self._catch_up)
        self._read_or_pause()
        self.sender.resume()

    def eof_received(self) -> bool:
        return self._ticket is not None and self._ticket.keeps_open(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ticket is None or not self._ticket.ends_later(self._lost):
            self._lost()

    def _lost(self) -> None:
        self.closed.set_result(None)
        self._stall_guard.resumed()
        if self._frame_timer is not None:
            self._frame_timer.cancel()
        if self._age_timer is not None:
            self._age_timer.cancel()
        if self._ticket is not None:
            self._ticket.leave()
        self._state.connections.discard(cast(Any, self))
        self._lose_streams()
        self.sender.resume()
        self._framing.forget_receiver()

    # Called by the gate.

    def on_expired(self, phase: Phase) -> None:
        if self._ticket is None or self.transport.is_closing():
            return
        if phase is Phase.ANSWER and not self._tasks and not self._sent_goaway:
            self._ticket.enter(Phase.IDLE)
        elif phase is Phase.ANSWER or (phase is Phase.IDLE and self._is_kept()):
            self._ticket.renew()
        else:
            self.leave()

    def _is_kept(self) -> bool:
        """True if it stays open and had a stream recently."""
        if not self.stays_open or self._idle_since is None:
            return False
        return self._loop.time() - self._idle_since < _UNUSED_S

    def on_displaced(self) -> None:
        self.transport.abort()

    # Called by the server.

    def leave(self) -> None:
        """Send GOAWAY: the client makes later calls on other connections, including calls on the way. Close once the
        calls here are answered and the client had time to close."""
        self._say_goodbye()
        for stream in tuple(self._streams.values()):
            if stream.on_leaving is not None:
                stream.on_leaving()

    def _retire(self, grace_s: float) -> None:
        """Like `leave`, at the maximum age of the connection, but streams that pause have the grace too."""
        self._say_goodbye()
        self._age_timer = self._loop.call_later(grace_s, self._cut_off)

    def _cut_off(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        self.shutdown()

    def _say_goodbye(self) -> None:
        self._lingers = True
        self._send_goaway()
        self._loop.call_later(_GOAWAY_S, self._end_lingering)

    def shutdown(self) -> None:
        """Answer the open streams, accept no more, close."""
        if not self._is_stopping and not self.transport.is_closing():
            self._is_stopping = True
            for stream in tuple(self._streams.values()):
                if stream.on_stopping is not None:
                    stream.on_stopping()
        self._send_goaway()
        self._end_lingering()

    # Called by streams.

    def belongs_to(self, caller: str) -> None:
        """Share turns of the loop with the other connections of this caller instead of those of its address."""
        self.caller = ("key", caller)

    def keep_open(self) -> None:
        """Allow the connection to be idle for long."""
        self.stays_open = True

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        self._framing.reset(stream.number, code)
        self.sender.flush()

    def acknowledge(self, stream: Stream, size: int) -> None:
        if not size:
            return
        if ahead := stream.read_ahead(size):
            self._ahead.give_back(ahead)
        if not self.transport.is_closing():
            self._framing.acknowledge(stream.number, size)
            self._framing.open_window(size - ahead)
            self.sender.flush()

    # Called by the framing.

    def on_request(self, number: int, headers: Headers) -> bool:
        if self._sent_goaway or len(self._tasks) >= MAX_STREAMS or not self._has_room():
            return False
        self._enter(Phase.ANSWER)
        try:
            stream = Stream(self, number, headers, self._head_of(headers))
            serving = self._run(stream)
        except InvalidHead as error:
            self._count()
            stream = Stream(self, number, headers, None)
            serving = self._refuse(stream, error)
        self._streams[number] = stream
        task = self._loop.create_task(serving)
        stream.call_when(lost=task.cancel)
        self._tasks.add(task)
        self._state.tasks.add(task)
        self._state.tasks_of[self.caller] += 1
        task.add_done_callback(partial(self._ended, stream, self.caller))
        return True

    def _has_room(self) -> bool:
        """True if the process, and this connection's caller, may have one more task."""
        of_caller = self._state.tasks_of[self.caller]
        return len(self._state.tasks) < MAX_TASKS and of_caller < max(1, MAX_TASKS // _CALLERS_SHARE)

    def _head_of(self, headers: Headers) -> RequestHead:
        """Like `read_head`, which is skipped for most requests of a client: the decoder's cache has their headers."""
        if headers is not self._known_headers:
            self._known_head, self._known_headers = read_head(headers), headers
        return self._known_head

    def on_data(self, number: int, data: Payload) -> None:
        stream, size = self._streams.get(number), len(data)
        if stream is None or stream.is_lost:  # answered before the end of its request
            self._framing.acknowledge(number, size)
            self._framing.open_window(size)
            self._discard(number, size)
        else:
            stream.receive(data)
            if stream.is_malformed:
                self._framing.break_stream(number, ErrorCode.PROTOCOL_ERROR)
            if self._framing.receive_window < _CONNECTION_WINDOW // 2 and self._ahead.try_take(size):
                stream.open_ahead(size)
                self._framing.open_window(size)

    def on_end(self, number: int) -> None:
        if (stream := self._streams.get(number)) is not None:
            stream.received.end()
            if stream.is_malformed:
                self._framing.break_stream(number, ErrorCode.PROTOCOL_ERROR)
        self._forget(number)

    def on_reset(self, number: int) -> None:
        if (stream := self._streams.get(number)) is not None:
            stream.lose()
        self._forget(number)

    def on_window(self, number: int) -> None:
        if number and (stream := self._streams.get(number)) is not None:
            self.sender.take_turn(stream)

    def on_settings(self, changes_windows: bool) -> None:
        if self._state.is_leaving and not self._sent_goaway:  # the server left during its handshake
            self.leave()
        if self.stays_open and not self._has_settings and not self._tasks:
            self._enter(Phase.IDLE)
        self._has_settings = True
        if changes_windows:
            for stream in self._streams.values():
                self.sender.take_turn(stream)
            self._count(1 + len(self._streams) // _STREAMS_PER_CONTROL)
        else:
            self._count()

    def on_goaway(self, code: int) -> None:
        """Answer the open streams; the client opens no more."""
        if code:
            raise ConnectionBroken(ErrorCode.NO_ERROR, "the client reported an error")
        self._send_goaway()
        self._close_when_idle()

    def on_control(self, count: int = 1) -> None:
        self._count(count)

    def _count(self, frames: int = 1) -> None:
        """Count control frames; break the connection of a client that sends too many."""
        now = self._loop.time()
        self._allowance += (now - self._allowance_at) * _CONTROL_PER_S
        self._allowance = min(self._allowance, _CONTROL_BURST) - frames
        self._allowance_at = now
        if self._allowance < 0 and not self.transport.is_closing():
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")

    # The end of streams and of the connection

    async def _run(self, stream: Stream) -> None:
        try:
            await self._serve(stream)
        except StreamLost as lost:
            log.debug("a client left: %s", lost)

    async def _refuse(self, stream: Stream, error: InvalidHead) -> None:
        """Answer a malformed request (RFC 9113, section 8.1.1)."""
        text = f"Invalid HTTP request received: {error}".encode()
        try:
            await stream.send_headers([*_MALFORMED, (b"content-length", b"%d" % len(text))])
            await stream.send_data(text, end=True)
        except (StreamLost, Stalled) as lost:
            log.debug("a client left: %s", lost)
        self._framing.refuse(stream.number, ErrorCode.PROTOCOL_ERROR)
        self.sender.flush()

    def _ended(self, stream: Stream, caller: Hashable, task: asyncio.Task[None]) -> None:
        del self._streams[stream.number]
        self._tasks.discard(task)
        self._state.tasks.discard(task)
        self._state.tasks_of[caller] -= 1
        if not self._state.tasks_of[caller]:
            del self._state.tasks_of[caller]
        self._state.total_requests += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed", exc_info=error)
        if stream.has_ended and not stream.received.has_ended and stream.discards_rest and not stream.is_lost:
            timer = self._loop.call_later(_DISCARD_S, self._discard, stream.number, _DISCARDED_BYTES + 1)
            self._answered[stream.number] = _Answered(stream, timer)
        elif not (self._is_stopping and task.cancelled()):  # otherwise the connection ends
            stream.reset(ErrorCode.NO_ERROR if stream.has_ended else ErrorCode.INTERNAL_ERROR)
        self.acknowledge(stream, stream.received.unacknowledged())
        stream.forget_callbacks()
        if self._sent_goaway:
            self._close_when_idle()
        elif not self._tasks and not self.transport.is_closing():
            self._idle_since = self._loop.time()
            if not self.stays_open:  # otherwise the gate's next check makes it idle
                self._enter(Phase.IDLE)

    def _discard(self, number: int, size: int) -> None:
        """Count received bytes of an answered stream; reset one whose client sends too much."""
        answered = self._answered.get(number)
        if answered is not None:
            answered.left -= size
            if answered.left < 0:
                self._forget(number)
                answered.stream.reset(ErrorCode.NO_ERROR)

    def _forget(self, number: int) -> None:
        if (answered := self._answered.pop(number, None)) is not None:
            answered.timer.cancel()

    def _enter(self, phase: Phase) -> None:
        if self._ticket is not None:
            self._ticket.enter(phase)

    def _send_goaway(self) -> None:
        if not self._sent_goaway and not self.transport.is_closing():
            self._sent_goaway = True
            self._framing.goaway(ErrorCode.NO_ERROR)
            self.sender.flush()

    def _end_lingering(self) -> None:
        self._lingers = False
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._tasks and not self._lingers:
            self._close()

    def _break(self, error: ConnectionBroken | None = None) -> None:
        if error is not None:
            level = logging.WARNING if error.code is ErrorCode.ENHANCE_YOUR_CALM else logging.DEBUG
            log.log(level, "HTTP/2 connection failed: %s", error)
            self._framing.goaway(error.code)
        self._close()
        self._lose_streams()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.sender.write()
            if self.transport.get_write_buffer_size():
                self._stall_guard.paused()  # the close waits until the client has read everything
            self.transport.close()

    def _lose_streams(self) -> None:
        ends_later = None if self._ticket is None else self._ticket.ends_later
        for stream in tuple(self._streams.values()):
            stream.lose(ends_later)
        for number in tuple(self._answered):
            self._forget(number)
