"""The listening sockets of an instance's ports, passed between its workers and the daemon."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from dataclasses import dataclass
from pathlib import Path

from teimgr.control.launch.nursery import PORTS_LIMIT
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.errors import PortConflict
from teimgr.http.connection_gate import BACKLOG
from teimgr.wire.frames import HEADER, FrameType, Method, pack_header, unpack_header
from teimgr.worker.connection_queue import ConnectionQueue

_SHARE_LIMIT_S = 15.0  # a loading worker may answer late
_SHARE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class JoinedPort:
    """An instance's port in a process that is not one of its workers, with the workers' connection queue."""

    listener: socket.socket
    queue: ConnectionQueue

    def copies(self) -> dict[int, socket.socket]:
        """For a worker, by the names of shared sockets; the caller closes them."""
        port = self.listener.getsockname()[1]
        return {name: sock.dup() for name, sock in {port: self.listener, **self.queue.ends}.items()}


async def borrow_ports(path: Path) -> dict[int, socket.socket]:
    """Copies of the listening sockets of the worker at `path`, by port; empty when it has none or does not answer.

    The caller closes them.

    Raises:
        LaunchFailed: this process has no descriptors left for them.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_SHARE_LIMIT_S):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.setblocking(False)
                await loop.sock_connect(link, str(path))
                await loop.sock_sendall(link, pack_header(0, FrameType.REQUEST, Method.SHARE_PORTS, 1))
                readable = asyncio.Event()
                loop.add_reader(link, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(link)
                # The reply with its descriptors is small enough for one read.
                answer, descriptors, _, _ = socket.recv_fds(link, _SHARE_BYTES, PORTS_LIMIT)
    except OSError:  # TimeoutError is one of them
        return {}
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(answer) < HEADER.size or unpack_header(answer).type != FrameType.REPLY:
        return {}
    numbers = json.loads(answer[HEADER.size :])
    if len(sockets) < len(numbers):  # the kernel drops descriptors above the limit
        for sock in sockets:
            sock.close()
        raise LaunchFailed("too many open files for an instance's ports: raise the limit of open files")
    return dict(zip(numbers, sockets, strict=True))


def listen_at(sock: socket.socket, port: int) -> None:
    """Listen on a socket that is bound to a port. Raises PortConflict: another process has begun to."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortConflict(port, "another process") from error
    sock.setblocking(False)
