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
from h2.events import UnknownFrameReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame
from uvicorn.server import ServerState

from teimgr.errors import Unavailable
from teimgr.worker.grpc_port.rpc_stream import Headers, ReceiveBuffer, RpcStream

log = logging.getLogger(__name__)
# At lower levels hpack logs every header, API keys included, and grpclib a traceback per client error.
logging.getLogger("hpack").setLevel(logging.WARNING)
logging.getLogger("grpclib").setLevel(logging.WARNING)

MAX_STREAMS = 1024
_CONFIG = Configuration(
    # Bytes that clients may send before they are read: fewer per stream, so that a stalled one does not block the rest.
    http2_stream_window_size=1 << 20,
    http2_connection_window_size=1 << 22,
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

    def __init__(self, serve: Serve, max_message_bytes: int, server_state: ServerState) -> None:
        super().__init__(self, _CONFIG, _H2_CONFIG)
        self._serve = serve
        self._max_message_bytes = max_message_bytes
        self._server_state = server_state
        self._calls: dict[Stream, tuple[RpcStream, asyncio.Task[None]]] = {}
        self._stopping: Unavailable | None = None
        self._sent_goaway = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server_state.connections.add(cast(Any, self))
        self._h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS})
        self.processor.processors[UnknownFrameReceived] = lambda event: None  # HTTP/2 requires to ignore them
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        """Process received bytes; a protocol error closes this connection only."""
        try:
            super().data_received(data)
        except Exception as error:
            log.warning("an HTTP/2 connection broke: %r", error)
            self.processor.close("broken")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server_state.connections.discard(cast(Any, self))
        super().connection_lost(exc)

    def leave(self) -> None:
        """Send GOAWAY, so that new calls go to other connections; close once the calls here are answered."""
        if not self._sent_goaway and not self.connection.is_closing():
            self._sent_goaway = True
            # The GOAWAY of h2 itself closes the connection at once.
            goaway = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
            self._transport.write(goaway.serialize())
        self._close_when_idle()

    def shutdown(self) -> None:
        """Finish the calls with the messages received so far, take no more, close."""
        if self._stopping is None and not self.connection.is_closing():
            self._stopping = Unavailable("the instance is stopping")
            for rpc_stream, _ in self._calls.values():
                rpc_stream.stop(self._stopping)
        self.leave()

    # Called by grpclib.

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        assert stream.id is not None
        buffer = ReceiveBuffer(partial(self.connection.ack, stream.id))
        stream.buffer = cast(Any, buffer)
        rpc_stream = RpcStream(stream, buffer, headers, self._max_message_bytes)
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
        if not self._calls and not self.connection.is_closing():
            self._transport.close()
