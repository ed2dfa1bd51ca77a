"""Watches of the daemon: `DiskWatch` for the disks that it writes to, `ConfigWatch` for its configuration file, which
is reloaded when its content changes, such as by an updated ConfigMap. `Notifier` tells systemd (`sd_notify`) of
readiness, reload and stop, and feeds its watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from teimgr.config.sources import digest_of
from teimgr.control.background import in_background, regularly
from teimgr.errors import InvalidConfig
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, Sample
from teimgr.observability.request_context import ordered_by

log = logging.getLogger(__name__)

BY = "watch of the configuration file"
_LIMIT_S = 10.0  # of one check, which never ends if a file server is lost


class Reloads(Protocol):
    """The reloader of the file; `tried` is the digest of the content that it last read, for any caller."""

    @property
    def tried(self) -> str: ...

    async def reload(self) -> object: ...


class Identity(NamedTuple):
    """The identity of a file's content. `path` has its links resolved, so it differs after a symlink is changed."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int


class ConfigWatch:
    """Checks `file` every `interval_s` while `running`, and reloads it through `reloads` when its content has changed.

    A changed file is reloaded only once two checks in a row see it the same, so a file being written is not read.
    """

    def __init__(self, file: Path | None, interval_s: float, reloads: Reloads) -> None:
        self._file = file
        self._interval_s = interval_s
        self._reloads = reloads
        self._seen: Identity | None = None
        self._settled: Identity | None = None
        self._alarm: str | None = None

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Check regularly while the block runs."""
        if self._interval_s and self._file is not None:
            return in_background(self._run, BY)
        if self._interval_s:
            log.warning("config_watch_secs has no effect: no configuration file was given")
        return contextlib.nullcontext()

    def alarms(self) -> list[str]:
        """Return why the file cannot be checked. Errors in its content are alarms of the reload."""
        return [self._alarm] if self._alarm else []

    async def _run(self) -> None:
        await regularly(self.look, self._interval_s, "the configuration file could not be checked", log)

    async def look(self) -> None:
        """Check once, and reload the file if it has changed."""
        assert self._file is not None
        try:
            found = await self._within_limit(identity, self._file)
            is_steady, self._seen = found == self._seen, found
            if is_steady and found != self._settled:
                content = await self._within_limit(Path.read_bytes, self._file)
                self._settled = found
                if digest_of(content) != self._reloads.tried:
                    with ordered_by(BY), contextlib.suppress(InvalidConfig):  # already logged, an event and an alarm
                        await self._reloads.reload()
        except OSError as error:
            self._seen = None
            self._alarm = f"{self._file}: changes of the configuration are not seen: {error.strerror or error}"
        else:
            self._alarm = None

    async def _within_limit(self, work: Callable[[Path], Any], file: Path) -> Any:
        """Do blocking work on a thread. After the time limit, raise an alarm until it is done."""
        doing = asyncio.create_task(asyncio.to_thread(work, file))
        if not (await asyncio.wait({doing}, timeout=_LIMIT_S))[0]:
            self._alarm = f"{file}: the configuration file does not answer within {_LIMIT_S:g} s"
        return await doing


def identity(file: Path) -> Identity:
    """Return the identity of a file, with all links followed. Blocking.

    Raises:
        OSError: the file cannot be examined, or is not a regular file.
    """
    path = file.resolve(strict=True)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return Identity(str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


_LEVELS = (95, 90)
_INTERVAL_S = 30.0


class DiskWatch:
    """Checks the disks of `folders`, by purpose, while `run` runs; `usage` measures the disk of one folder."""

    def __init__(
        self, folders: Mapping[str, Path], usage: Callable[[Path], tuple[int, float, int]] | None = None
    ) -> None:
        self._folders = folders
        self._usage = usage or disk_usage
        self._alarms: list[str] = []
        self._used: dict[str, float] = {}

    async def run(self) -> None:
        """Check regularly until cancelled."""
        while True:
            look = asyncio.create_task(asyncio.to_thread(self.look))
            if not (await asyncio.wait({look}, timeout=_LIMIT_S))[0]:
                self._alarms = [f"the disks of {', '.join(self._folders)} do not answer within {_LIMIT_S:g} s"]
                await asyncio.wait({look})
            await asyncio.sleep(_INTERVAL_S)

    def look(self) -> None:
        """Check each disk once. Blocking."""
        found: dict[int, tuple[float, int, list[str]]] = {}
        for name, folder in self._folders.items():
            try:
                disk, used, left = self._usage(folder)
            except OSError:  # the part that uses the folder reports it
                continue
            found.setdefault(disk, (used, left, []))[2].append(f"{name} ({folder})")
        self._used = {", ".join(folders): used for used, _, folders in found.values()}
        self._alarms = [
            f"the disk of {', '.join(folders)} is over {level} % full: {left >> 20} MiB are left"
            for used, left, folders in found.values()
            if (level := level_of(used))
        ]

    def alarms(self) -> list[str]:
        """Return a sentence for each disk that is nearly full or does not respond."""
        return self._alarms

    async def page(self) -> Page:
        """Return the metric of each disk."""
        return {catalogue.DISK_USED: [Sample("", {"folders": each}, used) for each, used in self._used.items()]}


def level_of(used: float) -> int | None:
    """Return the highest alarm level in percent that this used part has reached; None below all levels."""
    return next((each for each in _LEVELS if 100 * used >= each), None)


def disk_usage(folder: Path) -> tuple[int, float, int]:
    """Return the device number of the folder's disk, the used part, and the bytes left to this user.

    The folder need not exist yet.

    Raises:
        OSError: the disk cannot be examined.
    """
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    found = os.statvfs(there)
    used = found.f_blocks - found.f_bfree
    return there.stat().st_dev, used / max(1, used + found.f_bavail), found.f_bavail * found.f_frsize


# Environment variables with systemd's socket, the interval of the watchdog, and the process that it watches.
_SOCKET, _WATCHDOG_USEC, _WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Notifier:
    """Sends the state of this process to systemd; without a `NOTIFY_SOCKET` in the environment it does nothing.

    The variables are removed from the environment, so that workers and muxes do not notify systemd too.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop(_SOCKET, "")
        timeout_us, pid = os.environ.pop(_WATCHDOG_USEC, ""), os.environ.pop(_WATCHDOG_PID, "")
        self.environ = {
            name: value for name, value in ((_SOCKET, self._address), (_WATCHDOG_USEC, timeout_us)) if value
        }
        """Return what a successor of this process needs to notify systemd."""
        is_ours = timeout_us.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(timeout_us) / 1e6 if is_ours else None

    def send(self, *assignments: str) -> None:
        """Send assignments such as `READY=1`; never raises, since systemd may not listen."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(assignments).encode(), address)

    def reloading(self) -> None:
        """Report that a reload has begun; `send("READY=1")` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def leave_to(self, pid: int) -> None:
        """Report that the service continues in another process. This one sends nothing more."""
        self.send(f"MAINPID={pid}", "WATCHDOG=1")
        self._address = ""

    @contextlib.asynccontextmanager
    async def serving(self, status: str) -> AsyncIterator[None]:
        """Report readiness for the body, and the stop after it. The loop feeds the watchdog twice per interval."""
        self.send("READY=1", f"STATUS={status}")
        watchdog = asyncio.create_task(self._feed(self.watchdog_s / 2), name="watchdog") if self.watchdog_s else None
        try:
            yield
        finally:
            self.send("STOPPING=1")
            if watchdog is not None:
                watchdog.cancel()

    async def _feed(self, period_s: float) -> None:
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(period_s)
