"""Port allocation for instances: round-robin within a range, or a requested port if it is free."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping

from teimgr.errors import InvalidPort, PortAllocationFailed, PortConflict

UNPRIVILEGED_PORT = 1024
LAST_PORT = 65535
_PROMETHEUS_TRIES = 1000


class Ports:
    """Allocates from `[start, end)` on `host`, and metrics ports from `prometheus_start` upwards.

    `reserved` are the daemon's own ports: number → description.
    """

    def __init__(
        self, host: str, start: int, end: int, reserved: Mapping[int, str], prometheus_start: int = 9100
    ) -> None:
        self._host = host
        self._range = range(start, end)
        self._reserved = reserved
        self._next = start
        self._next_prometheus = prometheus_start

    def allocate(self, taken: Collection[int]) -> int:
        """A free port of the range that is not in `taken`.

        The search continues after the last result, so that a released port is not reused at once.

        Raises:
            PortAllocationFailed: no port is free.
        """
        start, size = self._range.start, len(self._range)
        for step in range(size):
            port = start + (self._next - start + step) % size
            if port not in taken and port not in self._reserved and is_free(self._host, port):
                self._next = port + 1
                return port
        raise PortAllocationFailed(
            f"Could not find free port in range [{start}, {self._range.stop}). Delete an instance, or widen "
            f"instance_port_start and instance_port_end"
        )

    def check(self, port: int, holders: Mapping[int, str]) -> int:
        """Return `port` if an instance may have it; `holders` are the instances' ports: number → name.

        Raises:
            InvalidPort: it is not a port number, or a privileged one.
            PortConflict: an instance, the daemon or another process has it.
        """
        if not UNPRIVILEGED_PORT <= port <= LAST_PORT:
            raise InvalidPort(f"Invalid port {port}: must be between {UNPRIVILEGED_PORT} and {LAST_PORT}")
        self.check_holders(port, holders)
        if not is_free(self._host, port):
            raise PortConflict(port, "another process")
        return port

    def check_holders(self, port: int, holders: Mapping[int, str]) -> None:
        """Check `port` against instances and the daemon, bound or not.

        Raises:
            PortConflict: one of them has it.
        """
        if port in holders:
            raise PortConflict(port, f"instance '{holders[port]}'")
        if port in self._reserved:
            raise PortConflict(port, self._reserved[port])

    def allocate_prometheus(self, taken: Collection[int]) -> int:
        """A free port from `prometheus_start` upwards, never the same twice.

        Raises:
            PortAllocationFailed: none of the next thousand is free.
        """
        first = self._next_prometheus
        for port in range(first, min(first + _PROMETHEUS_TRIES, LAST_PORT + 1)):
            if port not in taken and port not in self._reserved and is_free(self._host, port):
                self._next_prometheus = port + 1
                return port
        raise PortAllocationFailed(f"Could not find free port in range {first}-{first + _PROMETHEUS_TRIES}")


def is_free(host: str, port: int) -> bool:
    """Whether a listener could be bound now; connections in TIME_WAIT do not prevent it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
