"""What an attack is, and the connections that all attacks use."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio

from tests.fuzz.victim.target import ATTACKER, KEYS, Target

ANSWER_LIMIT_S = 60.0
# The attacker's own address, so that what is shared by address is seen to be.
ADDRESS = ("127.0.0.2", 0)
_PIECE = 256 * 1024

Strike = Callable[[], Awaitable[str]]
"""Sends what was made, and gives what came of it in a few words."""


@dataclass(frozen=True)
class Attack:
    """Inputs of one kind. `make` builds one of a size, so that the time of building is not that of the attack.

    Sizes are bytes, or where `unit` says so a number of connections or calls, from `least` to `most`. The same seed and
    size make the same input.
    """

    surface: str
    name: str
    make: Callable[[Target, random.Random, int], Strike]
    least: int = 16 * 1024
    most: int = 32 * 2**20 - 64 * 1024
    unit: str = "bytes"

    @property
    def title(self) -> str:
        return f"{self.surface}: {self.name}"


class Wire:
    """One raw connection to a port of this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> bool:
        """Send all of it; False where the server has closed the connection."""
        try:
            for start in range(0, len(data), _PIECE):
                self.writer.write(data[start : start + _PIECE])
                await self.writer.drain()
        except OSError:
            return False
        return True

    def reset_when_closed(self) -> None:
        """Have the end of the connection reset it, which the server cannot delay."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def send_at_most(self, data: bytes, limit_s: float, size: int = 0) -> str:
        """Send it, again and again until it is `size` bytes, for `limit_s` at most."""
        many = data * max(1, size // len(data))
        try:
            async with asyncio.timeout(limit_s):
                return "sent" if await self.send(many) else "cut off"
        except TimeoutError:
            return "held up"

    async def first_line(self, limit_s: float = ANSWER_LIMIT_S) -> str:
        """The first line of the answer; or what happened instead."""
        try:
            async with asyncio.timeout(limit_s):
                line = await self.reader.readline()
        except TimeoutError:
            return "no answer"
        except OSError:
            return "reset"
        return line.decode("latin-1").strip()[:40] or "closed"

    async def drained(self, limit_s: float) -> str:
        """Read until the server closes, or for `limit_s`."""
        count = 0
        try:
            async with asyncio.timeout(limit_s):
                while data := await self.reader.read(2**20):
                    count += len(data)
        except TimeoutError:
            return "left open"
        except OSError:
            return "reset"
        return "closed"


@asynccontextmanager
async def wire(target: Target, port: int) -> AsyncIterator[Wire]:
    """A connection, with TLS where the port has it; aborted at the end.

    Raises:
        OSError: the server does not take it.
    """
    trust = None if port in target.ports.values() else target.trust
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, local_addr=ADDRESS)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


def head(line: str, *fields: str, key: str | None = ATTACKER) -> bytes:
    """The head of an HTTP/1.1 request with a key of `target.KEYS`."""
    known = [f"authorization: Bearer {KEYS[key]}"] if key else []
    return "\r\n".join((f"{line} HTTP/1.1", "host: 127.0.0.1", *known, *fields)).encode() + b"\r\n\r\n"


def post(target: Target, port: int, path: str, body: bytes, *, key: str | None = ATTACKER, times: int = 1) -> Strike:
    """A POST of JSON, `times` at once."""
    said = head(f"POST {path}", "content-type: application/json", f"content-length: {len(body)}", key=key)

    async def one() -> str:
        async with wire(target, port) as connection:
            sending = asyncio.create_task(_sent(connection, said, body))
            answer = await connection.first_line()
            sending.cancel()
            await asyncio.wait([sending])
            return answer

    return together([one] * times)


async def _sent(connection: Wire, *parts: bytes) -> None:
    for part in parts:
        await connection.send(part)


def call(target: Target, port: int, path: str, message: bytes, *, times: int = 1) -> Strike:
    """A unary call over gRPC, `times` at once over one channel."""
    address, options = (
        f"127.0.0.1:{port}",
        (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)),
    )
    key = (("authorization", f"Bearer {KEYS[ATTACKER]}"),)

    async def strike() -> str:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            ask = channel.unary_unary(path)

            async def one() -> str:
                try:
                    await ask(message, timeout=ANSWER_LIMIT_S, metadata=key)
                except grpc.aio.AioRpcError as error:
                    return str(error.code().name)
                return "OK"

            return await together([one] * times)()

    return strike


def together(strikes: Sequence[Strike]) -> Strike:
    """All of them at once; the outcomes that came, each once."""

    async def strike() -> str:
        found = await asyncio.gather(*(one() for one in strikes), return_exceptions=True)
        outcomes = [type(each).__name__ if isinstance(each, BaseException) else each for each in found]
        return ", ".join(sorted(set(outcomes)))

    return strike
