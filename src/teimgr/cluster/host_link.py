"""A connection between two hosts of a fleet, for data that is too large for Ray: logs, files of models, forwarded
ports.

It uses mutual TLS and the messages of `wire/json_messages.py`. A stream of bytes is pieces, each after its length, up
to an empty one: TLS has no half-close. `NearEnd` is the connection of a client or a worker on this host whose bytes
are forwarded over such a link.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from teimgr.errors import Unauthenticated, Unavailable
from teimgr.http.connection_gate import MIN_READ_BYTES
from teimgr.http.tls import TlsTransport
from teimgr.observability.memory import max_connections
from teimgr.wire.fleet_tls import DAEMON, HANDSHAKE_LIMIT_S, FleetIdentity, FleetName, peer_of
from teimgr.wire.json_messages import LENGTH_BYTES, pack, reported_error, unpack, unpack_length
from teimgr.wire.remote_frames import set_tcp_limits

CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 30.0
SEND_LIMIT_S = 30.0
"""The connection to a peer without progress for this long is dropped."""
PIECE_BYTES = 256 << 10
_STREAM_BUFFER_BYTES = 64 << 10
_KEEPALIVE_S = 5
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class HostAddress:
    """The address of a host's service, `host:port`."""

    name: str
    address: str


class HostServices:
    """The services of other hosts, by name. Listeners are called after each change of `now`."""

    def __init__(self) -> None:
        self.now: Mapping[str, HostAddress] = {}
        self._listeners: list[Callable[[], None]] = []

    def set(self, services: Mapping[str, HostAddress]) -> None:
        if services != self.now:
            self.now = services
            for listener in self._listeners:
                listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)


class HostLink:
    """One end of a connection. `peer` is the name in the other end's certificate, `host` its name for messages.

    All methods raise Unavailable if the connection breaks or a limit passes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: FleetName, host: str) -> None:
        self.peer = peer
        self.host = host
        self._reader = reader
        self._writer = writer

    async def send(self, **values: Any) -> None:
        self._writer.write(pack(values))
        await self._drain()

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)
        await self._drain()

    async def receive(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """Return the next message. An error that the peer reports is raised as its own class."""
        try:
            async with asyncio.timeout(limit_s):
                size = unpack_length(await self._reader.readexactly(LENGTH_BYTES))
                message = unpack(await self._reader.readexactly(size))
                reported = reported_error(message)
        except TimeoutError:
            raise Unavailable(f"{self.host}: no answer for {limit_s:g} s") from None
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error or type(error).__name__}") from error
        if reported is not None:
            raise reported
        return message

    async def send_piece(self, data: bytes, limit_s: float) -> None:
        """Send a piece of a stream, at most `PIECE_BYTES`, or its end, which is empty; wait while the peer is slow, as
        `drained`, after the end until all is sent.
        """
        self._writer.write(_LENGTH.pack(len(data)) + data)
        try:
            await drained(self._writer, limit_s, whole=not data)
        except OSError as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error or 'no progress'}") from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the peer's pieces sent by `send_piece`, to its end, however long that takes."""
        try:
            while True:
                (left,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if left == 0:
                    return
                if left > PIECE_BYTES:
                    raise ValueError(f"a piece of {left} bytes")
                while left:
                    piece = await self._reader.read(left)
                    if not piece:
                        raise EOFError("it ended within a piece")
                    left -= len(piece)
                    yield piece
        except (OSError, EOFError, ValueError) as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error or type(error).__name__}") from error

    def be_stream(self, stall_s: float) -> None:
        """Prepare for a stream of `send_piece` and `pieces`: small buffers, as there may be thousands; and the kernel
        gives up a peer that is gone, also while nothing is sent, after about `stall_s`. One that takes nothing counts
        as gone.
        """
        if self._writer.is_closing():
            return
        transport: Any = self._writer.transport
        transport.set_write_buffer_limits(_STREAM_BUFFER_BYTES)
        if not isinstance(transport, TlsTransport):  # which keeps little; uvloop's TLS keeps 256 KiB
            transport.set_read_buffer_limits(_STREAM_BUFFER_BYTES)
        with suppress(OSError):  # it is closed already
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))

    async def close(self) -> None:
        """Close at once; unsent data is dropped. Never raises."""
        self._writer.transport.abort()

    async def finish(self, limit_s: float = 1.0) -> None:
        """Close once waiting data is sent, at the latest after a time limit."""
        self._writer.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError is one
            self._writer.transport.abort()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise Unavailable(f"{self.host}: no progress sending for {SEND_LIMIT_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error}") from error


async def drained(writer: asyncio.StreamWriter, limit_s: float, *, whole: bool = False) -> None:
    """Return when there is room for more, or when all is sent. A peer may be slow, but has to take something in
    `limit_s`.

    Raises:
        TimeoutError: it took less than `MIN_READ_BYTES`.
        OSError: the connection is lost.
    """
    if whole and not writer.is_closing():
        writer.transport.set_write_buffer_limits(1)  # with 0, uvloop's TLS would stay paused
    while True:
        waiting = writer.transport.get_write_buffer_size()
        try:
            async with asyncio.timeout(limit_s):
                return await writer.drain()
        except TimeoutError:
            if waiting - writer.transport.get_write_buffer_size() < MIN_READ_BYTES:
                raise


async def connect(host: HostAddress, identity: FleetIdentity, limit_s: float = CONNECT_LIMIT_S) -> HostLink:
    """Connect to the service of a host, which proves its name by its certificate.

    Raises:
        Unavailable: it cannot be reached, or another host answers there.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await _connect(host, identity)
    except TimeoutError:
        raise Unavailable(f"{host.name}: no connection within {limit_s:g} s") from None
    except (OSError, ValueError, Unauthenticated) as error:
        raise Unavailable(f"{host.name}: no connection: {error}") from error


async def _connect(host: HostAddress, identity: FleetIdentity) -> HostLink:
    name, _, port = host.address.rpartition(":")
    reader, writer = await asyncio.open_connection(
        name.strip("[]"), int(port), ssl=identity.client_context(), ssl_handshake_timeout=HANDSHAKE_LIMIT_S
    )
    try:
        set_tcp_limits(writer.transport)
        peer = peer_of(writer.get_extra_info("ssl_object")).name
        if peer not in (FleetName(host.name), DAEMON):
            raise Unauthenticated(f"the certificate there is that of {peer.uri}")
    except BaseException:
        writer.transport.abort()
        raise
    return HostLink(reader, writer, peer, host.name)


STALL_S = 60.0
"""What a worker, or the other host for it, may leave untaken for so long: it takes nothing while its budgets are used
up, for which calls wait half that time.
"""
LINGER_S = 30.0
"""How long a client may keep its connection open after the worker has ended it."""
_READ_BYTES = 64 << 10
STREAM_BYTES = _READ_BYTES // 2
"""Limit of a connection's stream reader, which holds twice as much."""
_MAX = 2048
_RESET = struct.pack("ii", 1, 0)  # zero linger time sends a reset, so the peer knows that its data is incomplete


def most_forwarded() -> int:
    """Return the limit on the connections that a host forwards; each needs two sockets."""
    return min(_MAX, max_connections() // 2)


class NearEnd:
    """The connection of a client or a worker on this host. `stall_s` is what its peer may take for nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stall_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._stall_s = stall_s
        self._first = b""

    @classmethod
    async def connect(cls, host: str, port: int) -> NearEnd:
        """A new connection to a worker. Raises OSError."""
        reader, writer = await asyncio.open_connection(host, port, limit=STREAM_BYTES)
        return cls(reader, writer, STALL_S)

    async def begun(self) -> bool:
        """Wait for the peer's first bytes, which `relay` passes on; False if it ends without any. Raises OSError."""
        self._first = await self._reader.read(_READ_BYTES)
        return bool(self._first)

    async def relay(self, link: HostLink, *, is_worker: bool) -> None:
        """Pass bytes on both ways until both ends have ended theirs. `is_worker`: this end is the worker's.

        A client that has ended its own may wait for the answer; one whose worker has ended gets `LINGER_S`. Buffers
        are those of the two streams: an end that is not read from, or not taken from, stops the other one.

        Raises:
            Unavailable: the link broke.
            OSError: this connection broke; TimeoutError: its peer took nothing.
        """
        link.be_stream(STALL_S)
        to_link, from_link = asyncio.create_task(self._to(link)), asyncio.create_task(self._from(link))
        of_worker = to_link if is_worker else from_link
        ways = {to_link, from_link}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if not (to_link.done() and from_link.done()) and not _failed(ways):
                await asyncio.wait(ways, timeout=LINGER_S if of_worker.done() else None)
            for way in ways:
                if way.done():
                    way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def close(self) -> None:
        """Close it. Nothing is unsent once `relay` has returned."""
        self._writer.close()

    def reset(self) -> None:
        """Reset it, so that its peer sees a failure."""
        if not self._writer.is_closing():  # otherwise the descriptor may belong to another connection
            _be_reset_at_close(self._writer.get_extra_info("socket"))
        self._writer.transport.abort()

    async def _to(self, link: HostLink) -> None:
        data, self._first = self._first or await self._reader.read(_READ_BYTES), b""
        while data:
            await link.send_piece(data, STALL_S)
            data = await self._reader.read(_READ_BYTES)
        await link.send_piece(b"", STALL_S)

    async def _from(self, link: HostLink) -> None:
        async for data in link.pieces():
            if self._writer.is_closing():
                raise ConnectionResetError("it was closed")
            self._writer.write(data)
            await drained(self._writer, self._stall_s)
        await drained(self._writer, self._stall_s, whole=True)
        if not self._writer.is_closing():
            self._writer.write_eof()


def _be_reset_at_close(sock: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _failed(ways: set[asyncio.Task[None]]) -> bool:
    return any(way.done() and way.exception() is not None for way in ways)
