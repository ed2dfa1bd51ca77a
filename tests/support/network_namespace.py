"""A network namespace with one link to the host's, for tests of hosts that lose each other; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Self


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@cache
def reason_for_none() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the program ip"
    name = f"tgr{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces are not allowed here: {error}"
    return ""


class NetworkNamespace:
    """A namespace with the address `inside`; the other end of its link has `outside`."""

    def __init__(self) -> None:
        number = os.getpid() % 200
        self.name = f"tgr{os.getpid()}"
        self.outside, self.inside = f"10.213.{number}.1", f"10.213.{number}.2"
        self._link, self._peer = f"tgo{os.getpid()}", f"tgi{os.getpid()}"

    def __enter__(self) -> Self:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", self._peer, "netns", self.name)
        _ip("address", "add", f"{self.outside}/24", "dev", self._link)
        _ip("link", "set", self._link, "up")
        for arguments in (
            ("address", "add", f"{self.inside}/24", "dev", self._peer),
            ("link", "set", self._peer, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.name, *arguments)
        return self

    def __exit__(self, *error: object) -> None:
        _ip("netns", "del", self.name)

    @property
    def within(self) -> Sequence[str]:
        """The start of a command that runs inside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def heal(self) -> None:
        _ip("link", "set", self._link, "up")
