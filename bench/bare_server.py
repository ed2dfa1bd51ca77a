"""`python -m bench.bare_server`: an HTTP server that answers every POST with the same bytes.

It is the yardstick of what is around a model: no Python server on uvloop can answer for less. The first line it writes
is its port; it ends with stdin.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvloop

_BODY = b"0" * 4096
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@contextmanager
def bare_server() -> Iterator[tuple[int, int]]:
    """A running one: its port and pid."""
    command = [sys.executable, "-m", "bench.bare_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


class Connection(asyncio.Protocol):
    """One client with keep-alive."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._buffer, 0, head + 2)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) >= end:
            self._buffer = self._buffer[end:]  # a caller waits for its reply: one request at a time
            self._transport.write(_REPLY)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
