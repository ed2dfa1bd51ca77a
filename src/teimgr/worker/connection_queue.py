"""Queue over which the workers of one instance pass client connections to each other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

# Numbers of the two ends among the shared sockets; positive numbers are ports.
RECEIVE_END = -1
SEND_END = -2


class ConnectionQueue:
    """A pair of connected sockets. Every worker of the instance has both ends, so any serving worker takes connections
    from a leaving one. A message is a port number, with the connection as ancillary data.

    `shared` are the sockets from another worker; the first worker of an instance makes the pair.
    """

    def __init__(self, shared: Mapping[int, socket.socket]) -> None:
        if RECEIVE_END in shared and SEND_END in shared:
            self._receive, self._send = shared[RECEIVE_END], shared[SEND_END]
        else:
            self._receive, self._send = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, socket.socket]] = deque()

    @property
    def ends(self) -> dict[int, socket.socket]:
        return {RECEIVE_END: self._receive, SEND_END: self._send}

    @property
    def is_sending(self) -> bool:
        """True if passed-on connections wait in this process for room in the queue."""
        return bool(self._waiting)

    def serve(self, take: Callable[[int, socket.socket], None]) -> None:
        """Call `take` with the port and the socket of each connection that is passed on, until `leave`."""
        self._loop.add_reader(self._receive, self._receive_one, take)

    def take_last(self, take: Callable[[int, socket.socket], None]) -> None:
        """Call `take` with each connection in the queue, after the processes that filled it have ended."""
        while self._receive_one(take):
            pass

    def leave(self) -> None:
        self._loop.remove_reader(self._receive)

    def pass_on(self, port: int, connection: socket.socket) -> None:
        """Append a connection to the queue once there is room."""
        self._waiting.append((port, connection))
        self._send_waiting()

    def close(self) -> None:
        self.leave()
        self._loop.remove_writer(self._send)
        for _, connection in self._waiting:
            connection.close()
        self._receive.close()
        self._send.close()

    def _receive_one(self, take: Callable[[int, socket.socket], None]) -> bool:
        """Receive one connection, leaving the rest to idle workers of the instance; False if none came."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._receive, 16, 1)
        except BlockingIOError:  # another worker took it
            return False
        for descriptor in descriptors:  # empty if the limit of open files is reached
            take(int(message), socket.socket(fileno=descriptor))
        return bool(message)

    def _send_waiting(self) -> None:
        while self._waiting:
            port, connection = self._waiting[0]
            try:
                socket.send_fds(self._send, [b"%d" % port], [connection.fileno()])
            except BlockingIOError:
                self._loop.add_writer(self._send, self._send_waiting)
                return
            except OSError as error:
                log.warning("passing on a client connection failed, closing it: %s", error)
            self._waiting.popleft()
            connection.close()
        self._loop.remove_writer(self._send)
