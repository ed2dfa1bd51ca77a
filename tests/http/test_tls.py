"""TLS whose work is shared among turns: what comes through it, and for how long the loop is held by what costs most."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from teimgr.http.tls import TlsTransport
from tests.support.credentials import Authority, needs_openssl
from tests.support.measures import watch_turns
from tests.support.polling import eventually, on_uvloop

pytestmark = needs_openssl
LIMIT_S = 60
CONNECTIONS = 40


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def server_context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("server"))
    return context


class Reading(asyncio.Protocol):
    """Keeps what it receives; `pauses` after each part until the next turn."""

    def __init__(self, *, pauses: bool = False) -> None:
        self.received = bytearray()
        self.has_ended = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._pauses = pauses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport.is_reading()
        self.received += data
        if self._pauses:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(0, self.transport.resume_reading)

    def eof_received(self) -> bool:
        self.has_ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Filling(asyncio.BufferedProtocol):
    """Keeps what it receives in a buffer of seven bytes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self._buffer = bytearray(7)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]


@asynccontextmanager
async def server(
    context: ssl.SSLContext, make: Callable[[], asyncio.BaseProtocol]
) -> AsyncIterator[tuple[int, list[TlsTransport]]]:
    """The port and the transports of its connections."""
    made: list[TlsTransport] = []

    def transport() -> TlsTransport:
        made.append(TlsTransport(context, make, "client"))
        return made[-1]

    listener = await asyncio.get_running_loop().create_server(transport, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield listener.sockets[0].getsockname()[1], made
    finally:
        for each in made:
            if each.is_connected:
                each.abort()
        listener.close()


class Client:
    """A TLS client that chooses the records."""

    def __init__(self, trust: ssl.SSLContext, port: int) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trust.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)

    async def shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await loop.sock_sendall(self.sock, self._outgoing.read())
                self._incoming.write(await loop.sock_recv(self.sock, 2**16))
        await loop.sock_sendall(self.sock, self._outgoing.read())

    def records(self, count: int, length: int = 1) -> bytes:
        for _ in range(count):
            self._tls.write(b"x" * length)
        return self._outgoing.read()


@on_uvloop
async def test_many_connections_in_records_of_one_byte_hold_the_loop_for_some_turns_only(
    authority: Authority, server_context: ssl.SSLContext
) -> None:
    """Each sends 2,500 records at once, which takes 3 ms to decrypt; together they would hold it for 0.1 s and more."""
    made, held = list[Reading](), [0.0]

    def protocol() -> Reading:
        made.append(Reading())
        return made[-1]

    async with server(server_context, protocol) as (port, _):
        trust = ssl.create_default_context(cafile=authority.ca)
        clients = [Client(trust, port) for _ in range(CONNECTIONS)]
        for client in clients:
            await client.shake_hands()
        sent = [client.records(2500) for client in clients]
        await eventually(lambda: len(made) == CONNECTIONS)
        watching = asyncio.create_task(watch_turns(held))
        for client, data in zip(clients, sent, strict=True):
            assert client.sock.send(data) == len(data)
        await eventually(lambda: all(len(each.received) == 2500 for each in made))
        watching.cancel()
        for client in clients:
            client.sock.close()
        for each in made:
            await each.lost
    assert max(held) < 0.04


@on_uvloop
async def test_a_large_write_holds_the_loop_for_some_turns_only_and_pauses_its_writer(
    authority: Authority, server_context: ssl.SSLContext
) -> None:
    """To encrypt 64 MiB takes 60 to 100 ms."""

    class Writing(Reading):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.told, self.sizes = list[str](), list[int]()

        def pause_writing(self) -> None:
            self.told.append("pause")
            self.sizes.append(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            self.told.append("resume")

    made, held, size = list[Writing](), [0.0], 64 * 2**20

    def protocol() -> Writing:
        made.append(Writing())
        return made[-1]

    async with server(server_context, protocol) as (port, _):
        client = Client(ssl.create_default_context(cafile=authority.ca), port)
        await client.shake_hands()
        await eventually(lambda: bool(made))
        watching = asyncio.create_task(watch_turns(held))
        made[0].transport.writelines([b"head", bytes(size)])
        assert made[0].told == ["pause"]
        assert made[0].sizes[0] >= size, "the budget of unread replies and the guard of stalls count all of it"
        assert made[0].transport.get_write_buffer_size() >= size
        received = 0
        while received < size:
            received += len(await asyncio.get_running_loop().sock_recv(client.sock, 2**20))
        await eventually(lambda: made[0].told[-1] == "resume")
        watching.cancel()
        client.sock.close()
        await made[0].lost
    assert made[0].told == ["pause", "resume"] * (len(made[0].told) // 2)
    assert max(held) < 0.03


@pytest.mark.parametrize("pauses", [False, True])
@on_uvloop
async def test_all_that_is_sent_arrives_in_order_and_then_its_end(
    authority: Authority, server_context: ssl.SSLContext, pauses: bool
) -> None:
    made: list[Reading] = []

    def protocol() -> Reading:
        made.append(Reading(pauses=pauses))
        return made[-1]

    data = bytes(range(256)) * 20_000
    async with server(server_context, protocol) as (port, _):
        trust = ssl.create_default_context(cafile=authority.ca)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
        for start in range(0, len(data), 100_001):
            writer.write(data[start : start + 100_001])
        await writer.drain()
        writer.close()
        await made[0].lost
    assert made[0].received == data
    assert made[0].has_ended


@on_uvloop
async def test_a_buffered_protocol_gets_all_of_it(authority: Authority, server_context: ssl.SSLContext) -> None:
    made: list[Filling] = []

    def protocol() -> Filling:
        made.append(Filling())
        return made[-1]

    async with server(server_context, protocol) as (port, _):
        trust = ssl.create_default_context(cafile=authority.ca)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
        writer.write(b"0123456789" * 10_000)
        await eventually(lambda: bool(made) and len(made[0].received) == 100_000)
        writer.close()
    assert made[0].received == b"0123456789" * 10_000


@on_uvloop
async def test_what_was_written_is_sent_before_the_close(authority: Authority, server_context: ssl.SSLContext) -> None:
    class Writing(Reading):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.writelines([b"a" * 3_000_000, memoryview(b"b")])
            self.transport.close()
            self.transport.write(b"never")

    def everything(port: int, trust: ssl.SSLContext) -> bytes:
        sock = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        with trust.wrap_socket(sock, server_hostname="localhost") as client, client.makefile("rb") as file:
            return file.read()

    async with server(server_context, Writing) as (port, _):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=ssl.create_default_context(cafile=authority.ca), server_hostname="localhost"
        )
        assert len(await reader.read()) == 3_000_001, "which reads with pauses"
        writer.close()
        received = await asyncio.to_thread(everything, port, ssl.create_default_context(cafile=authority.ca))
        assert len(received) == 3_000_001
        assert received == b"a" * 3_000_000 + b"b"


@on_uvloop
async def test_what_is_no_handshake_is_told_and_ends_the_connection(server_context: ssl.SSLContext) -> None:
    async with server(server_context, Reading) as (port, made):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() in (b"", b"\x15\x03\x01\x00\x02\x02\x46")  # an alert, or none
        with pytest.raises(ssl.SSLError, match="HTTP_REQUEST"):
            await made[0].handshake
        writer.close()


@on_uvloop
async def test_a_client_that_leaves_in_the_handshake_is_told(server_context: ssl.SSLContext) -> None:
    async with server(server_context, Reading) as (port, made):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        writer.close()
        await eventually(lambda: bool(made))
        with pytest.raises(ConnectionError):
            await made[0].handshake


@on_uvloop
async def test_a_broken_record_ends_the_connection(authority: Authority, server_context: ssl.SSLContext) -> None:
    made: list[Reading] = []

    def protocol() -> Reading:
        made.append(Reading())
        return made[-1]

    async with server(server_context, protocol) as (port, _):
        client = Client(ssl.create_default_context(cafile=authority.ca), port)
        await client.shake_hands()
        await asyncio.get_running_loop().sock_sendall(client.sock, b"\x17\x03\x03\x00\x20" + bytes(32))
        await eventually(lambda: bool(made) and made[0].lost.done())
        client.sock.close()
    assert made[0].received == b""
