"""A client of raw HTTP/2 frames, which does what no gRPC client does."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import h2.config
import h2.connection
import h2.events

LIMIT_S = 20


def head(path: str, **more: str) -> list[tuple[str, str]]:
    """The headers of a gRPC call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more.items(),
    ]


def request(path: str, method: str = "GET", **more: str) -> list[tuple[str, str]]:
    """The headers of an HTTP request."""
    return [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x"), *more.items()]


class Peer:
    """A client of raw HTTP/2 frames; it reads only in `settled` and `until`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.is_closed = False
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def open(self, headers: list[tuple[str, str]], end: bool = False) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers, end_stream=end)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes) -> int:
        """Send as much as flow control allows; how much that was."""
        sent = 0
        while room := min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(data) - sent):
            self.h2.send_data(stream, data[sent : sent + room])
            sent += room
        self.flush()
        return sent

    async def ask(self, headers: list[tuple[str, str]], body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the response to a request, whose body fits into the windows."""
        stream = self.open(headers, end=not body)
        if body:
            assert self.send(stream, body) == len(body)
            self.h2.end_stream(stream)
            self.flush()
        return await self.response(stream)

    async def response(self, stream: int) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the response on a stream; other events stay."""
        head: dict[str, str] = {}
        body, has_ended = b"", False
        async with asyncio.timeout(LIMIT_S):
            while not has_ended:
                events, self.events = self.events, []
                for event in events:
                    if getattr(event, "stream_id", None) != stream or isinstance(event, h2.events.StreamReset):
                        self.events.append(event)
                    elif isinstance(event, h2.events.ResponseReceived):
                        head = dict(event.headers)  # type: ignore[arg-type]
                    elif isinstance(event, h2.events.DataReceived):
                        body += event.data
                        self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
                    elif isinstance(event, h2.events.StreamEnded):
                        has_ended = True
                self.flush()
                assert has_ended or not self.is_closed, "closed before the response ended"
                if not has_ended:
                    await self.take()
        return int(head[":status"]), head, body

    async def take(self) -> None:
        data = await self.reader.read(65536)
        self.is_closed = not data
        if data:
            self.events += self.h2.receive_data(data)
            self.flush()

    async def until(self, kind: type[h2.events.Event]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not (found := [event for event in self.events if isinstance(event, kind)]):
                assert not self.is_closed, f"closed before a {kind.__name__}"
                await self.take()
        return found[-1]

    async def settled(self) -> None:
        """Return once the server has processed what was sent, and what it answered is taken."""
        self.events.clear()
        self.h2.ping(b"settled?")
        self.flush()
        await self.until(h2.events.PingAckReceived)


def framed(message: bytes, size: int | None = None) -> bytes:
    return b"\0" + struct.pack(">I", len(message) if size is None else size) + message


@asynccontextmanager
async def connecting(host: str, port: int) -> AsyncIterator[Callable[[], Awaitable[Peer]]]:
    """Makes connections to an address, and closes them."""
    peers: list[Peer] = []

    async def connect() -> Peer:
        peer = Peer(*await asyncio.open_connection(host, port))
        peers.append(peer)
        await peer.settled()
        return peer

    try:
        yield connect
    finally:
        for peer in peers:
            peer.writer.close()
            with suppress(ConnectionError):
                await peer.writer.wait_closed()
