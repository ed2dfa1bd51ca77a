"""Accepting: TLS handshakes within limits, a few connections in each turn, new certificates without another socket."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from teimgr.http import acceptor
from teimgr.http.acceptor import Acceptor, Context, GatedStream
from teimgr.http.connection_gate import ConnectionGate, Phase, PhaseLimit, Ticket
from teimgr.http.server import bind
from tests.support.credentials import Authority, needs_openssl
from tests.support.polling import eventually

ROOT = Path(__file__).parents[2]
ACCEPTING = re.compile(
    r"\b(?:(?:start|create)_(?:unix_)?server|connect_accepted_socket|sock_accept|socketserver|\w*HTTPServer)\b"
    r"|(?:sock|listener|server)\w*\.accept\("
)
# A record that begins a handshake, and does not end.
HELLO = b"\x16\x03\x01\x02\x00\x01"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    writer.close()


@asynccontextmanager
async def accepting(
    gate: ConnectionGate, context: Context = lambda: None, failures: list[Any] | None = None
) -> AsyncIterator[tuple[str, int]]:
    sock = bind("127.0.0.1", 0)
    sock.listen(2048)
    note = None if failures is None else lambda client, error: failures.append((client, error))
    accepts = Acceptor(sock, gate, lambda ticket: GatedStream(ticket, echo), context, note)
    accepts.start()
    try:
        yield sock.getsockname()
    finally:
        accepts.close()
        await accepts.wait_closed()
        sock.close()


async def asked(address: tuple[str, int], context: ssl.SSLContext | None = None) -> bytes:
    name = {} if context is None else {"server_hostname": "localhost"}
    reader, writer = await asyncio.open_connection(*address, ssl=context, **name)
    writer.write(b"hi\n")
    try:
        return await reader.read()
    finally:
        writer.close()


def contexts(folder: Path, name: str = "ca") -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server that demands certificates, and of a client that has one."""
    authority = Authority(folder / name, name)
    server, client = authority.server(), ssl.create_default_context(cafile=authority.ca)
    client.load_cert_chain(*authority.sign("client"))
    return server.context(), client


class Silent:
    """Connections that send `said`, and then nothing."""

    def __init__(self, address: tuple[str, int], count: int, said: bytes = b"", source: str = "127.0.0.1") -> None:
        self.sockets = [socket.create_connection(address, source_address=(source, 0)) for _ in range(count)]
        for sock in self.sockets:
            sock.sendall(said)
            sock.setblocking(False)

    async def closed(self, count: int) -> None:
        """Return once so many have been closed by the server."""
        await eventually(lambda: sum(map(self._is_closed, self.sockets)) >= count)

    def _is_closed(self, sock: socket.socket) -> bool:
        try:
            return not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@needs_openssl
@pytest.mark.parametrize(("said", "phase"), [(b"", Phase.SILENT), (HELLO, Phase.HANDSHAKE)])
async def test_a_handshake_that_does_not_come_or_end_is_counted_and_closed(
    said: bytes, phase: Phase, tmp_path: Path
) -> None:
    server, client = contexts(tmp_path)
    gate = ConnectionGate(100, {phase: PhaseLimit(0.5)})
    async with accepting(gate, lambda: server) as address, asyncio.timeout(30):
        silent = Silent(address, 20, said)
        await eventually(lambda: len(gate.lines[phase].tickets) == 20)
        assert gate.count == 20
        assert await asked(address, client) == b"hi\n"

        await silent.closed(20)
        assert gate.count == 0
        silent.close()


@needs_openssl
@pytest.mark.parametrize("said", [b"", HELLO])
async def test_handshakes_that_do_not_end_displace_each_other_and_no_client_that_goes_on(
    said: bytes, tmp_path: Path
) -> None:
    server, client = contexts(tmp_path)
    limit = PhaseLimit(60.0, connections=8, per_address=4)
    gate = ConnectionGate(1000, {Phase.SILENT: limit, Phase.HANDSHAKE: limit})
    async with accepting(gate, lambda: server) as address, asyncio.timeout(30):
        silent = Silent(address, 50, said)
        await silent.closed(46)

        assert [await asked(address, client) for _ in range(5)] == [b"hi\n"] * 5
        assert gate.count <= 4
        silent.close()
        await eventually(lambda: gate.count == 0)


@needs_openssl
async def test_a_client_without_a_certificate_is_told_of_and_leaves(tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    gate, failures = ConnectionGate(), list[Any]()
    async with accepting(gate, lambda: server, failures) as address, asyncio.timeout(30):
        for context in (stranger, stranger):
            with pytest.raises((OSError, AssertionError)):  # an alert, or the end behind it
                assert await asked(address, context)
        await eventually(lambda: len(failures) == 2)

        assert gate.count == 0
        assert [client for client, _ in failures] == ["127.0.0.1"] * 2
        assert "certificate" in str(failures[0][1])
        assert await asked(address, client) == b"hi\n"


@needs_openssl
async def test_a_new_context_counts_for_the_next_connection_and_a_handshake_goes_on(tmp_path: Path) -> None:
    (first, of_first), (second, of_second) = contexts(tmp_path, "one"), contexts(tmp_path, "two")
    current = [first]
    async with accepting(ConnectionGate(), lambda: current[0]) as address, asyncio.timeout(30):
        waits = socket.create_connection(address)
        assert await asked(address, of_first) == b"hi\n"  # accepted in their order
        current[0] = second

        assert await asked(address, of_second) == b"hi\n"
        with pytest.raises(ssl.SSLError):
            await asked(address, of_first)
        waits.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=waits, ssl=of_first, server_hostname="localhost")
        writer.write(b"hi\n")
        assert await reader.read() == b"hi\n"
        writer.close()


async def test_a_few_are_accepted_in_each_turn() -> None:
    """Thousands opened at once held the event loop, which then missed health probes."""
    gate, most = ConnectionGate(), 0
    async with accepting(gate) as address, asyncio.timeout(30):
        silent = Silent(address, 500)
        before = gate.count
        while before < 500:
            await asyncio.sleep(0)
            most, before = max(most, gate.count - before), gate.count
        silent.close()

    assert 0 < most <= acceptor._STARTS_PER_TURN


@pytest.mark.parametrize(("source", "behind"), [("127.0.0.1", 0), ("127.0.0.2", 0), ("127.0.0.2", 500)])
async def test_a_client_does_not_wait_for_all_connections_that_others_open(source: str, behind: int) -> None:
    """Neither for those before it, nor for those that clients of its own network open after it."""
    gate = ConnectionGate()
    async with accepting(gate) as address, asyncio.timeout(30):
        before = Silent(address, 1000)  # no turn of the loop meanwhile: they are in the backlog
        other = socket.create_connection(address, source_address=(source, 0))
        other.sendall(b"hi\n")
        other.setblocking(False)
        after = Silent(address, behind, source=source)

        assert await asyncio.get_running_loop().sock_recv(other, 10) == b"hi\n"
        assert gate.count < 600
        other.close()
        before.close()
        after.close()


async def test_what_is_over_the_limit_is_closed_and_told() -> None:
    gate, failures = ConnectionGate(1), list[Any]()
    tickets: list[Ticket] = []
    async with accepting(gate, failures=failures) as address, asyncio.timeout(30):
        ticket = gate.admit("192.0.2.1")
        assert ticket is not None
        ticket.enter(Phase.ANSWER)
        tickets.append(ticket)
        with pytest.raises((ConnectionError, AssertionError)):
            assert await asked(address)

        assert [str(error) for _, error in failures] == ["the port has 1 connections"]
        ticket.leave()
        assert await asked(address) == b"hi\n"


async def test_it_goes_on_when_descriptors_are_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.05)
    accept, failed = socket.socket.accept, list[int]()

    def exhausted(sock: socket.socket) -> Any:
        if len(failed) < 3:
            failed.append(1)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    async with accepting(ConnectionGate()) as address, asyncio.timeout(30):
        assert await asked(address) == b"hi\n"
    assert len(failed) == 3


def test_every_place_that_accepts_is_under_a_gate_or_in_the_designs_table() -> None:
    source = ROOT / "src/teimgr"
    found = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if ACCEPTING.search(path.read_text())
    } - {"http/acceptor.py"}
    _, table = (ROOT / "DESIGN.md").read_text().split("| accepts without a gate |")
    told = {row.split("`")[1] for row in table.split("\n\n")[0].splitlines()[2:]}

    assert found == told
