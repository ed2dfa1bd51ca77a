"""Accepts connections, with or without TLS: a few per turn of the event loop, counted by a gate.

The event loop's own server would accept all waiting connections in one turn, would not count those in their TLS
handshake, and could not replace its TLS context.

An accept is cheap compared with the start of a connection. If many wait, they are accepted ahead and started
alternately by client, so that a new client does not wait for thousands of another. If few wait, connections are
accepted only as they are started, since other workers may accept on the same socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from teimgr.errors import TeimgrError, Unavailable
from teimgr.http.connection_gate import ConnectionGate, Phase, Ticket, network_of
from teimgr.http.tls import TlsTransport
from teimgr.http.turns import Rotation

log = logging.getLogger(__name__)

# Per turn of the event loop. An accept takes about 10 µs, the start of a connection 100 µs, the RSA signature of a
# handshake 1 ms.
_STARTS_PER_TURN = 4
_HANDSHAKES_PER_TURN = 4
# With a longer backlog, accept ahead: `_AHEAD_PER_TURN` per turn, `_MAX_AHEAD` in total.
_LONG_BACKLOG = 16
_AHEAD_PER_TURN = 64
_MAX_AHEAD = 4096
# `tcpi_unacked` in Linux's `struct tcp_info`: for a listening socket, its current backlog.
_TCP_INFO_UNACKED = struct.Struct("24xI")
# Limit of connections that wait for their handshake to begin.
_MAX_WAITING = 64
_PAUSE_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

MakeProtocol = Callable[[Ticket], asyncio.BaseProtocol]
"""Makes the protocol of a connection; its `connection_made` takes the ticket (`hand_to`)."""
Context = Callable[[], ssl.SSLContext | None]
"""The TLS context for the next connection; None for no TLS. May raise OSError or TeimgrError."""
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
"""Serves the streams of a connection; a coroutine function is run as a task."""


class Acceptor:
    """Accepts connections of the listening socket `sock` from `start` to `close`, which leaves it open.

    `context` returns the TLS context of the next connection. `on_failure` gets the client's address and the reason of a
    refused connection or failed handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        gate: ConnectionGate,
        protocol: MakeProtocol,
        context: Context = lambda: None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self.gate = gate
        self.protocol = protocol
        self.context = context
        self._on_failure = on_failure
        self.arrivals: set[_Arrival] = set()
        self._sock = sock
        self._max_ahead = max(1, min(_MAX_AHEAD, gate.limit // 2))
        self._accepted: Rotation[tuple[socket.socket, str]] = Rotation()
        self._waiting: Rotation[_Arrival] = Rotation()
        self._taking: asyncio.Handle | None = None
        self._starting: asyncio.Handle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_accepting = self._is_open = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._accept_or_not()

    def close(self) -> None:
        """Stop accepting. Handshakes go on, so that a client learns by the protocol that the server leaves."""
        self._is_open = False
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._accept_or_not()

    async def wait_closed(self) -> None:
        """End the handshakes that are under way. Must be called after `close`."""
        for handle in (self._starting, self._taking):
            if handle is not None:
                handle.cancel()
        self._starting = self._taking = None
        while self._accepted:
            self.take(*self._accepted.pop())
            if not len(self._accepted) % _STARTS_PER_TURN:
                await asyncio.sleep(0)
        while self._waiting:
            self._waiting.pop()
        tasks = [arrival.task for arrival in self.arrivals if arrival.task is not None]
        for arrival in tuple(self.arrivals):
            arrival.end()
        if tasks:
            await asyncio.wait(tasks)

    def await_handshake(self, arrival: _Arrival) -> None:
        """Queue a handshake. Called by a connection whose client has sent the first byte."""
        self._waiting.put(network_of(arrival.client), arrival)
        if self._starting is None:
            self._starting = self._loop.call_soon(self._start_handshakes)

    def _start_handshakes(self) -> None:
        for _ in range(min(_HANDSHAKES_PER_TURN, len(self._waiting))):
            self._waiting.pop().shake_hands()
        self._starting = self._loop.call_soon(self._start_handshakes) if self._waiting else None
        self._take_later()

    def _accept_or_not(self) -> None:
        accepts = self._is_open and self._pause is None and len(self._accepted) < self._max_ahead
        if accepts and not self._is_accepting:
            self._loop.add_reader(self._sock, self._accept)
        elif self._is_accepting and not accepts:
            self._loop.remove_reader(self._sock)
        self._is_accepting = accepts

    def _accept(self) -> None:
        for number in range(_STARTS_PER_TURN + _AHEAD_PER_TURN):
            if number == _STARTS_PER_TURN and self._backlog() <= _LONG_BACKLOG:
                break
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno in _EXHAUSTED:  # others: the connection has gone
                    log.warning("cannot accept connections, pausing for %g s: %s", _PAUSE_S, error)
                    self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                break
            client = str(address[0]) if sock.family != socket.AF_UNIX else ""
            self._accepted.put(network_of(client), (sock, client))
        self._accept_or_not()
        if self._taking is None:
            self._take_accepted()

    def _backlog(self) -> int:
        """Return the number of connections that wait to be accepted; 0 if the kernel does not report it."""
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_UNACKED.size)
            return int(_TCP_INFO_UNACKED.unpack(info)[0])
        except (OSError, struct.error):  # a Unix socket
            return 0

    def _take_accepted(self) -> None:
        """Start some of the accepted connections, and the others in later turns.

        Of one network the oldest and the newest in turn: a probe of health does not wait for the thousands that another
        client of its host, or of its proxy, has opened before.
        """
        self._taking = None
        for _ in range(min(_STARTS_PER_TURN, len(self._accepted))):
            if len(self._waiting) > _MAX_WAITING:
                return
            self.take(*self._accepted.pop(both_ends=True))
        self._take_later()

    def _take_later(self) -> None:
        if self._accepted and self._taking is None:
            self._taking = self._loop.call_soon(self._take_accepted)
        self._accept_or_not()

    def _resume(self) -> None:
        self._pause = None
        self._accept_or_not()

    def take(self, sock: socket.socket, client: str, phase: Phase = Phase.HEAD) -> None:
        """Serve an accepted connection; its first phase is `phase`, or with TLS SILENT."""
        try:
            context = self.context()
        except (OSError, TeimgrError) as error:
            sock.close()
            self.failed(client, error)
            return
        ticket = self.gate.admit(client, phase if context is None else Phase.SILENT)
        if ticket is None:
            sock.close()
            self.failed(client, Unavailable(f"the port has {self.gate.limit} connections"))
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arrival = _Arrival(self, sock, ticket, context)
        self.arrivals.add(arrival)
        arrival.begin()

    def failed(self, client: str, error: Exception) -> None:
        """Report that a connection is not served."""
        if self._on_failure is not None:
            self._on_failure(client, error)
        else:
            log.debug("connection of %s failed: %s", client, error)


class _Arrival:
    """A connection between its accept and the `connection_made` of its protocol."""

    __slots__ = ("_acceptor", "_context", "_is_watched", "_sock", "_ticket", "task")

    def __init__(self, acceptor: Acceptor, sock: socket.socket, ticket: Ticket, context: ssl.SSLContext | None) -> None:
        self._acceptor = acceptor
        self._sock = sock
        self._ticket = ticket
        self._context = context
        self._is_watched = False
        self.task: asyncio.Task[None] | None = None
        ticket.hand_to(self)

    @property
    def client(self) -> str:
        return self._ticket.client

    def begin(self) -> None:
        """Connect. With TLS, wait for the client's first byte before that: until then the connection costs no TLS
        state."""
        if self._context is None:
            self.task = asyncio.get_running_loop().create_task(self._connect())
        else:
            asyncio.get_running_loop().add_reader(self._sock, self._on_first_byte)
            self._is_watched = True

    def _on_first_byte(self) -> None:
        self._unwatch()
        try:
            is_gone = not self._sock.recv(1, socket.MSG_PEEK)
        except OSError:
            is_gone = True
        if is_gone:
            self.end()
        else:
            self._acceptor.await_handshake(self)

    def shake_hands(self) -> None:
        """Begin the TLS handshake, unless the connection was closed while it waited."""
        if self._sock.fileno() != -1:
            self.task = asyncio.get_running_loop().create_task(self._connect())
            self._ticket.enter(Phase.HANDSHAKE)

    async def _connect(self) -> None:
        acceptor, context = self._acceptor, self._context
        tls = None
        if context is not None:
            tls = TlsTransport(context, lambda: acceptor.protocol(self._ticket), self._ticket.network)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: acceptor.protocol(self._ticket) if tls is None else tls, self._sock
            )
            if tls is not None:
                async with asyncio.timeout(acceptor.gate.limits[Phase.HANDSHAKE].seconds):
                    await tls.handshake
        except Exception as error:
            self._give_up(tls)
            acceptor.failed(self._ticket.client, error)
        except BaseException:
            self._give_up(tls)
            raise
        finally:
            tls = None  # breaks a reference cycle with the handshake's error
            acceptor.arrivals.discard(self)

    def _give_up(self, tls: TlsTransport | None) -> None:
        self._ticket.leave()
        if tls is not None and tls.is_connected:
            tls.abort()
        else:
            self._sock.close()

    def end(self) -> None:
        """Close the connection, unless its protocol is about to take it over."""
        if self.task is None:
            self._unwatch()
            self._sock.close()
            self._ticket.leave()
            self._acceptor.arrivals.discard(self)
        elif self._context is not None:
            self.task.cancel()

    def _unwatch(self) -> None:
        if self._is_watched:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._is_watched = False

    def on_expired(self, phase: Phase) -> None:
        self.on_displaced()

    def on_displaced(self) -> None:
        self._ticket.leave()
        self.end()


class GatedStream(asyncio.StreamReaderProtocol):
    """The streams of one connection, passed to `connected` in the phase HEAD. `limit` is the maximum line length."""

    def __init__(self, ticket: Ticket, connected: Connected, limit: int = 2**16) -> None:
        super().__init__(asyncio.StreamReader(limit), connected)
        self._ticket = ticket
        self._gated: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._gated = cast(asyncio.Transport, transport)
        if self._ticket.phase is Phase.HANDSHAKE:
            self._ticket.enter(Phase.HEAD)
        super().connection_made(transport)
        if not self._ticket.hand_to(self):
            self._gated.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.leave()
        super().connection_lost(exc)

    def on_expired(self, phase: Phase) -> None:
        """Called by the gate: only what comes before a request has a limit here."""
        if phase is Phase.ANSWER:
            self._ticket.renew()
        else:
            self.on_displaced()

    def on_displaced(self) -> None:
        """Called by the gate."""
        if self._gated is not None:
            self._gated.abort()
