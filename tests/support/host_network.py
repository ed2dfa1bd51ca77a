"""A bridge with a network namespace for each host of a cluster, whose links can be cut one by one; needs root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

_LIMIT_S = 10
# The run directory of the head is empty here, so none of its unix sockets can be reached.
_SEPARATE = 'mount -t tmpfs -o mode=0700 none "$1"; shift; exec "$@"'


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_LIMIT_S)
    return done.stdout


class HostSpace:
    """One host: a namespace with an address on the bridge."""

    def __init__(self, name: str, address: str, link: str) -> None:
        self.name = name
        self.address = address
        self._link = link

    def within(self, head_run: Path) -> Sequence[str]:
        """The start of a command that runs on this host, without a view of the head's run directory."""
        return ("ip", "netns", "exec", self.name, "sh", "-euc", _SEPARATE, "sh", str(head_run))

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def heal(self) -> None:
        _ip("link", "set", self._link, "up")

    def kill_all(self) -> None:
        """SIGKILL to every process of the host at once, as where it loses its power."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class HostNetwork:
    """`hosts` namespaces on a bridge; `head` is the address of the bridge, where the daemon runs."""

    def __init__(self, hosts: int) -> None:
        number, pid = os.getpid() % 200, os.getpid()
        self._bridge = f"tgb{pid}"
        self.head = f"10.214.{number}.1"
        self.hosts = [HostSpace(f"tgh{pid}-{at}", f"10.214.{number}.{at + 2}", f"tgv{pid}-{at}") for at in range(hosts)]

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.head}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", host._link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host._link, "master", self._bridge, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.kill_all()
            _ip("netns", "del", host.name)
        _ip("link", "del", self._bridge)
