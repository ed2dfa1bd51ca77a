"""Applications and clients of an HTTP server under test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
