"""Forwarded connections: the bytes between a client or a worker on this host and the link to another host."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from teimgr.cluster.host_link import HostLink, drained
from teimgr.observability.memory import max_connections

STALL_S = 60.0
"""What a worker, or the other host for it, may leave untaken for so long: it takes nothing while its budgets are used
up, for which calls wait half that time.
"""
LINGER_S = 30.0
"""What a client has to end its connection after the worker ended it."""
_READ_BYTES = 64 << 10
STREAM_BYTES = _READ_BYTES // 2
"""Limit of a connection's stream reader, which holds twice as much."""
_MAX = 2048
_RESET = struct.pack("ii", 1, 0)  # lingering for no time: the peer gets a reset, and takes what it has for incomplete


def most_forwarded() -> int:
    """The most connections that a host forwards in all; each has two sockets."""
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
        """Close it; nothing waits to be sent once `relay` has returned."""
        self._writer.close()

    def reset(self) -> None:
        """Close it so that its peer sees a failure."""
        if not self._writer.is_closing():  # else its descriptor may be another one's
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
