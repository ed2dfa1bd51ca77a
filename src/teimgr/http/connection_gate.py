"""Limits of client connections, counted from accept to close by phase, with a time limit for each phase.

A port has one `ConnectionGate`, and each connection a `Ticket` with its phase. The gate notifies a connection whose
phase lasts too long, and closes the least valuable one if the port is full. `LIMITS` applies to all ports and to
HTTP/1, HTTP/2 and TLS, without a timer per connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Protocol, cast
from weakref import WeakSet

from teimgr.http.turns import CallTurns
from teimgr.observability.memory import max_connections


class Phase(IntEnum):
    """The phase of an accepted connection."""

    SILENT = 0
    """On a port with TLS: accepted, no byte received."""
    HANDSHAKE = 1
    """The TLS handshake, from its first byte."""
    HEAD = 2
    """Waiting for the first request, or receiving a head (HTTP/2: a frame) or trailers."""
    BODY = 3
    """Receiving the body of a request."""
    ANSWER = 4
    """Answering a received request."""
    DISCARD = 5
    """A request was answered before its end; the rest is discarded."""
    IDLE = 6
    """All requests are answered."""
    CLOSING = 7
    """Closes after the client has read everything."""


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """Limits of a phase.

    Attributes:
        seconds: Time limit. In BODY it is the longest silence of the client (readers limit the whole body); in ANSWER
            it is the interval of checks.
        bytes: Maximum bytes received in the phase; None if other budgets limit them.
        connections: Maximum connections of the port in this phase; a further one displaces the oldest.
        per_address: The same per client address (IPv6: per /64 network).
    """

    seconds: float
    bytes: int | None = None
    connections: int | None = None
    per_address: int | None = None


LIMITS: Mapping[Phase, PhaseLimit] = MappingProxyType(
    {
        # A connection in its handshake takes up to 150 KiB, a silent one 2 KiB.
        Phase.SILENT: PhaseLimit(5.0, connections=4096, per_address=2048),
        Phase.HANDSHAKE: PhaseLimit(5.0, connections=256, per_address=128),
        Phase.HEAD: PhaseLimit(20.0, bytes=64 * 2**10),
        Phase.BODY: PhaseLimit(120.0),
        Phase.ANSWER: PhaseLimit(30.0),
        Phase.DISCARD: PhaseLimit(30.0, bytes=64 * 2**20),
        # Longer than the keep-alive of clients (aiohttp 15 s, Java 30 s, AWS's load balancer 60 s, Go 90 s), since the
        # server could close while a client sends a request, and few clients retry a POST.
        Phase.IDLE: PhaseLimit(120.0),
        Phase.CLOSING: PhaseLimit(30.0),
    }
)
# Limit of unprocessed bytes (incomplete heads, pipelined requests) of a port's connections. Above it, the one that has
# held bytes for the longest time is closed.
HELD_BYTES = 64 * 2**20
# Backlog of the kernel, limited by `net.core.somaxconn` (4,096). Clients beyond it, health checks included, retry after
# 1 s, 3 s, 7 s.
BACKLOG = 4096
# A client that reads less than this in this time while its write buffer is full is disconnected.
STALL_S = 30.0
MIN_READ_BYTES = 16 * 1024
_MAX_SILENCE_S = 2.0  # of a client whose connection is closed after a reply
# Phases whose connections are closed if the port is full, in this order.
_DISPLACED = (Phase.CLOSING, Phase.DISCARD, Phase.SILENT, Phase.HANDSHAKE, Phase.HEAD, Phase.IDLE)
# Expired connections closed in one turn of the event loop, and the pause before the next ones.
_CLOSED_PER_TURN = 64
_TURN_PAUSE_S = 0.001
# Connections whose first bytes are processed in one turn of the loop, which may begin a request.
_BEGINNINGS_PER_TURN = 4
# Connections or streams that end in one turn of the loop; each takes about 0.1 ms.
_ENDS_PER_TURN = 8


class StallGuard:
    """Aborts a connection whose client does not read: `paused` and `resumed` follow the transport's write buffer.

    Nothing is written to a full buffer, so it shrinks as fast as the client reads.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def paused(self) -> None:
        self.resumed()
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(STALL_S, self._check)

    def resumed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._left - self._transport.get_write_buffer_size() < MIN_READ_BYTES:
            self._transport.abort()
        else:
            self.paused()


class Holder(Protocol):
    """The owner of a connection."""

    def on_expired(self, phase: Phase) -> None:
        """The time limit of the phase is over: close the connection, or enter or renew a phase. After the close the
        phase is CLOSING, whose end is `on_displaced`.
        """

    def on_displaced(self) -> None:
        """Abort the connection, which has left the gate: another one takes its place, or its close took too long."""


class ClosedConnection(asyncio.Protocol):
    """A connection closed after a reply while the client still sends its request.

    The kernel resets a connection closed with unread bytes, and the client may lose the reply. So the socket is kept
    until the client closes or is silent for a while; its data is dropped, within the limits of DISCARD.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._dropped = self._checked = 0

    def take(self, transport: asyncio.Transport) -> asyncio.Task[None] | None:
        """Take over the socket of a transport that is being closed.

        Returns None, and takes nothing over, if the transport has TLS, whose close waits anyway, or the process has no
        descriptor left.
        """
        if transport.get_extra_info("sslcontext") is not None:
            return None
        try:
            taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:
            return None
        return asyncio.get_running_loop().create_task(self._begin(taken))

    async def _begin(self, taken: socket.socket) -> None:
        try:
            taken.setblocking(False)
            with suppress(OSError):  # closed by the client
                taken.shutdown(socket.SHUT_WR)
            await asyncio.get_running_loop().create_connection(lambda: self, sock=taken)
        except BaseException:
            taken.close()
            self._ticket.leave()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._check_later()
        if self._ticket.hand_to(self):
            self._ticket.enter(Phase.DISCARD)
            self._ticket.hold(0)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > cast(int, LIMITS[Phase.DISCARD].bytes):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._ticket.leave()

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_MAX_SILENCE_S, self._check)

    def _check(self) -> None:
        if self._checked == self._dropped:
            self._transport.close()
        else:
            self._checked = self._dropped
            self._check_later()

    def on_expired(self, phase: Phase) -> None:
        """Called by the gate."""
        self._transport.close()

    def on_displaced(self) -> None:
        """Called by the gate."""
        self._transport.abort()


class Ticket:
    """The admission of one connection, from accept to close."""

    __slots__ = ("_gate", "_had_turn", "_holder", "client", "deadline", "held", "network", "phase")

    def __init__(self, gate: ConnectionGate, client: str) -> None:
        self._gate = gate
        self._holder: Holder | None = None
        self._had_turn = False
        self.client = client
        self.network = network_of(client)
        self.phase: Phase | None = None
        self.deadline = 0.0
        self.held = 0

    def hand_to(self, holder: Holder) -> bool:
        """Make `holder` the owner of the connection. False if the connection was displaced before: the holder must
        abort it."""
        if self.phase is None:
            return False
        self._holder = holder
        return True

    def enter(self, phase: Phase) -> None:
        """Begin a phase, with its time limit; nothing changes if the connection is in it already or has left."""
        former = self.phase
        if former is not None and former is not phase:
            lines = self._gate.lines
            lines[former].remove(self)
            lines[phase].add(self)

    def renew(self) -> None:
        """Begin the time limit of the present phase again."""
        if self.phase is not None:
            line = self._gate.lines[self.phase]
            line.remove(self)
            line.add(self)

    def hold(self, size: int) -> None:
        """Report how many received bytes the connection holds now. May displace a connection, even this one."""
        if size != self.held and self.phase is not None:
            self._gate.hold(self, size)

    def has_room(self, size: int) -> bool:
        """True if the connection could hold this many more bytes without displacing one."""
        return self._gate.held_bytes + size <= HELD_BYTES

    def leave(self) -> None:
        """Give the place back. Called once the connection is closed; further calls do nothing."""
        self._holder = None  # breaks a reference cycle
        if self.phase is not None:
            self._gate.hold(self, 0)
            self._gate.lines[self.phase].remove(self)
            self.phase = None
            self._gate.count -= 1

    def keeps_open(self, transport: asyncio.Transport) -> bool:
        """For `eof_received`: whether the connection is closed in a later turn of the loop, as many end in this one.

        False lets the event loop close it now.
        """
        self._had_turn = True
        return self._gate.closings.call(self.network, transport.close)

    def ends_later(self, end: Callable[[], object]) -> bool:
        """True if `end`, of a closed connection or of one of its streams, is called in a later turn because many end in
        this one. False for a connection that had its turn before it was closed."""
        if self._had_turn:
            self._had_turn = False
            return False
        return self._gate.closings.call(self.network, end)

    def begins_later(self, begin: Callable[[], object]) -> bool:
        """True if `begin`, for the client's first bytes, is called in a later turn because many begin in this one."""
        return self._gate.beginnings.call(self.network, begin)

    def expire(self) -> None:
        """Called by the gate."""
        phase, deadline = self.phase, self.deadline
        if phase is None:
            return
        if phase is Phase.CLOSING:
            self.displace()
            return
        if self._holder is not None:
            self._holder.on_expired(phase)
        if self.phase is phase and self.deadline == deadline:  # its close is waiting for the client
            self.enter(Phase.CLOSING)

    def displace(self) -> None:
        """Called by the gate."""
        holder = self._holder
        self.leave()
        if holder is not None:
            holder.on_displaced()


class _Line:
    """The tickets of one phase, in the order of their deadlines."""

    def __init__(self, phase: Phase, limit: PhaseLimit) -> None:
        self.tickets: OrderedDict[Ticket, None] = (
            OrderedDict()
        )  # a plain dict finds its first key slowly after deletions
        self._phase = phase
        self._limit = limit
        self._by_address: dict[str, OrderedDict[Ticket, None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ticket: Ticket) -> None:
        loop, limit, tickets = asyncio.get_running_loop(), self._limit, self.tickets
        if limit.connections is not None and len(tickets) >= limit.connections:
            next(iter(tickets)).displace()
        if limit.per_address is not None:
            same = self._by_address.setdefault(ticket.network, OrderedDict())
            if len(same) >= limit.per_address:
                next(iter(same)).displace()  # `same` is not empty afterwards and stays in the dict
            same[ticket] = None
        ticket.phase = self._phase
        ticket.deadline = loop.time() + limit.seconds
        tickets[ticket] = None
        if self._timer is None:
            self._timer = loop.call_at(ticket.deadline, self._expire)

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        if self._limit.per_address is not None:
            same = self._by_address[ticket.network]
            del same[ticket]
            if not same:
                del self._by_address[ticket.network]

    def _expire(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        now, left = loop.time(), _CLOSED_PER_TURN
        while self.tickets and left and (first := next(iter(self.tickets))).deadline <= now:
            left -= 1
            first.expire()
        if self.tickets and self._timer is None:
            due = next(iter(self.tickets)).deadline
            self._timer = loop.call_at(max(due, now + _TURN_PAUSE_S), self._expire)


class SharedLimit:
    """A limit of connections for several ports; each port has its own gate."""

    def __init__(self, connections: int) -> None:
        self.connections = connections
        self._gates: WeakSet[ConnectionGate] = WeakSet()

    def join(self, gate: ConnectionGate) -> None:
        """Called by gates."""
        self._gates.add(gate)

    def has_room(self) -> bool:
        """True if a further connection fits. If needed, displaces one, of the port with the most connections."""
        if sum(gate.count for gate in self._gates) < self.connections:
            return True
        return any(gate.make_room() for gate in sorted(self._gates, key=lambda gate: gate.count, reverse=True))


class ConnectionGate:
    """Counts the connections of a port; `admit` gives each a ticket.

    Args:
        limit: Maximum connections; default: half of the limit of open files.
        limits: Replace `LIMITS` for some phases.
        shared: A limit shared with other ports.

    Attributes:
        count: Open connections.
        held_bytes: Their unprocessed bytes (`Ticket.hold`).
        beginnings: Turns for starting connections after their first bytes.
        closings: Turns for ending connections and their streams.
    """

    def __init__(
        self,
        limit: int | None = None,
        limits: Mapping[Phase, PhaseLimit] | None = None,
        shared: SharedLimit | None = None,
    ) -> None:
        self.limit = max_connections() if limit is None else limit
        self.count = 0
        self.limits = {**LIMITS, **(limits or {})}
        self.lines = {phase: _Line(phase, self._scaled(found)) for phase, found in self.limits.items()}
        self.held_bytes = 0
        self.beginnings = CallTurns(_BEGINNINGS_PER_TURN)
        self.closings = CallTurns(_ENDS_PER_TURN)
        self._holders: OrderedDict[Ticket, None] = OrderedDict()
        self._shared = shared
        if shared is not None:
            shared.join(self)

    def _scaled(self, limit: PhaseLimit) -> PhaseLimit:
        """Scale a share down for a small port."""
        if limit.connections is None or limit.connections <= self.limit // 2:
            return limit
        connections = max(1, self.limit // 2)
        return replace(limit, connections=connections, per_address=limit.per_address and max(1, connections // 2))

    def admit(self, client: str, phase: Phase = Phase.HEAD) -> Ticket | None:
        """Count a new connection of a client at this address (empty for a Unix socket), which begins in `phase`.

        Returns None if the port is full of connections that are being served: the caller must close the new one.
        """
        if self.count >= self.limit and not self.make_room():
            return None
        if self._shared is not None and not self._shared.has_room():
            return None
        ticket = Ticket(self, client)
        self.count += 1
        self.lines[phase].add(ticket)
        return ticket

    def make_room(self) -> bool:
        """Close the connection that is worth least; False if all are being served."""
        for phase in _DISPLACED:
            if tickets := self.lines[phase].tickets:
                next(iter(tickets)).displace()
                return True
        return False

    def hold(self, ticket: Ticket, size: int) -> None:
        """Called by tickets."""
        self.held_bytes += size - ticket.held
        ticket.held = size
        if size:
            self._holders[ticket] = None
            while self.held_bytes > HELD_BYTES:
                next(iter(self._holders)).displace()
        else:
            self._holders.pop(ticket, None)


def network_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, the /64 network of an IPv6 address, or else what a proxy
    names."""
    if ":" not in address or address.startswith("::ffff:"):
        return address
    try:
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()
    except OSError:
        return address


def sender_of(scope: Mapping[str, Any]) -> str | None:
    """Return the network of the client's address in an ASGI scope; None for a client without an address."""
    client = scope.get("client")
    return network_of(client[0]) if client else None
