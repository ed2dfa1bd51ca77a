"""Copies of the sockets of a worker's ports, for the next worker of its instance.

All workers of an instance accept from one socket, so that no connection waits in the queue of one that ends: what the
old worker does not take, the new one does. The workers alone hold it. A daemon asks one of them for a copy when it
launches another, so the next daemon can do the same, and the port is closed when the last worker closes it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

from teimgr.launch.nursery import PORTS_LIMIT
from teimgr.wire.frames import HEADER, FrameType, Method, pack_header, unpack_header

_ANSWER_LIMIT_S = 2.0
_ANSWER_BYTES = 4096


async def borrow(path: Path) -> dict[int, socket.socket]:
    """The sockets that the worker at `path` gives, by port; none when it has none, is ending, or does not answer.

    The caller closes them.
    """
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.setblocking(False)
                return await _ask(link, path)
    except OSError:  # TimeoutError is one of them
        return {}


async def _ask(link: socket.socket, path: Path) -> dict[int, socket.socket]:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(link, str(path))
    await loop.sock_sendall(link, pack_header(0, FrameType.REQUEST, Method.SHARE_PORTS, 1))
    await _readable(link)
    # Descriptors come with the first byte of the answer, which is small enough to come whole.
    answer, descriptors, _, _ = socket.recv_fds(link, _ANSWER_BYTES, PORTS_LIMIT)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(answer) < HEADER.size or unpack_header(answer).type != FrameType.REPLY:
        return {}
    return dict(zip(json.loads(answer[HEADER.size :]), sockets, strict=True))


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link)
