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


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


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
        self._spare = f"10.214.{number}.200"
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

    def replace_head(self) -> str:
        """Take the head's address away, and give it another one, as of another host."""
        _ip("address", "del", f"{self.head}/24", "dev", self._bridge)  # first: others of its network would go with it
        _ip("address", "add", f"{self._spare}/24", "dev", self._bridge)
        self.head, self._spare = self._spare, self.head
        return self.head

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.kill_all()
            _ip("netns", "del", host.name)
        _ip("link", "del", self._bridge)


class SmallDisk:
    """A file system of `size_mib` in memory at `folder`, which can be filled; needs root."""

    def __init__(self, folder: Path, size_mib: int = 64) -> None:
        self._folder = folder
        self._size_mib = size_mib
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size_mib}m,mode=0700", "none", str(self._folder))
        return self

    def __exit__(self, *error: object) -> None:
        _run("umount", "--lazy", str(self._folder))

    def fill(self) -> None:
        """Write until nothing more goes in."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
