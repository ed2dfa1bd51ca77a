"""Watch of the disks that the daemon writes to: an alarm at 90 % and at 95 %, before a full one ends workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, Sample

_LEVELS = (95, 90)
_INTERVAL_S = 30.0
_LIMIT_S = 10.0  # of a look: a lost file server holds it for ever


class DiskWatch:
    """Looks at the disks of `folders`, by what they are for, while `run` runs; `usage` is that of one folder."""

    def __init__(
        self, folders: Mapping[str, Path], usage: Callable[[Path], tuple[int, float, int]] | None = None
    ) -> None:
        self._folders = folders
        self._usage = usage or disk_usage
        self._alarms: list[str] = []
        self._used: dict[str, float] = {}

    async def run(self) -> None:
        """Look at regular intervals, until cancelled."""
        while True:
            look = asyncio.create_task(asyncio.to_thread(self.look))
            if not (await asyncio.wait({look}, timeout=_LIMIT_S))[0]:
                self._alarms = [f"the disks of {', '.join(self._folders)} do not answer within {_LIMIT_S:g} s"]
                await asyncio.wait({look})
            await asyncio.sleep(_INTERVAL_S)

    def look(self) -> None:
        """Look at each disk once. Blocking."""
        found: dict[int, tuple[float, int, list[str]]] = {}
        for name, folder in self._folders.items():
            try:
                disk, used, left = self._usage(folder)
            except OSError:  # of a folder that cannot be used its own part tells
                continue
            found.setdefault(disk, (used, left, []))[2].append(f"{name} ({folder})")
        self._used = {", ".join(folders): used for used, _, folders in found.values()}
        self._alarms = [
            f"the disk of {', '.join(folders)} is over {level} % full: {left >> 20} MiB are left"
            for used, left, folders in found.values()
            if (level := level_of(used))
        ]

    def alarms(self) -> list[str]:
        """A sentence for each disk that is nearly full."""
        return self._alarms

    async def page(self) -> Page:
        """The metric of each disk."""
        return {catalogue.DISK_USED: [Sample("", {"folders": each}, used) for each, used in self._used.items()]}


def level_of(used: float) -> int | None:
    """The highest level, in percent, that a disk with this part in use has reached; None below all."""
    return next((each for each in _LEVELS if 100 * used >= each), None)


def disk_usage(folder: Path) -> tuple[int, float, int]:
    """The number of the disk that a folder is on, or will be, the part in use, and the bytes left to this user.

    Raises:
        OSError: it cannot be looked at.
    """
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    found = os.statvfs(there)
    used = found.f_blocks - found.f_bfree
    return there.stat().st_dev, used / max(1, used + found.f_bavail), found.f_bavail * found.f_frsize
