"""HTTP to a daemon's REST port, with only the standard library, for programs that must start fast.

The methods are coroutines, like those of `HttpChannel`, but block and never wait for an event loop.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

from teimgr.client.connection_causes import reason_of
from teimgr.client.http_replies import CONNECT_S, Reply, ReplyHead, Request, RestChannel, json_of
from teimgr.errors import DeadlineExceeded, InvalidConfig, Unavailable, Unreachable, ValidationError

_CHUNK_BYTES = 65536


class BlockingHttpChannel(RestChannel):
    """HTTP channel with one connection per call; nothing has to be opened or closed."""

    _context: Any = None

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - runs without an event loop

    @asynccontextmanager
    async def _reply(self, request: Request) -> AsyncIterator[ReplyHead]:
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        with self.reply(request) as (sock, reply):
            yield ReplyHead(reply.status, _headers(reply), _pieces(sock, reply, deadline))

    @contextmanager
    def reply(self, request: Request) -> Iterator[tuple[socket.socket, http.client.HTTPResponse]]:
        """Return the socket and the head of the reply.

        Raises Unreachable: no connection, or it was lost. DeadlineExceeded: one step took longer than `timeout_s`.
        """
        method, path, body, query, headers, timeout_s = request
        try:
            payload = json.dumps(body).encode() if isinstance(body, Mapping) else body
        except (TypeError, ValueError) as error:
            raise ValidationError(str(error)) from error
        typed = {} if payload is None else {"Content-Type": "application/json"}
        target = self._address.prefix + path + (f"?{urlencode(query)}" if query else "")
        connection = self._connection()
        try:
            sock = self._connect(connection)
            sock.settimeout(timeout_s)
            with suppress(BrokenPipeError):  # the server refused it early; the reply has the reason
                connection.request(
                    method, target, payload, {**self._headers, **typed, **headers, "Connection": "close"}
                )
            yield sock, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) and timeout_s is not None:
                raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error
            raise Unreachable(self._address.url, reason_of(error)) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.host, self._address.port, timeout=CONNECT_S)

    def _connect(self, connection: http.client.HTTPConnection) -> socket.socket:
        """Connect within `CONNECT_S`; over TLS, verify the server's name."""
        context = self._ssl_context() if self._address.secure else None
        try:
            if self._address.path:
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(CONNECT_S)
                connection.sock.connect(self._address.path)
            else:
                connection.connect()
            if context is not None:
                name = self._tls.server_name or self._address.host
                connection.sock = context.wrap_socket(connection.sock, server_hostname=name)
        except TimeoutError as error:
            raise Unreachable(self._address.url, f"no connection within {CONNECT_S:g} s") from error
        sock: socket.socket = connection.sock
        return sock

    def _ssl_context(self) -> Any:
        if self._context is None:
            self._context = self._tls.ssl_context()
        return self._context


def _headers(reply: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items()}


async def _pieces(sock: socket.socket, reply: http.client.HTTPResponse, deadline: float | None) -> AsyncIterator[bytes]:
    while True:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (piece := reply.read1(_CHUNK_BYTES)):
            return
        yield piece


_PATH = "/v1/files"
_PIECE_BYTES, _JSON_BYTES = 2**18, 2**20


def upload(channel: BlockingHttpChannel, path: Path, timeout_s: float) -> Any:
    """Send a file for a batch; return the file object of the reply. `timeout_s` bounds each step, not the whole.

    Raises InvalidConfig: the file cannot be read. TeimgrError: it is refused, or no daemon answers.
    """
    boundary = secrets.token_hex(16)
    name = "".join(each if each.isprintable() and each not in '"\\' else "_" for each in path.name)
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    head = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="{name}"\r\n\r\n'.encode()
    end = f"\r\n--{boundary}--\r\n".encode()
    with _disk(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        kind, length = f"multipart/form-data; boundary={boundary}", len(head) + size + len(end)
        headers = {"Content-Type": kind, "Content-Length": str(length)}
        form = _form(path, file, size, head, end)
        with channel.reply(Request("POST", _PATH, form, None, headers, timeout_s)) as (_, reply):
            return _json(reply)


def _form(path: Path, file: BinaryIO, size: int, head: bytes, end: bytes) -> Iterator[bytes]:
    yield head
    while size:
        with _disk(path, "read"):
            piece = file.read(min(size, _PIECE_BYTES))
        if not piece:
            raise InvalidConfig(f"{path}: the file became shorter while it was sent")
        size -= len(piece)
        yield piece
    yield end


def download(channel: BlockingHttpChannel, file_id: str, target: Path, timeout_s: float) -> None:
    """Write the bytes of a stored file to `target`, which appears once it is complete.

    Raises InvalidConfig: `target` cannot be written. TeimgrError: the file does not exist, or no daemon answers.
    """
    path, partial = f"{_PATH}/{quote(file_id, safe='')}/content", target.with_name(f"{target.name}.partial")
    with _disk(target, "written"):
        try:
            request = Request("GET", path, None, None, {}, timeout_s)
            with partial.open("wb") as file, channel.reply(request) as (_, reply):
                left = int(reply.headers["Content-Length"]) if reply.status == 200 else _json(reply)
                while piece := reply.read(min(left, _PIECE_BYTES)):
                    left -= len(piece)
                    with _disk(target, "written"):
                        file.write(piece)
            if left:
                raise Unavailable(f"GET {path}: the reply ended {left} bytes early")
            partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink()


def _json(reply: HTTPResponse) -> Any:
    return json_of(_PATH, Reply(reply.status, reply.read(_JSON_BYTES), _headers(reply)))


@contextmanager
def _disk(path: Path, what: str) -> Iterator[None]:
    """Raise disk errors as InvalidConfig with the path, so they are not taken for errors of the connection."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be {what}: {error.strerror}") from error
