"""One HTTP/2 connection of the instance port: grpclib's protocol, with bounds, and an end that lets calls finish."""

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
# Below this, one writes down every header, API keys among them, and the other a traceback for each client that errs.
logging.getLogger("hpack").setLevel(logging.WARNING)
logging.getLogger("grpclib").setLevel(logging.WARNING)

MAX_STREAMS = 1024
_CONFIG = Configuration(
    # What clients may send before it is read: little on a stream, so that one nobody reads does not stop the others.
    http2_stream_window_size=1 << 20,
    http2_connection_window_size=1 << 22,
).__for_server__()
_H2_CONFIG = H2Configuration(
    client_side=False,
    header_encoding="latin-1",  # never fails; names and values that matter are ASCII
    validate_inbound_headers=False,  # what a call needs is looked at by its exchange
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)

Serve = Callable[[RpcStream], Awaitable[None]]


class Connection(H2Protocol, AbstractHandler):
    """One connection; `serve` is run as a task for each RPC, and cancelled when the client gives it up.

    It enters and leaves the books of the HTTP server it shares the port with, which calls `shutdown` when it ends and
    cancels what has not ended in time.
    """

    def __init__(self, serve: Serve, max_message_bytes: int, books: ServerState) -> None:
        super().__init__(self, _CONFIG, _H2_CONFIG)
        self._serve = serve
        self._max_message_bytes = max_message_bytes
        self._books = books
        self._calls: dict[Stream, tuple[RpcStream, asyncio.Task[None]]] = {}
        self._stopping: Unavailable | None = None
        self._said_goaway = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say the limits."""
        super().connection_made(transport)
        self._books.connections.add(cast(Any, self))
        self._h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS})
        self.processor.processors[UnknownFrameReceived] = lambda event: None  # HTTP/2 has them ignored
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        """Take what came; a client that breaks the protocol loses its connection, and nobody else notices."""
        try:
            super().data_received(data)
        except Exception as error:
            log.warning("an HTTP/2 connection broke: %r", error)
            self.processor.close("broken")

    def connection_lost(self, exc: BaseException | None) -> None:
        """Every call on it was given up."""
        self._books.connections.discard(cast(Any, self))
        super().connection_lost(exc)

    def leave(self) -> None:
        """Take no more calls: the client asks them elsewhere. Those that were asked go on, then the connection ends."""
        if not self._said_goaway and not self.connection.is_closing():
            self._said_goaway = True
            # h2 has only a GOAWAY that ends the connection with it.
            goaway = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
            self._transport.write(goaway.serialize())
        self._close_when_idle()

    def shutdown(self) -> None:
        """Finish what has come of the calls, take no more, close."""
        if self._stopping is None and not self.connection.is_closing():
            self._stopping = Unavailable("the instance is stopping")
            for exchange, _ in self._calls.values():
                exchange.stop(self._stopping)
        self.leave()

    # What grpclib calls.

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        """A new RPC."""
        assert stream.id is not None
        buffer = ReceiveBuffer(partial(self.connection.ack, stream.id))
        stream.buffer = cast(Any, buffer)
        exchange = RpcStream(stream, buffer, headers, self._max_message_bytes)
        if self._said_goaway:  # the client has not read it yet, and will not look at this answer
            exchange.stop(self._stopping or Unavailable("the connection is ending"))
        task = asyncio.get_running_loop().create_task(self._run(exchange))
        self._calls[stream] = exchange, task
        self._books.tasks.add(task)
        task.add_done_callback(partial(self._ended, stream, release_stream))

    def cancel(self, stream: Stream) -> None:
        """The client gave an RPC up."""
        if stream in self._calls:
            self._calls[stream][1].cancel()

    def close(self) -> None:
        """The connection is gone."""
        for _, task in self._calls.values():
            task.cancel()

    @property
    def _h2(self) -> Any:
        return self.connection._connection

    @property
    def _transport(self) -> asyncio.Transport:
        return self.connection._transport

    async def _run(self, exchange: RpcStream) -> None:
        try:
            await self._serve(exchange)
        except ProtocolError as error:  # the stream or the connection ended while something was sent
            log.debug("a client left: %r", error)

    def _ended(self, stream: Stream, release_stream: Callable[[], Any], task: asyncio.Task[None]) -> None:
        del self._calls[stream]
        self._books.tasks.discard(task)
        release_stream()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call failed", exc_info=error)
        if self._said_goaway:
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._calls and not self.connection.is_closing():
            self._transport.close()
