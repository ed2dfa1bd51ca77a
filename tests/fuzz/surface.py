"""What a fuzzed surface reports, and the flood of raw bytes over sockets that several of them share."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import uvloop

# With so many connections open at once, the time that each waits in silence costs nothing.
AT_ONCE = 128
_QUIET_S = 0.03
_CLOSED_WITHIN_S = 30.0
_MAX_READ = 64 * 1024
_MAX_FAILURES = 10
_RESET = struct.pack("ii", 1, 0)
_VANISHING = 0.05


@dataclass
class Report:
    """What came of the cases of one surface. `failures` are broken invariants, each with its case."""

    surface: str
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory_mib: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Resident memory of each process after a tenth of the cases, and after all."""
    memory_by_part: list[dict[str, float]] = field(default_factory=list)
    """The same after every tenth."""

    def count(self, outcome: str) -> None:
        self.cases += 1
        self.outcomes[outcome] += 1

    def fail(self, what: str, case: bytes = b"") -> None:
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(f"{what}: {case[:2000]!r}" if case else what)


# Gives the outcome of a case from what was answered to it; raises AssertionError where that may not be.
Judge = Callable[[bytes], str]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]


@dataclass(frozen=True)
class Address:
    """A TCP port, called from the loopback address `source`, or the path of a unix socket."""

    port: int = 0
    path: str = ""
    source: str = "127.0.0.1"


def flood(addresses: Sequence[Address], cases: Iterable[bytes], judge: Judge, report: Report) -> None:
    """Send each case on a connection of its own, to one address after the other.

    A connection is closed for writing when it has been quiet for a while; the server must close it in turn.
    """
    uvloop.run(flooded(addresses, iter(cases), judge, report))


async def flooded(addresses: Sequence[Address], cases: Iterator[bytes], judge: Judge, report: Report) -> None:
    """As `flood`, within a loop that runs."""
    serial = iter(range(2**62))

    async def caller() -> None:
        for case in cases:
            number = next(serial)
            try:
                outcome = await _attempt(addresses[number % len(addresses)], case, judge, number)
            except Exception as error:  # of the connection, or of the judge
                outcome = "failed"
                report.fail(repr(error), case)
            report.count(outcome)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(caller())


async def _attempt(address: Address, case: bytes, judge: Judge, number: int) -> str:
    loop = asyncio.get_running_loop()
    if address.path:
        _, peer = await loop.create_unix_connection(lambda: _Peer(case, number), address.path)
    else:
        _, peer = await loop.create_connection(
            lambda: _Peer(case, number), "127.0.0.1", address.port, local_addr=(address.source, 0)
        )
    try:
        async with asyncio.timeout(_CLOSED_WITHIN_S):
            await peer.closed.wait()
    except TimeoutError:
        peer.transport.abort()
        raise AssertionError(f"not closed within {_CLOSED_WITHIN_S:g} s") from None
    return "vanished" if peer.is_vanishing else judge(bytes(peer.received))


class _Peer(asyncio.Protocol):
    """The client's end: sends its case in one or two parts, then is quiet."""

    def __init__(self, case: bytes, number: int) -> None:
        self._case = case
        self._chance = random.Random(number)
        self.is_vanishing = self._chance.random() < _VANISHING
        self.received = bytearray()
        self.closed = asyncio.Event()

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, made)  # uvloop's are no subclasses
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:  # no TIME_WAIT: there are fewer ports than cases
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._loop = asyncio.get_running_loop()
        self._spoke = time.monotonic()
        border = self._chance.randint(0, len(self._case)) if self._chance.random() < 0.3 else len(self._case)
        transport.write(self._case[:border])
        if border < len(self._case):
            self._loop.call_later(0.002, self._write, self._case[border:])
        self._loop.call_later(_QUIET_S, self._leave)

    def data_received(self, data: bytes) -> None:
        self._spoke = time.monotonic()
        if len(self.received) < _MAX_READ:
            self.received += data

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def _leave(self) -> None:
        if self.transport.is_closing():
            return
        quiet_s = time.monotonic() - self._spoke
        if quiet_s < _QUIET_S * 0.9:
            self._loop.call_later(_QUIET_S - quiet_s, self._leave)
        elif self.is_vanishing:
            self.transport.abort()
        else:
            try:
                self.transport.write_eof()
            except OSError:  # the server was quicker
                self.transport.abort()
