"""Attacks by how a request comes over HTTP/1 and TLS: slowly, in great number, without an end, or not at all."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

from tests.fuzz.victim.attack import ADDRESS, Attack, Strike, Wire, head, together, wire
from tests.fuzz.victim.target import SHARED, Target

_HELD_S = 3.0
_MAX_CONNECTIONS = 4000
_CHUNKED = ("content-type: application/json", "transfer-encoding: chunked")

Talk = Callable[[Wire, random.Random, int], Awaitable[str]]


def attacks() -> Iterator[Attack]:
    """Every one of them, on the port of the daemon and on that of an instance."""
    for name, talk in _STREAMS.items():
        for place, port in _PORTS.items():
            yield Attack("http1", f"{name}, {place}", partial(_streamed, talk, port))
    for name, opening in _OPENINGS.items():
        for place, port in _PORTS.items():
            made = partial(_many, opening, port)
            yield Attack("http1", f"{name}, {place}", made, 50, _MAX_CONNECTIONS, "connections")
    for name in ("heads begun", "bodies begun"):
        for place, port in _PORTS.items():
            made = partial(_many, _OPENINGS[name], port, resets=True)
            yield Attack("http1", f"{name} and reset, {place}", made, 50, _MAX_CONNECTIONS, "connections")
    for name, opening in _HANDSHAKES.items():
        for place, port in (("REST", _api), ("mux", _mux)):
            yield Attack(
                "tls", f"{name}, {place}", partial(_silent, opening, port), 50, _MAX_CONNECTIONS, "connections"
            )
    for place, port in (("REST", _api), ("mux", _mux)):
        yield Attack("tls", f"records of one byte, {place}", partial(_small_records, port), 20, 1000, "connections")


def _api(target: Target) -> int:
    return target.daemon.api_port


def _mux(target: Target) -> int:
    return target.daemon.grpc_port


_PORTS = {"REST": _api, "instance port": lambda target: target.ports[SHARED]}


# Bytes without an end, on one connection.


def _streamed(talk: Talk, port: Callable[[Target], int], target: Target, chance: random.Random, size: int) -> Strike:
    async def one() -> str:
        async with wire(target, port(target)) as connection:
            return await talk(connection, chance, size)

    return together([one] * chance.choice((1, 1, 3)))


async def _pipelined(connection: Wire, chance: random.Random, size: int) -> str:
    request = head("GET /health", key=None)
    whole = await connection.send_at_most(request * (size // len(request)), _HELD_S)
    return f"{whole}, {await connection.drained(_HELD_S)}"


async def _trailers(connection: Wire, chance: random.Random, size: int) -> str:
    await connection.send(head("POST /v1/embeddings", *_CHUNKED, key=None) + b"2\r\n{}\r\n0\r\n")
    sent = await connection.send_at_most(b"x-trailer: " + b"y" * 100 + b"\r\n", _HELD_S, size)
    return f"{sent}, {await connection.first_line(2)}"


async def _trailers_with_key(connection: Wire, chance: random.Random, size: int) -> str:
    await connection.send(head("POST /v1/embeddings", *_CHUNKED) + b"2\r\n{}\r\n0\r\n")
    return await connection.send_at_most(b"x: y\r\n", _HELD_S, size)


async def _small_chunks(connection: Wire, chance: random.Random, size: int) -> str:
    await connection.send(head("POST /v1/embeddings", *_CHUNKED))
    return await connection.send_at_most(b"1\r\n[\r\n", 10 * _HELD_S, size)


async def _extensions(connection: Wire, chance: random.Random, size: int) -> str:
    await connection.send(head("POST /v1/embeddings", *_CHUNKED))
    return await connection.send_at_most(b"1;" + b"e" * size + b"\r\n[\r\n", _HELD_S)


async def _long_line(connection: Wire, chance: random.Random, size: int) -> str:
    return await connection.send_at_most(b"GET /" + b"a" * size, _HELD_S)


async def _many_fields(connection: Wire, chance: random.Random, size: int) -> str:
    return await connection.send_at_most(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * (size // 6), _HELD_S)


async def _query(connection: Wire, chance: random.Random, size: int) -> str:
    line = b"GET /instances?" + b"a=b&%" * (min(size, 60_000) // 5) + b" HTTP/1.1\r\nhost: a\r\n\r\n"
    await connection.send(line * max(1, size // len(line)))
    return await connection.drained(_HELD_S)


async def _after_401(connection: Wire, chance: random.Random, size: int) -> str:
    await connection.send(head("POST /v1/embeddings", f"content-length: {size}", key=None))
    answer = await connection.first_line(5)
    return f"{answer}, {await connection.send_at_most(b'x' * 1024, _HELD_S, size)}"


_STREAMS: dict[str, Talk] = {
    "pipelined requests": _pipelined,
    "trailers": _trailers,
    "trailers with a key": _trailers_with_key,
    "chunks of one byte": _small_chunks,
    "chunk extension": _extensions,
    "line without an end": _long_line,
    "fields without an end": _many_fields,
    "queries": _query,
    "body after a 401": _after_401,
}


# Connections in great number.


def _many(
    opening: Callable[[], bytes],
    port: Callable[[Target], int],
    target: Target,
    chance: random.Random,
    count: int,
    *,
    resets: bool = False,
) -> Strike:
    first = opening()

    async def strike() -> str:
        opened = 0
        async with AsyncExitStack() as stack:
            for start in range(0, count, 500):
                made = [_opened(stack, target, port(target), first, resets) for _ in range(min(500, count - start))]
                opened += sum(await asyncio.gather(*made))
            await asyncio.sleep(_HELD_S)
        return "all taken" if opened == count else "some refused"

    return strike


async def _opened(stack: AsyncExitStack, target: Target, port: int, first: bytes, resets: bool) -> bool:
    try:
        connection = await stack.enter_async_context(wire(target, port))
    except OSError:
        return False
    if resets:
        connection.reset_when_closed()
    return not first or await connection.send(first)


def _with_body(length: int, sent: bytes, *, key: str | None) -> bytes:
    return head("POST /v1/embeddings", "content-type: application/json", f"content-length: {length}", key=key) + sent


_OPENINGS: dict[str, Callable[[], bytes]] = {
    "silent connections": lambda: b"",
    "heads begun": lambda: b"GET /health HTTP/1.1\r\nhost: a\r\nx: ",
    "idle after an answer": lambda: head("GET /health", key=None),
    "401 and one byte more": lambda: _with_body(100, b"x", key=None),
    "bodies announced": lambda: _with_body(30 * 2**20, b"", key="attacker"),
    "bodies begun": lambda: _with_body(2**20, b'{"model": "shared", "input": "' + b"a" * 4096, key="attacker"),
    "chunks begun": lambda: head("POST /v1/embeddings", *_CHUNKED) + b"fffff\r\nabc",
    "expect 100": lambda: head("POST /v1/embeddings", "content-length: 1000", "expect: 100-continue"),
}


# Handshakes.


def _silent(
    opening: Callable[[random.Random], bytes],
    port: Callable[[Target], int],
    target: Target,
    chance: random.Random,
    count: int,
) -> Strike:
    first = opening(chance)

    async def one(stack: AsyncExitStack) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port(target), local_addr=ADDRESS)
            stack.callback(writer.transport.abort)
            writer.write(first)
        except OSError:
            return False
        return True

    async def strike() -> str:
        opened = 0
        async with AsyncExitStack() as stack:
            for start in range(0, count, 500):
                opened += sum(await asyncio.gather(*(one(stack) for _ in range(min(500, count - start)))))
            await asyncio.sleep(_HELD_S)
        return "all taken" if opened == count else "some refused"

    return strike


def _small_records(port: Callable[[Target], int], target: Target, chance: random.Random, count: int) -> Strike:
    """Connections that send one byte in each TLS record, 2,000 records each."""

    async def one() -> str:
        opened = await asyncio.to_thread(_handshaken, target, port(target))
        if opened is None:
            return "refused"
        sock, records = opened
        with sock:
            try:
                async with asyncio.timeout(_HELD_S):
                    await asyncio.get_running_loop().sock_sendall(sock, records)
                    await asyncio.get_running_loop().sock_recv(sock, 1)
            except (OSError, TimeoutError):
                return "cut off"
        return "answered"

    return together([one] * count)


def _handshaken(target: Target, port: int) -> tuple[socket.socket, bytes] | None:
    """A connection whose handshake is done, and 2,000 records of one byte; None where there is no TLS."""
    if target.trust is None:
        return None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = target.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    try:
        sock = socket.create_connection(("127.0.0.1", port), _HELD_S, ADDRESS)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                incoming.write(sock.recv(2**16))
        sock.sendall(outgoing.read())
    except OSError:
        return None
    for _ in range(2000):
        tls.write(b"x")
    sock.setblocking(False)
    return sock, outgoing.read()


_HANDSHAKES: dict[str, Callable[[random.Random], bytes]] = {
    "silent": lambda chance: b"",
    "record begun": lambda chance: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "record of noise": lambda chance: b"\x16\x03\x01\x40\x00" + chance.randbytes(2**14),
    "plain HTTP": lambda chance: b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
}
