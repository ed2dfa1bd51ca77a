"""HTTP listeners of this host: a bound socket, and a server that leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from teimgr.errors import InvalidConfig, PortConflict

_CLOSE_GRACE_S = 5

_THROW_AWAY_BYTES = 64 * 2**20

_OFFERS_H2C = re.compile(rb"^[A-Z]+ [^\r\n]* HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*?upgrade: *h2c\r\n", re.IGNORECASE)
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)

AsgiApp = Callable[..., Any]


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


@contextlib.asynccontextmanager
async def serving(app: AsgiApp, sock: socket.socket, **tls: Any) -> AsyncIterator[None]:
    """Serve `app` on `sock` while the body runs; calls in flight are answered before it ends. Closes the socket.

    `tls` are arguments of uvicorn, as `front.tls.uvicorn_options` gives them. The body starts once the server listens.

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
        **({"http": HttpProtocol} | tls),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await _listening(server, task, sock)
        yield
    finally:
        server.should_exit = True
        await _ended(task)
        sock.close()


async def read_limited(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """A request's whole body; None when it is larger than `limit_bytes`.

    The rest of a body that is too large is read and thrown away, to a bound: a client that is cut off while it still
    sends never sees the answer that says why.
    """
    body = bytearray()
    thrown_away = 0
    async for chunk in chunks:
        if thrown_away or len(body) + len(chunk) > limit_bytes:
            thrown_away += len(chunk)
            if thrown_away > _THROW_AWAY_BYTES:
                return None
        else:
            body += chunk
    return None if thrown_away else bytes(body)


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
