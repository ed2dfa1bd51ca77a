"""One HTTP/2 connection of the instance port: grpclib's protocol with bounds, GOAWAY and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from grpclib.config import Configuration
from grpclib.protocol import AbstractHandler, H2Protocol, Stream
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    StreamReset,
    UnknownFrameReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame
from uvicorn.server import ServerState

from teimgr.byte_budget import ByteBudget
from teimgr.errors import Unavailable
from teimgr.http_protocol import StallGuard
from teimgr.worker.grpc_port.rpc_stream import Headers, ReceiveBuffer, RpcStream

log = logging.getLogger(__name__)
# At lower levels hpack logs every header, API keys included, and grpclib a traceback per client error.
logging.getLogger("hpack").setLevel(logging.WARNING)
logging.getLogger("grpclib").setLevel(logging.WARNING)

MAX_STREAMS = 1024
# Open RPCs of all connections: each takes some kilobytes before its first message. More are refused unprocessed.
MAX_RPCS = 8192
# A connection may hold this part of the port's budget for messages received and replies not read.
_CONNECTION_SHARE = 4
# Control frames (PING, SETTINGS, RST_STREAM, PRIORITY, empty DATA, unknown ones) that a connection may send at once,
# and per second after that. Each costs an acknowledgement or a task; a client that cancels calls sends one for each.
_CONTROL_BURST = 2000
_CONTROL_PER_S = 500.0
# After GOAWAY a client closes; the server does so only after this time, as data that arrives at a closed connection
# makes the kernel reset it, and the client might lose the GOAWAY, by which it knows that calls can be made again.
_GOAWAY_S = 1.0
_CONFIG = Configuration(
    # Bytes that clients may send before they are read and charged: fewer per stream, so that a stalled one does not
    # block the rest.
    http2_stream_window_size=1 << 18,
    http2_connection_window_size=1 << 20,
).__for_server__()
_H2_CONFIG = H2Configuration(
    client_side=False,
    header_encoding="latin-1",  # never fails; the names and values used here are ASCII
    validate_inbound_headers=False,  # RpcStream checks what a call needs
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)

Serve = Callable[[RpcStream], Awaitable[None]]


class Connection(H2Protocol, AbstractHandler):
    """One connection; `serve` runs as a task per RPC, cancelled when the client resets it.

    It registers with the HTTP server on the same port (`server_state`), which calls `shutdown` at its end and then
    cancels tasks that take too long.
    """

    def __init__(self, serve: Serve, max_message_bytes: int, budget: ByteBudget, server_state: ServerState) -> None:
        super().__init__(self, _CONFIG, _H2_CONFIG)
        self._budget = ByteBudget(budget.limit_bytes // _CONNECTION_SHARE, budget)
        self._allowance = float(_CONTROL_BURST)
        self._allowance_at = 0.0
        self._serve = serve
        self._max_message_bytes = max_message_bytes
        self._server_state = server_state
        self._calls: dict[Stream, tuple[RpcStream, asyncio.Task[None]]] = {}
        self._stopping: Unavailable | None = None
        self._sent_goaway = False
        self._lingers = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server_state.connections.add(cast(Any, self))
        self._h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS})
        self._stall_guard = StallGuard(self._transport)
        processors: dict[Any, Any] = self.processor.processors
        processors[UnknownFrameReceived] = lambda event: None  # HTTP/2 requires to ignore them
        for kind in (PingReceived, RemoteSettingsChanged, StreamReset, PriorityUpdated, UnknownFrameReceived):
            processors[kind] = partial(self._control_frame, processors[kind])
        processors[DataReceived] = partial(self._data_frame, processors[DataReceived])
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        """Process received bytes; a protocol error closes this connection only."""
        try:
            super().data_received(data)
        except Exception as error:
            log.warning("an HTTP/2 connection broke: %r", error)
            self.processor.close("broken")

    def pause_writing(self) -> None:
        """Backpressure: while the client does not read, nothing is read that would need an answer."""
        super().pause_writing()
        self._stall_guard.paused()
        if not self.connection.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_guard.resumed()
        if not self.connection.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stall_guard.resumed()
        self._server_state.connections.discard(cast(Any, self))
        super().connection_lost(exc)

    def leave(self) -> None:
        """Send GOAWAY: the client makes later calls on other connections, those on the way included. Close once the
        calls here are answered and the client had time to close.
        """
        self._lingers = True
        self._send_goaway()
        asyncio.get_running_loop().call_later(_GOAWAY_S, self._end_lingering)

    def _send_goaway(self) -> None:
        if not self._sent_goaway and not self.connection.is_closing():
            self._sent_goaway = True
            # The GOAWAY of h2 itself closes the connection at once.
            goaway = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
            self._transport.write(goaway.serialize())

    def _end_lingering(self) -> None:
        self._lingers = False
        self._close_when_idle()

    def shutdown(self) -> None:
        """Finish the calls with the messages received so far, take no more, close."""
        if self._stopping is None and not self.connection.is_closing():
            self._stopping = Unavailable("the instance is stopping")
            for rpc_stream, _ in self._calls.values():
                rpc_stream.stop(self._stopping)
        self._send_goaway()
        self._end_lingering()

    # Called by grpclib.

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        assert stream.id is not None
        if len(self._server_state.tasks) >= MAX_RPCS:
            stream.reset_nowait(ErrorCodes.REFUSED_STREAM)
            release_stream()
            return
        buffer = ReceiveBuffer(partial(self.connection.ack, stream.id))
        stream.buffer = cast(Any, buffer)
        rpc_stream = RpcStream(stream, buffer, headers, self._max_message_bytes, self._budget)
        if self._sent_goaway:  # the client has not seen it yet, and will ignore this reply
            rpc_stream.stop(self._stopping or Unavailable("the connection is ending"))
        task = asyncio.get_running_loop().create_task(self._run(rpc_stream))
        self._calls[stream] = rpc_stream, task
        self._server_state.tasks.add(task)
        task.add_done_callback(partial(self._ended, stream, release_stream))

    def cancel(self, stream: Stream) -> None:
        if stream in self._calls:
            self._calls[stream][1].cancel()

    def close(self) -> None:
        for _, task in self._calls.values():
            task.cancel()

    def _control_frame(self, process: Callable[[Any], None], event: Any) -> None:
        """Process a control frame, or close the connection that sends too many."""
        now = asyncio.get_running_loop().time()
        self._allowance += (now - self._allowance_at) * _CONTROL_PER_S
        self._allowance = min(self._allowance, _CONTROL_BURST) - 1
        self._allowance_at = now
        if self._allowance >= 0:
            process(event)
        elif not self.connection.is_closing():
            log.warning("a client flooded its HTTP/2 connection with control frames")
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self.connection.flush()
            self._stall_guard.paused()  # the close waits until the client has read what was sent
            self.processor.close("flooded")

    def _data_frame(self, process: Callable[[Any], None], event: DataReceived) -> None:
        if event.data or event.stream_ended is not None:
            process(event)
        else:
            self._control_frame(process, event)

    @property
    def _h2(self) -> Any:
        return self.connection._connection

    @property
    def _transport(self) -> asyncio.Transport:
        return self.connection._transport

    async def _run(self, rpc_stream: RpcStream) -> None:
        try:
            await self._serve(rpc_stream)
        except ProtocolError as error:  # the stream or the connection ended while something was sent
            log.debug("a client left: %r", error)

    def _ended(self, stream: Stream, release_stream: Callable[[], Any], task: asyncio.Task[None]) -> None:
        del self._calls[stream]
        self._server_state.tasks.discard(task)
        release_stream()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call failed", exc_info=error)
        if self._sent_goaway:
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._calls and not self._lingers and not self.connection.is_closing():
            self._transport.close()
