"""HTTP servers on uvicorn: binding, serving HTTP/1 and HTTP/2 on one port, bounds on connections and heads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from teimgr.errors import InvalidConfig, PortConflict
from teimgr.observability.memory import max_connections

_CLOSE_GRACE_S = 5
# A kept connection without requests is closed after this time. Longer than clients keep theirs (aiohttp 15 s, Java
# 30 s, AWS's load balancer 60 s, Go 90 s): a server that closes first may do so in the moment in which the client sends
# a request, and few clients repeat a POST.
KEEP_ALIVE_S = 120.0
_FLUSH_POLL_S = 0.01

# The beginning of HTTP/2's connection preface (prior knowledge), as far as no HTTP/1 request can have it.
_H2_PREFACE = b"PRI * HTTP/2.0"
_FIRST_BYTES_S = 20.0
# From the connection, or the first byte of a further request, to the end of its head. No client needs a second.
HEAD_LIMIT_S = 20.0
_MAX_HEAD_BYTES = 256 * 2**10
_CONNECTION_CLOSE = (b"connection", b"close")
# A client that reads less than this in this time, while its connection's write buffer is full, is cut off.
STALL_S = 30.0
LEAST_READ_BYTES = 16 * 1024
_FRAMING = (b"content-length", b"transfer-encoding")

AsgiApp = Callable[..., Any]


class H2Connection(Protocol):
    """The methods of an HTTP/2 connection that the server calls, beside asyncio's."""

    def leave(self) -> None:
        """Send GOAWAY, so that the client opens another connection for its next call."""

    def shutdown(self) -> None:
        """Close, as the server ends."""


# Gets a connection between two requests, which another process is to serve.
PassOn = Callable[[socket.socket], None]
# Makes the protocol of a new connection; uvicorn's state lists the server's connections and tasks.
H2Factory = Callable[[ServerState], asyncio.Protocol]


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening yet.

    Raises:
        PortConflict: the address is in use.
        InvalidConfig: it is no address of this host.
    """
    # With the protocol named, asyncio sets TCP_NODELAY on accepted connections, as uvloop always does.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortConflict(port, "another process") from error
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class Listener:
    """A running server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def secure(self, context: ssl.SSLContext) -> None:
        """Use `context` for new connections; open ones keep theirs.

        Starts a new asyncio server on the same listening socket: authorities can only be added to a context in use, and
        clients would resume sessions that the former ones admitted. uvloop loses no connection by it; asyncio's own
        loop may lose one that it accepts in that moment.
        """
        server, config = self._server, self._server.config
        kind: Any = config.http_protocol_class
        protocol = partial(kind, config=config, server_state=server.server_state, app_state=server.lifespan.state)
        loop = asyncio.get_running_loop()
        former, present = server.servers, []
        try:
            for sock in [sock for each in former for sock in each.sockets]:
                copy = sock.dup()
                try:
                    present.append(await loop.create_server(protocol, sock=copy, ssl=context, backlog=config.backlog))
                except BaseException:
                    copy.close()
                    raise
        except BaseException:  # such as a lack of descriptors: the former servers go on
            for each in present:
                each.close()
            raise
        server.servers = present
        for each in former:
            each.close()

    async def take(self, sock: socket.socket) -> None:
        """Serve a connection that another process passed on."""
        server, config = self._server, self._server.config
        kind: Any = config.http_protocol_class
        protocol = kind(config=config, server_state=server.server_state, app_state=server.lifespan.state)
        protocol.silence_s = KEEP_ALIVE_S
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)

    def leave(self, pass_on: PassOn | None = None) -> None:
        """Stop accepting, and leave the address to the processes that share the socket.

        HTTP/1: every open connection ends with its next response, which carries `connection: close`, so that a client
        is not cut off between two requests. With `pass_on` a connection without an unanswered request goes to that at
        once, and every other one when it has none: no request that comes later is answered here.
        HTTP/2: GOAWAY; calls that the client began later are not answered, and the client makes them elsewhere.
        """
        for server in self._server.servers:
            server.close()
        state = self._server.server_state
        self._server.config.encoded_headers.append(_CONNECTION_CLOSE)  # uvicorn's source of the next second's list
        state.default_headers.append(_CONNECTION_CLOSE)  # the current list, held by requests in flight
        state.pass_on = pass_on
        for connection in tuple(state.connections):
            if isinstance(connection, HttpProtocol | ProtocolSniffer):
                connection.pass_on()
            else:
                cast(H2Connection, connection).leave()


@contextlib.asynccontextmanager
async def serving(
    app: AsgiApp, sock: socket.socket, h2: H2Factory | None = None, **tls: Any
) -> AsyncIterator[Listener]:
    """Serve `app` on `sock` while the body runs; requests in flight are answered before it ends. Closes the socket.

    The body starts once the server listens. `h2` makes the protocol of a connection that begins with HTTP/2's preface;
    without it HTTP/2 is not served. `tls` are arguments of uvicorn (`rest/app.py`).

    Raises:
        PortConflict: another process began to listen on the address since it was bound.
        OSError: a file of `tls` cannot be used.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
        timeout_keep_alive=cast(int, KEEP_ALIVE_S),
        **({"http": HttpProtocol if h2 is None else partial(ProtocolSniffer, h2)} | tls),
    )
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await _listening(server, task, sock)
        yield Listener(server)
    finally:
        server.should_exit = True
        await asyncio.wait({task})  # a failure to start was raised by `_listening`
        sock.close()


async def _listening(server: Server, task: asyncio.Task[None], sock: socket.socket) -> None:
    """Return once connections are accepted; raise the error that prevented it."""
    listening = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait({listening, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            raise PortConflict(sock.getsockname()[1], "a server that ended as soon as it was started")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortConflict(sock.getsockname()[1], f"another process ({error.strerror})") from error
    finally:
        listening.cancel()


class StallGuard:
    """Aborts a connection whose client does not read: `paused` and `resumed` follow the transport's write buffer.

    While the buffer is full, nothing more is written to it, so that it shrinks as fast as the client reads.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def paused(self) -> None:
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(STALL_S, self._check)

    def resumed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._left - self._transport.get_write_buffer_size() < LEAST_READ_BYTES:
            self._transport.abort()
        else:
            self.paused()


class _State(ServerState):
    """Uvicorn's lists of connections and tasks, and where a server that leaves passes connections on to."""

    pass_on: PassOn | None = None


def _detach(transport: asyncio.Transport) -> socket.socket:
    """The connection as a socket; the transport is gone, of which the client notices nothing."""
    transport.pause_reading()
    connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    transport.abort()
    return connection


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 that ignores every offer of an upgrade; Java's client offers h2c with each request.

    httptools ends a request with such an offer behind its head: the bytes of its body would be parsed as the next
    request, which behind a proxy is request smuggling. So a new parser continues there, after a head with the same
    framing. Only parsers look at the bytes, so no body is searched or edited.

    Connections beyond `max_connections` are aborted; one whose request head is late or endless is closed.
    """

    silence_s: float | None = None  # limit on the wait for the first byte, where it is not that of new connections
    server_state: _State
    _is_resuming = False
    _is_in_message = False
    _is_in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall_guard = StallGuard(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._await_head(self.silence_s or HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stall_guard.resumed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_guard.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_guard.resumed()

    def data_received(self, data: bytes) -> None:
        self._feed(data)
        if not self._is_in_head:
            self._head_bytes = 0
            self._stop_head_timer()
        elif (size := self._head_bytes + len(data)) > _MAX_HEAD_BYTES:
            self.send_400_response(f"The head of the request is over {_MAX_HEAD_BYTES} bytes.")
        else:
            self._head_bytes = size
            if self._head_timer is None:
                self._await_head(HEAD_LIMIT_S)
        self.pass_on()  # where the response was complete before the request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.pass_on()

    def pass_on(self) -> None:
        """Pass the connection on, where the server leaves and no request of it is being received or answered."""
        pass_on, is_answered = self.server_state.pass_on, self.cycle is None or self.cycle.response_complete
        if pass_on is None or self._is_in_message or not is_answered or self.pipeline or self.transport.is_closing():
            return
        self.flow.pause_reading()
        if self.transport.get_write_buffer_size():  # the end of the last response
            self.loop.call_later(_FLUSH_POLL_S, self.pass_on)
        else:
            pass_on(_detach(self.transport))

    def _await_head(self, limit_s: float) -> None:
        self._head_timer = self.loop.call_later(limit_s, self._on_head_late)

    def _on_head_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head(HEAD_LIMIT_S)  # pipelined: nothing is read while another request is being answered
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        self._is_in_message = self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_resuming:
            return
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT is not served")  # the parser makes it an HttpParserError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else `_ignore_upgrade` follows
            self._is_in_message = False
            super().on_message_complete()

    def _ignore_upgrade(self) -> None:
        framing = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
        self._is_resuming = False


class ProtocolSniffer(asyncio.Protocol):
    """Detects HTTP/2 or HTTP/1 from the first bytes of a connection, and hands it to that protocol.

    Connections beyond `max_connections` are aborted, silent ones closed after a timeout. The arguments are those with
    which uvicorn makes a protocol.
    """

    silence_s: float | None = None

    def __init__(self, h2: H2Factory, *, server_state: _State, **rest: Any) -> None:
        self._h2 = h2
        self._state = server_state
        self._rest = rest
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timeout = asyncio.get_running_loop().call_later(self.silence_s or _FIRST_BYTES_S, transport.close)
        if len(self._state.connections) >= max_connections():
            self._transport.abort()
        else:
            self._state.connections.add(cast(Any, self))
            self.pass_on()  # accepted in the moment in which the server left

    def pass_on(self) -> None:
        """Pass the connection on, where the server leaves and nothing was received."""
        if self._state.pass_on is not None and not self._seen and not self._transport.is_closing():
            self._state.pass_on(_detach(self._transport))

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if len(self._seen) < len(_H2_PREFACE) and _H2_PREFACE.startswith(self._seen):
            return
        self._finish()
        protocol: Any
        if self._seen.startswith(_H2_PREFACE):
            protocol = self._h2(self._state)
        else:
            protocol = HttpProtocol(server_state=self._state, **self._rest)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._state.pass_on is not None and not isinstance(protocol, HttpProtocol):
            protocol.leave()
        protocol.data_received(self._seen)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def shutdown(self) -> None:
        """Called by uvicorn as the server ends."""
        self._transport.close()

    def _finish(self) -> None:
        self._timeout.cancel()
        self._state.connections.discard(cast(Any, self))


class Server(uvicorn.Server):
    """Uvicorn with an event set once it listens, and without its signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: _State = _State()
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
