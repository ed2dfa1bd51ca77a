"""The other end of a server under test: HTTP/1.1 connections, an HTTP/2 peer, a client of reflection."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
from grpc_reflection.v1alpha import reflection_pb2

from teimgr.http.connection_gate import LIMITS, ConnectionGate, Phase, Ticket


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def within(seconds: Mapping[Phase, float]) -> ConnectionGate:
    """A gate with other time limits for these phases."""
    return ConnectionGate(limits={phase: replace(LIMITS[phase], seconds=limit) for phase, limit in seconds.items()})


class Echo(asyncio.Protocol):
    """Stands for HTTP/2: sends back whatever comes."""

    def __init__(self, books: Any, ticket: Ticket) -> None:
        self._books = books
        self._ticket = ticket

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ticket.enter(Phase.IDLE)
        self._books.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.leave()
        self._books.connections.discard(self)

    def shutdown(self) -> None:
        self._transport.close()


async def connected(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*sock.getsockname())


async def answered_at(path: Path) -> bytes:
    """The answer to a request over a new connection to a Unix socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def answered(port: int) -> bool:
    """Whether a new connection gets an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return bool(await reader.read())
    except ConnectionError:
        return False
    finally:
        writer.close()


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


Reflect = Callable[..., Awaitable[Any]]


def reflection(channel: Any, version: str) -> Reflect:
    """Sends one request, given by its fields, to the service of this version; the result is the one response."""
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**fields: Any) -> Any:
        (response,) = [each async for each in method([reflection_pb2.ServerReflectionRequest(**fields)])]
        return response

    return ask


class Feed:
    """A request stream that the test feeds message by message.

    Where the server ends the stream, nothing more may be on its way then, not even the feed's end: grpc.aio puts a
    status of its own in place of the server's when a write comes too late (grpc issue 36066).
    """

    def __init__(self, *messages: Any) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.say(*messages)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._messages.put_nowait(message)

    def end(self) -> None:
        self._messages.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not None:
            yield message
