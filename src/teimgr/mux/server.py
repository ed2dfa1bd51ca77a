"""Listeners of the mux: TCP and Unix sockets, TLS with certificates that are replaced, the end of connections."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from teimgr.http.acceptor import Acceptor
from teimgr.http.auth.tls_files import Pems, TlsFiles
from teimgr.http.connection_gate import BACKLOG, ConnectionGate, Ticket
from teimgr.http.http1 import ListenerState
from teimgr.http.http2.connection import Connection

# After the last call clients close their connections; the server closes those that stay open.
_CLOSE_S = 1.0


class GrpcServer:
    """Serves connections of bound sockets from `start` to `stop`; `protocol` makes the protocol of each.

    With a `context` every connection is TLS. `gate` counts the connections.
    """

    def __init__(
        self,
        protocol: Callable[[ListenerState, Ticket], Connection],
        context: ssl.SSLContext | None = None,
        gate: ConnectionGate | None = None,
    ) -> None:
        self._state = ListenerState()
        self._protocol = lambda ticket: protocol(self._state, ticket)
        self.context = context
        self._gate = gate or ConnectionGate()
        self._sockets: list[socket.socket] = []
        self._acceptors: list[Acceptor] = []

    def add(self, sock: socket.socket) -> None:
        """Listen on a bound socket; until `start` its clients wait in the backlog."""
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._sockets.append(sock)

    async def start(self) -> None:
        """Accept connections."""
        for sock in self._sockets:
            acceptor = Acceptor(sock, self._gate, self._protocol, lambda: self.context)
            self._acceptors.append(acceptor)
            acceptor.start()

    def secure(self, context: ssl.SSLContext) -> None:
        """Use `context` for new connections; open ones keep theirs."""
        self.context = context

    async def stop(self, grace_s: float | None) -> None:
        """Stop accepting, answer the calls in flight within `grace_s` (None: answer none), and close.

        Clients make later calls on other connections. A call that was sent already is refused unprocessed, so the
        client retries it.
        """
        self._close_listeners()
        self._state.leave()
        if grace_s is not None:
            await self._drain(grace_s)
        self._state.end()
        for task in tuple(self._state.tasks):
            task.cancel()
        for connection in self._connections():
            connection.shutdown()
        if grace_s is not None:
            await self._closed()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()
        for connection in self._connections():
            connection.transport.abort()

    async def _drain(self, grace_s: float) -> None:
        """Wait until all calls are answered and the clients have closed, or until the grace is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        for connection in self._connections():
            connection.leave()
        # Repeated for connections that finish their handshake now and sent calls before they got GOAWAY.
        while (tasks := set(self._state.tasks)) and (left_s := deadline - loop.time()) > 0:
            await asyncio.wait(tasks, timeout=left_s)
        await self._closed()

    async def _closed(self) -> None:
        if closed := [connection.closed for connection in self._connections()]:
            await asyncio.wait(closed, timeout=_CLOSE_S)

    def _close_listeners(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _connections(self) -> tuple[Connection, ...]:
        return cast(tuple[Connection, ...], tuple(self._state.connections))


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a gRPC listener, with HTTP/2 alone in ALPN; raises InvalidConfig as
    `TlsFiles.context`."""
    context = files.context()
    context.set_alpn_protocols(["h2"])
    return context


def tls_context_of(pems: Pems) -> ssl.SSLContext:
    """Like `tls_context`, for certificates that are not in a file."""
    with _in_memory(pems.cert) as cert, _in_memory(pems.key) as key, _in_memory(pems.ca or b"") as ca:
        return tls_context(TlsFiles(cert, key, ca if pems.ca is not None else None))


@contextmanager
def _in_memory(content: bytes) -> Iterator[Path]:
    """Make a file in memory, for functions of OpenSSL that only take paths."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
