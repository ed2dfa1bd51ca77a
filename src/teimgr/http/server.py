"""HTTP servers on uvicorn: binding, listeners, new TLS contexts, passing an address to another process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from teimgr.errors import InvalidConfig, PortConflict
from teimgr.http.acceptor import Acceptor
from teimgr.http.connection_gate import BACKLOG, ConnectionGate, Phase, Ticket
from teimgr.http.direct import Direct
from teimgr.http.http1 import H2Connection, H2Factory, HttpProtocol, PassOn, ProtocolSniffer, ServerConnections
from teimgr.http.unix_listener import UnixListener

_CLOSE_GRACE_S = 5
_END_POLL_S = 0.05
# TCP keep-alive closes connections of clients that vanished without a FIN.
_KEEPALIVE_IDLE_S = 300
_SHOWN_COMMAND = 60
_TICKS_A_SECOND = 10  # uvicorn rebuilds its headers at each tenth tick
_CONNECTION_CLOSE = (b"connection", b"close")
AsgiApp = Callable[..., Any]

log = logging.getLogger(__name__)


def bind(host: str, port: int, setting: str = "", *, is_shared: bool = False) -> socket.socket:
    """Bind a TCP socket to the address, and return it, not listening yet. `setting` is the key of the port, for the
    message.

    Other processes of this user may listen on a port that `is_shared`, each for a part of its connections.

    Raises:
        PortConflict: the address is in use; the message has the process that listens there, if it may be seen.
        InvalidConfig: it is not an address of this host.
    """
    # With an explicit protocol asyncio sets TCP_NODELAY on accepted connections, as uvloop does.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted ones inherit it
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            advice = f"; choose another `{setting}`" if setting else ""
            raise PortConflict(port, f"{listening_process(port) or 'another process'}{advice}") from error
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address that a TCP socket is bound to, as `host:port`, an IPv6 host in brackets."""
    name, port = sock.getsockname()[:2]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def address_of_peer(sock: socket.socket) -> str:
    """Return the host of the other end; empty for a Unix socket or a connection that is gone."""
    with suppress(OSError, IndexError):
        return str(sock.getpeername()[0]) if sock.family != socket.AF_UNIX else ""
    return ""


def listening_process(port: int) -> str | None:
    """Describe the process that listens on a TCP port of this host, as `process 71 (python -m http.server)`.

    Returns None if it cannot be seen: another user's process, another container, or a system without /proc.
    """
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [row.split() for row in Path("/proc/net", table).read_text().splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # another user's process, or it has exited
            if any(os.path.realpath(each).rpartition("/")[2] in sockets for each in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                return f"process {process.name} ({b' '.join(words).decode(errors='replace')[:_SHOWN_COMMAND]})"
    return None


class Listener:
    """A running server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def connections(self) -> int:
        """The open connections, counted from their accept."""
        return self._server.gate.count

    async def secure(self, context: ssl.SSLContext) -> None:
        """Use `context` for new connections; open ones keep theirs.

        This replaces the context in use. If it were added to it, clients could resume sessions that its former
        authorities admitted.
        """
        self._server.context = context

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that another process passed on."""
        self._server.acceptors[0].take(sock, address_of_peer(sock), Phase.IDLE)

    def leave(self, pass_on: PassOn | None = None, grace_s: int = _CLOSE_GRACE_S, quiet_s: float = 0) -> None:
        """Stop accepting, and leave the address to the processes that share the socket. At the end of `serving`,
        requests in flight have `grace_s`.

        HTTP/1 with `pass_on`: a connection without an unanswered request goes to that at once, and every other one when
        it has none: no request that begins later is answered here. Without: every open connection ends with its next
        response, which carries `connection: close`, so that a client is not cut off between two requests; those on
        which no request comes are closed at the end of `serving`, but not within `quiet_s` from now.
        HTTP/2: GOAWAY; calls that the client began later are not answered, and the client makes them elsewhere.
        """
        for acceptor in self._server.acceptors:
            acceptor.close()
        state = self._server.server_state
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.quiet_until = asyncio.get_running_loop().time() + quiet_s
        if pass_on is None:
            self._server.config.encoded_headers.append(_CONNECTION_CLOSE)  # source of uvicorn's next header list
            state.default_headers.append(_CONNECTION_CLOSE)  # current list of requests in flight
        state.leave_to(pass_on)
        for connection in tuple(state.connections):
            if isinstance(connection, HttpProtocol | ProtocolSniffer):
                connection.pass_on()
            else:
                cast(H2Connection, connection).leave()


@contextlib.asynccontextmanager
async def serving(
    app: AsgiApp,
    sock: socket.socket,
    h2: H2Factory | None = None,
    direct: Direct | None = None,
    unix: UnixListener | None = None,
    http: type[HttpProtocol] = HttpProtocol,
    gate: ConnectionGate | None = None,
    more: Sequence[socket.socket] = (),
    **tls: Any,
) -> AsyncIterator[Listener]:
    """Serve `app` on `sock`, and on `more`, while the body runs; requests in flight are answered before it ends. The
    sockets are closed then.

    The body starts once the server listens. `h2` makes the protocol of a connection that begins with HTTP/2's preface;
    without it HTTP/2 is not served. `http` is the protocol of the others. `direct` may answer requests without `app`.
    `unix` is served beside `sock`, and its file removed as the body ends. `gate` counts the connections of both. `tls`
    are arguments of uvicorn (`api/rest/app.py`).

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
        backlog=BACKLOG,
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
        http=cast(Any, http if h2 is None else partial(ProtocolSniffer, h2, http)),
        **tls,
    )
    server = Server(config, gate or ConnectionGate(), direct)
    task = asyncio.create_task(server.serve(sockets=[sock, *more, *([] if unix is None else [unix.sock])]))
    try:
        await _listening(server, task, sock)
        yield Listener(server)
    finally:
        if unix is not None:
            unix.file.remove()
        server.leave()
        await asyncio.wait({task})  # `_listening` raised start failures
        for each in (sock, *more):
            each.close()
        if unix is not None:
            unix.close()


async def _listening(server: Server, task: asyncio.Task[None], sock: socket.socket) -> None:
    """Return once connections are accepted; raise the error that prevented it."""
    listening = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait({listening, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            raise PortConflict(sock.getsockname()[1], "a server that exited right after its start")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortConflict(sock.getsockname()[1], f"another process ({error.strerror})") from error
    finally:
        listening.cancel()


class Server(uvicorn.Server):
    """A uvicorn server that accepts connections through a gate, sets an event when it listens, and installs no signal
    handlers."""

    def __init__(self, config: uvicorn.Config, gate: ConnectionGate, direct: Direct | None = None) -> None:
        super().__init__(config)
        self.server_state: ServerConnections = ServerConnections(config, direct)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()
        self.gate = gate
        self.context: ssl.SSLContext | None = None
        self.acceptors: list[Acceptor] = []
        self.quiet_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # without uvicorn's own listeners
        if self.should_exit:
            return
        self.context = self.config.ssl
        for sock in sockets or ():
            sock.listen(self.config.backlog)
            self.acceptors.append(Acceptor(sock, self.gate, self._protocol, lambda: self.context))
        self.servers = cast(Any, self.acceptors)  # uvicorn closes them
        for acceptor in self.acceptors:
            acceptor.start()
        self.listening.set()

    def leave(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Return as soon as the server is to end. Uvicorn's own loop checks ten times a second."""
        counter = 0
        while not await self.on_tick(counter):
            counter += _TICKS_A_SECOND
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests that have begun, within the grace, and close all other connections at once.

        Uvicorn would also wait for clients that do not close their connections, with TLS even for idle ones.
        """
        for acceptor in self.acceptors:
            acceptor.close()
            await acceptor.wait_closed()  # accepted connections are now registered
        state, clock = self.server_state, asyncio.get_running_loop().time
        while state.connections and clock() < self.quiet_until:  # noqa: ASYNC110
            await asyncio.sleep(_END_POLL_S)
        for connection in tuple(state.connections):
            connection.shutdown()
        ends = clock() + (self.config.timeout_graceful_shutdown or 0)
        while (state.connections or state.tasks) and clock() < ends:
            await asyncio.sleep(_END_POLL_S)
            for transport in [cast(Any, each).transport for each in state.connections]:
                if transport.is_closing() and not transport.get_write_buffer_size():
                    transport.abort()
        for task in tuple(state.tasks):
            log.warning("request aborted at the end of the grace")
            task.cancel()
        await self.lifespan.shutdown()

    def _protocol(self, ticket: Ticket) -> asyncio.Protocol:
        config: Any = self.config
        return cast(
            asyncio.Protocol,
            config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state, ticket=ticket
            ),
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
