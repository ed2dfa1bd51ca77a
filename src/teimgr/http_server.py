"""HTTP listeners of this host: a bound socket, and a server that leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from teimgr.errors import Cancelled, InvalidConfig, PortConflict

_CLOSE_GRACE_S = 5

_OFFERS_H2C = re.compile(rb"^[A-Z]+ [^\r\n]* HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*?upgrade: *h2c\r\n", re.IGNORECASE)
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)

# How a client of HTTP/2 begins that knows beforehand that the server speaks it, up to where no HTTP/1 can follow.
_H2_BEGINS = b"PRI * HTTP/2.0"
_FIRST_BYTES_S = 20.0
_OPEN_FILES = 65536  # where the system sets no limit

_LAST_ANSWER = (b"connection", b"close")

AsgiApp = Callable[..., Any]


class H2Connection(Protocol):
    """What a server asks of a connection of HTTP/2, beside what asyncio does."""

    def leave(self) -> None:
        """Send the client elsewhere with its next call."""

    def shutdown(self) -> None:
        """The server ends."""


# From the server's books of its connections and tasks to the protocol of a new connection.
H2Factory = Callable[[ServerState], asyncio.Protocol]


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that has the address, and does not listen yet.

    Raises:
        PortConflict: somebody has it.
        InvalidConfig: it is no address of this host.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortConflict(port, "another process") from error
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class Listener:
    """A server that listens."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._server.server_state.connections)

    async def secure(self, context: ssl.SSLContext) -> None:
        """Use `context` for every connection from now on; those that there are keep theirs.

        A new server on the same listening socket, because the authorities of a context in use can only be added to, and
        clients would resume sessions that the former ones let in. uvloop loses no connection by it; asyncio's own loop
        may lose one that it accepts in that moment.
        """
        server, config = self._server, self._server.config
        kind: Any = config.http_protocol_class
        protocol = partial(kind, config=config, server_state=server.server_state, app_state=server.lifespan.state)
        loop = asyncio.get_running_loop()
        former = server.servers
        sockets = [sock.dup() for each in former for sock in each.sockets]
        server.servers = [
            await loop.create_server(protocol, sock=sock, ssl=context, backlog=config.backlog) for sock in sockets
        ]
        for each in former:
            each.close()

    def leave(self) -> None:
        """Leave the address to those who share the socket.

        No connection is accepted any more, and each that there is ends with its next answer, which says so: a client
        that keeps its connection is not cut off between two requests.
        """
        for server in self._server.servers:
            server.close()
        state = self._server.server_state
        self._server.config.encoded_headers.append(_LAST_ANSWER)  # what uvicorn makes the list of the next second from
        state.default_headers.append(_LAST_ANSWER)  # the list of this one, which requests in flight hold
        for connection in tuple(state.connections):
            if not isinstance(connection, HttpToolsProtocol | ProtocolSniffer):
                cast(H2Connection, connection).leave()


@contextlib.asynccontextmanager
async def serving(
    app: AsgiApp, sock: socket.socket, h2: H2Factory | None = None, **tls: Any
) -> AsyncIterator[Listener]:
    """Serve `app` on `sock` while the body runs; calls in flight are answered before it ends. Closes the socket.

    `h2` makes the protocol of a connection that speaks HTTP/2 from its first byte; without it there are none. `tls` are
    arguments of uvicorn, as `front.tls.uvicorn_options` gives them. The body starts once the server listens.

    Raises:
        PortConflict: somebody else began to listen on the address since it was bound.
        OSError: a file of `tls` cannot be used.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
        **({"http": HttpProtocol if h2 is None else partial(ProtocolSniffer, h2)} | tls),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await _listening(server, task, sock)
        yield Listener(server)
    finally:
        server.should_exit = True
        await _ended(task)
        sock.close()


async def _listening(server: _Server, task: asyncio.Task[None], sock: socket.socket) -> None:
    """Return when connections are taken; raises what prevented it."""
    listening = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait({listening, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            raise PortConflict(sock.getsockname()[1], "a server that ended as soon as it was started")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortConflict(sock.getsockname()[1], f"another process ({error.strerror})") from error
    finally:
        listening.cancel()


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for the server's end; why it failed to start was told before."""
    await asyncio.wait({task})


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 that never switches protocols: an offer of h2c, as Java's client makes, is not heard.

    httptools takes everything behind such an offer for the other protocol, so the body of the request would be lost.
    """

    def data_received(self, data: bytes) -> None:
        """Parse what came, without the offer."""
        if _OFFERS_H2C.search(data):
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + body
        super().data_received(data)


def max_connections() -> int:
    """How many clients may be connected: half of the files that the process may open, for it needs some itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit if limit > 0 else _OPEN_FILES) // 2


class ProtocolSniffer(asyncio.Protocol):
    """Looks at the first bytes of a connection, and hands it to who speaks that protocol: HTTP/2 or HTTP/1.

    One connection too many is closed at once, one that does not say enough within a limit then. The arguments are those
    that uvicorn makes the protocol of a connection with.
    """

    def __init__(self, h2: H2Factory, *, server_state: ServerState, **rest: Any) -> None:
        self._h2 = h2
        self._books = server_state
        self._rest = rest
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait, unless too many are here."""
        self._transport = cast(asyncio.Transport, transport)
        self._limit = asyncio.get_running_loop().call_later(_FIRST_BYTES_S, transport.close)
        if len(self._books.connections) >= max_connections():
            self._transport.abort()
        else:
            self._books.connections.add(cast(Any, self))

    def data_received(self, data: bytes) -> None:
        """Decide as soon as it is certain."""
        self._seen += data
        if len(self._seen) < len(_H2_BEGINS) and _H2_BEGINS.startswith(self._seen):
            return
        self._leave()
        protocol: Any
        if self._seen.startswith(_H2_BEGINS):
            protocol = self._h2(self._books)
        else:
            protocol = HttpProtocol(server_state=self._books, **self._rest)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._seen)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left before it said what it wanted."""
        self._leave()

    def shutdown(self) -> None:
        """The server ends."""
        self._transport.close()

    def _leave(self) -> None:
        self._limit.cancel()
        self._books.connections.discard(cast(Any, self))


class _Server(uvicorn.Server):
    """Uvicorn that says when it listens, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if not self.should_exit:
            self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


_THROW_AWAY_BYTES = 64 * 2**20

AnswerT = TypeVar("AnswerT")


def media_type(content_type: str) -> str:
    """The type that a Content-Type header names, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header names JSON, or a form of it such as application/problem+json."""
    kind = media_type(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def read_limited(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """A request's whole body; None when it is larger than `limit_bytes`."""
    body = bytearray()
    return bytes(body) if await read_into(body, chunks, limit_bytes) else None


async def read_into(buffer: bytearray, chunks: AsyncIterator[bytes], limit_bytes: int) -> bool:
    """Append the whole body; False, and an empty buffer, when it is larger than `limit_bytes`.

    The rest of a body that is too large is read and thrown away, to a bound: a client that is cut off while it still
    sends never sees the answer that says why.
    """
    room, thrown_away = limit_bytes, 0
    async for chunk in chunks:
        room -= len(chunk)
        if room >= 0:
            buffer += chunk
            continue
        buffer.clear()
        thrown_away += len(chunk)
        if thrown_away > _THROW_AWAY_BYTES:
            break
    return room >= 0


async def unless_hung_up(answering: Coroutine[Any, Any, AnswerT], receive: Callable[[], Awaitable[Any]]) -> AnswerT:
    """The answer, unless the client hangs up first: then what it asked for is given up.

    `receive` is ASGI's, of a request whose body was read.

    Raises:
        Cancelled: nobody will read the answer.
        TeimgrError: as `answering` does.
    """
    answered = asyncio.ensure_future(answering)
    hung_up = asyncio.ensure_future(_hung_up(receive))
    either: set[asyncio.Future[Any]] = {answered, hung_up}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise Cancelled("the client hung up")
    finally:
        for one in either:
            one.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
