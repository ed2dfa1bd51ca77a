"""Attacks by HTTP/2 frames: floods of those that cost no stream, header blocks, and frames that never end."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

import hpack

from tests.fuzz.http2 import PREFACE
from tests.fuzz.victim.attack import Attack, Strike, together, wire
from tests.fuzz.victim.target import ATTACKER, KEYS, SHARED, Target
from tests.support.http_peers import head, request

_HEAD = struct.Struct(">BHBBI")
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS, _PRIORITY_FLAG = 1, 4, 0x20
_HELD_S = 3.0
_KEY = ("authorization", f"Bearer {KEYS[ATTACKER]}")
_GRPC = head("/tei_multiplexer.v1.TeiMultiplexer/Embed", authorization=_KEY[1])
_HTTP = request("/health")


def attacks() -> Iterator[Attack]:
    """Every one of them, on each port that has HTTP/2."""
    for name, frames in _FLOODS.items():
        for place, port in _PORTS.items():
            yield Attack("http2", f"{name}, {place}", partial(_flood, frames, port), most=8 * 2**20)
    for name, opening in _OPENINGS.items():
        for place, port in _PORTS.items():
            yield Attack("http2", f"{name}, {place}", partial(_many, opening, port), 20, 1000, "connections")


_PORTS: dict[str, Callable[[Target], int]] = {
    "REST": lambda target: target.daemon.api_port,
    "mux": lambda target: target.daemon.grpc_port,
    "instance port": lambda target: target.ports[SHARED],
}


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"", size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    return _HEAD.pack(length >> 16 & 0xFF, length & 0xFFFF, kind, flags, stream) + payload


def _block(fields: list[tuple[str, str]], *, huffman: bool = True) -> bytes:
    return bytes(hpack.Encoder().encode(fields, huffman=huffman))


def _opened(stream: int = 1, flags: int = _END_HEADERS) -> bytes:
    return _frame(_HEADERS, flags, stream, _block(_GRPC))


def _repeated(frame: bytes, size: int) -> bytes:
    return frame * max(1, size // len(frame))


def _settings(chance: random.Random, size: int) -> bytes:
    entries = b"".join(struct.pack(">HI", chance.choice((1, 4, 5, 6, 99)), 16384) for _ in range(min(size, 2**18) // 6))
    return _repeated(_frame(_SETTINGS, 0, 0, entries), size)


def _resets(chance: random.Random, size: int) -> bytes:
    block, reset = _block(_GRPC), struct.pack(">I", 8)
    count = size // (len(block) + 22)
    return b"".join(
        _frame(_HEADERS, _END_HEADERS, 2 * n + 1, block) + _frame(_RST, 0, 2 * n + 1, reset) for n in range(count)
    )


def _calls(fields: list[tuple[str, str]], chance: random.Random, size: int) -> bytes:
    block = _block(fields)
    return b"".join(
        _frame(_HEADERS, _END_HEADERS | _END_STREAM, 2 * n + 1, block) for n in range(size // (len(block) + 9))
    )


def _huffman(chance: random.Random, size: int) -> bytes:
    """Header blocks of 60 KiB, Huffman strings of the shortest codes, a stream for each."""
    block = _block([*_HTTP, ("x-long", "0" * (min(size, 60_000) * 8 // 5))])
    parts = [block[at : at + 16384] for at in range(0, len(block), 16384)]
    found = []
    for number in range(max(1, size // len(block))):
        stream = 2 * number + 1
        last = len(parts) - 1
        found += [
            _frame(_CONTINUATION if at else _HEADERS, _END_HEADERS if at == last else 0, stream, part)
            for at, part in enumerate(parts)
        ]
    return b"".join(found)


def _continuations(chance: random.Random, size: int) -> bytes:
    part = chance.choice((b"", b"\x00\x01a\x01b" * 100))
    return _frame(_HEADERS, 0, 1, _block(_HTTP)) + _repeated(_frame(_CONTINUATION, 0, 1, part), size)


def _indexed(chance: random.Random, size: int) -> bytes:
    """One long field in the table, then referred to again and again."""
    encoder = hpack.Encoder()
    first = bytes(encoder.encode([*_HTTP, ("x-bomb", "b" * 3900)]))
    again = bytes(encoder.encode([*_HTTP])) + b"\xbe" * min(size, 16000)
    streams = range(3, 3 + 2 * (size // (len(again) + 9)), 2)
    return _frame(_HEADERS, 5, 1, first) + b"".join(_frame(_HEADERS, 5, stream, again) for stream in streams)


_FLOODS: dict[str, Callable[[random.Random, int], bytes]] = {
    "WINDOW_UPDATE": lambda chance, size: _repeated(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)), size),
    "WINDOW_UPDATE of a stream": lambda chance, size: (
        _opened() + _repeated(_frame(_WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)), size)
    ),
    "SETTINGS, long": _settings,
    "SETTINGS, empty": lambda chance, size: _repeated(_frame(_SETTINGS, 0, 0), size),
    "SETTINGS acknowledged": lambda chance, size: _repeated(_frame(_SETTINGS, 1, 0), size),
    "SETTINGS of windows": lambda chance, size: (
        b"".join(_opened(2 * n + 1) for n in range(100))
        + _repeated(b"".join(_frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window)) for window in (2**31 - 1, 0)), size)
    ),
    "PING": lambda chance, size: _repeated(_frame(_PING, 0, 0, b"12345678"), size),
    "PRIORITY": lambda chance, size: _repeated(_frame(_PRIORITY, 0, 3, b"\0\0\0\0\1"), size),
    "resets": _resets,
    "resets of closed streams": lambda chance, size: (
        _calls(_HTTP, chance, 40) + _repeated(_frame(_RST, 0, 1, b"\0\0\0\x08"), size)
    ),
    "calls of gRPC": partial(_calls, _GRPC),
    "requests": partial(_calls, _HTTP),
    "DATA, empty": lambda chance, size: _opened() + _repeated(_frame(_DATA, 0, 1), size),
    "DATA, padded": lambda chance, size: _opened() + _repeated(_frame(_DATA, 8, 1, b"\xff" + b"\0" * 255), size),
    "DATA of one byte": lambda chance, size: _opened() + _repeated(_frame(_DATA, 0, 1, b"\0"), size),
    "CONTINUATION": _continuations,
    "header blocks, Huffman": _huffman,
    "header blocks, indexed": _indexed,
    "unknown frames": lambda chance, size: _repeated(_frame(77, 0, 0, b"u" * min(size, 16384)), size),
    "unknown frames, long": lambda chance, size: _repeated(_frame(77, 0, 0, b"u" * min(size, 2**18)), size),
    "ALTSVC, empty": lambda chance, size: _repeated(_frame(10, 0, 0), size),
}


def _flood(
    make: Callable[[random.Random, int], bytes],
    port: Callable[[Target], int],
    target: Target,
    chance: random.Random,
    size: int,
) -> Strike:
    flood, reads = PREFACE + _frame(_SETTINGS, 0, 0) + make(chance, size), chance.random() < 0.5

    async def one() -> str:
        async with wire(target, port(target)) as connection:
            sending = asyncio.create_task(connection.send_at_most(flood, 3 * _HELD_S))
            if reads:
                await connection.drained(3 * _HELD_S)
            sent = await sending
            return sent if reads else f"{sent}, {await connection.drained(_HELD_S / 3)}"

    return together([one] * chance.choice((1, 1, 3)))


_OPENINGS: dict[str, Callable[[random.Random], bytes]] = {
    "preface alone": lambda chance: PREFACE,
    "preface begun": lambda chance: PREFACE[: chance.randint(1, len(PREFACE) - 1)],
    "no stream": lambda chance: PREFACE + _frame(_SETTINGS, 0, 0),
    "frame begun": lambda chance: (
        PREFACE + _frame(_SETTINGS, 0, 0) + _opened() + _frame(_DATA, 0, 1, b"\0" * 16000, size=16384)
    ),
    "long frame begun": lambda chance: PREFACE + _frame(_SETTINGS, 0, 0, b"\0" * 200_000, size=2**18 - 4),
    "header block begun": lambda chance: PREFACE + _frame(_SETTINGS, 0, 0) + _opened(flags=0),
    "message begun": lambda chance: (
        PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _opened()
        + _frame(_DATA, 0, 1, struct.pack(">BI", 0, 30 * 2**20) + b"a" * 9000)
    ),
    "messages announced": lambda chance: (
        PREFACE
        + _frame(_SETTINGS, 0, 0)
        + b"".join(
            _opened(2 * n + 1) + _frame(_DATA, 0, 2 * n + 1, struct.pack(">BI", 0, 39 * 2**20)) for n in range(20)
        )
    ),
}


def _many(
    opening: Callable[[random.Random], bytes],
    port: Callable[[Target], int],
    target: Target,
    chance: random.Random,
    count: int,
) -> Strike:
    first = opening(chance)

    async def one(stack: AsyncExitStack) -> bool:
        try:
            connection = await stack.enter_async_context(wire(target, port(target)))
        except OSError:
            return False
        return await connection.send_at_most(first, _HELD_S) == "sent"

    async def strike() -> str:
        taken = 0
        async with AsyncExitStack() as stack:
            for start in range(0, count, 200):
                taken += sum(await asyncio.gather(*(one(stack) for _ in range(min(200, count - start)))))
            await asyncio.sleep(_HELD_S)
        return "all taken" if taken == count else "some refused"

    return strike
