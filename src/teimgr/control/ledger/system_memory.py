"""Memory of this host as reported by the system and by cgroups v1 and v2, kernel OOM kills, and the limit of a worker's
resident memory."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from teimgr.errors import Code

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_GIB = 2**30


class _Files(NamedTuple):
    """Files of one cgroup version: subfolder, limit, use, prefix of keys in memory.stat, and OOM kills."""

    folder: str
    limit: str
    use: str
    prefix: str
    kills: str


_VERSIONS = (
    _Files("", "memory.max", "memory.current", "", "memory.events"),
    _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "memory.oom_control"),
)


class CgroupMemory:
    """The cgroup of a process (a pid or "self") and its ancestors, of both versions.

    In a container the path may be the host's; then only the mount point can be read.
    """

    def __init__(self, process: int | str = "self", root: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._proc = proc
        try:
            lines = (proc / str(process) / "cgroup").read_text().splitlines()
        except OSError:  # the process has exited, or the kernel has no cgroups
            lines = []
        self.groups = tuple(_groups(root, lines))
        """Folders with their files; for each version, the nearest first."""

    def free_bytes(self) -> int | None:
        """Return the bytes left by the limits, None without one. File cache counts as free, as in MemAvailable."""
        limited = (_limit_and_use(*each) for each in self.groups)
        return min((max(0, limit - used) for limit, used in filter(None, limited)), default=None)

    def lowest(self) -> tuple[int, int] | None:
        """The lowest limit and what is in use there, without such cache, in bytes; None without a limit."""
        return min(filter(None, (_limit_and_use(*each) for each in self.groups)), default=None)

    def kills(self) -> int:
        """Return how many processes the kernel has killed for memory here; of the whole host if no cgroup counts."""
        for group, files in self.groups:
            if (found := _count(group / files.kills)) is not None:
                return found
        return _count(self._proc / "vmstat") or 0


def free_memory_bytes() -> int | None:
    """Memory that new processes may take, of this host or by our cgroup's limit; None if neither is reported."""
    known = (_meminfo_bytes("MemAvailable"), CgroupMemory().free_bytes())
    return min((size for size in known if size is not None), default=None)


def host_memory() -> tuple[int, int]:
    """Memory of this host, or the lowest limit of our cgroups where that is less, and how much of it is in use; bytes.

    Cache does not count as used.
    """
    total = _meminfo_bytes("MemTotal") or 0
    return _limit_below(total, CgroupMemory()) or (total, total - (_meminfo_bytes("MemAvailable") or total))


def memory_label() -> str:
    """Return the name of this host's memory in reasons."""
    limit = _limit_below(_meminfo_bytes("MemTotal") or 0, CgroupMemory())
    return "host memory" if limit is None else f"host memory (the cgroup allows {gib(limit[0])})"


def allowed_memory(group: CgroupMemory) -> str:
    """Describe the limit of a process's memory, as in `the cgroup allows 1.4 GiB`."""
    total = _meminfo_bytes("MemTotal") or 0
    limit = _limit_below(total, group)
    return f"this host has {gib(total)}" if limit is None else f"the cgroup allows {gib(limit[0])}"


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else mib(size)


def mib(size: int) -> str:
    """Bytes in whole MiB, rounded down, where two sizes are to be compared."""
    return f"{size >> 20} MiB"


def _limit_below(total: int, group: CgroupMemory) -> tuple[int, int] | None:
    """The lowest limit of a cgroup and the use of that, if it is below the memory of the host (0: not known)."""
    lowest = group.lowest()
    return lowest if lowest is not None and (lowest[0] < total or not total) else None


def _meminfo_bytes(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}: +(\d+) kB$", (_PROC / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _groups(root: Path, lines: list[str]) -> Iterator[tuple[Path, _Files]]:
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSIONS[bool(controllers)]
        top = root / files.folder
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield group, files
            group = group.parent


def _limit_and_use(group: Path, files: _Files) -> tuple[int, int] | None:
    try:
        most = (group / files.limit).read_text().strip()
        if most == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"{files.prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return int(most), max(0, int((group / files.use).read_text()) - cache)
    except (OSError, ValueError):  # the root has no limit; the host's paths do not exist in a container
        return None


def _count(file: Path) -> int | None:
    """The number of `oom_kill` in a file of counters."""
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


READINGS = 3
"""Consecutive readings above the limit, taken with the health probes; one large batch is not a leak."""
PAUSE_S = 600.0
"""Minimum seconds between replacements of a replica, since each loads a second copy of the model."""
_MIB = 2**20


class Verdict(Enum):
    """The decision about a replica."""

    REPLACE = auto()
    TOO_LARGE = auto()  # the model alone exceeds the limit


@dataclass(slots=True)
class _Replica:
    above: int = 0  # consecutive readings above the limit
    problem: str | None = None
    not_before: float = float("-inf")


class MemoryLimit:
    """Decides when a replica of one instance, given by its number, is replaced because it exceeds `max_rss_mib`.

    A replica is replaced after `READINGS` consecutive readings above the limit, but not twice within `PAUSE_S`. A
    replica above it right after its start is not replaced, since the next one would be as large.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}

    def read(self, number: int, resident_bytes: int, limit_mib: int, now: float, *, fresh: bool) -> Verdict | None:
        """Judge a reading of a replica's resident memory; `fresh`: the worker has just passed its first self-test.

        REPLACE is repeated at each reading until `begin_pause`; TOO_LARGE is returned once per worker.
        """
        replica = self._replicas.setdefault(number, _Replica())
        if fresh:
            replica.above, replica.problem = 0, None
        if resident_bytes <= limit_mib * _MIB:
            replica.above, replica.problem = 0, None
            return None
        replica.above += 1
        if fresh:
            replica.problem = f"{mib(resident_bytes)} right after its start, more than max_rss_mib = {limit_mib}"
            return Verdict.TOO_LARGE
        is_due = replica.above >= READINGS and replica.problem is None and now >= replica.not_before
        return Verdict.REPLACE if is_due else None

    def begin_pause(self, number: int, now: float) -> None:
        """Note that the replica is being replaced."""
        self._replicas[number].not_before = now + PAUSE_S

    def problems(self, numbers: Collection[int]) -> list[str]:
        """Return sentences about those of these replicas whose model alone is too large."""
        found = ((number, self._replicas[number].problem) for number in numbers if number in self._replicas)
        return [
            f"replica {number} has {problem}: it is not replaced, since the next one would be as large"
            for number, problem in found
            if problem
        ]


CLAIM_S = 10.0
_LOOK_INTERVAL_S = 5.0
_MAX_CGROUPS = 1000


@dataclass(slots=True)
class _Kills:
    seen: int
    unclaimed: list[float] = field(default_factory=list)  # when each was found


class MemoryKills:
    """OOM kills by the kernel in the cgroups of watched processes; each explains one exit by SIGKILL.

    The kernel counts a kill before the process exits, so a higher count at an exit by SIGKILL explains it. A higher
    count without an exit is forgotten after `CLAIM_S`, since another process of the cgroup was killed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[object, tuple[CgroupMemory, _Kills]] = {}

    def watch(self, group: CgroupMemory) -> None:
        """Count the kills of a cgroup from now on."""
        if group.groups not in self._found and len(self._found) < _MAX_CGROUPS:
            self._found[group.groups] = group, _Kills(group.kills())

    async def keep_looking(self) -> None:
        """Look at the counters regularly, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            self._look(self._found.values())

    def explain(self, group: CgroupMemory, status: int | None, peak_bytes: int, process: str) -> str | None:
        """Why a process of the cgroup died that was not killed by us, if the kernel killed it for memory.

        `status` is its exit status, None if unknown; `peak_bytes` the most private memory that it had, 0 if unknown.
        """
        found = self._found.get(group.groups)
        if found is None or status not in (None, -signal.SIGKILL):
            return None
        self._look((found,))
        if not (unclaimed := found[1].unclaimed):
            return None
        unclaimed.pop()
        held = f", the {process} held {gib(peak_bytes)}" if peak_bytes else ""
        return f"killed by the kernel for memory: {allowed_memory(group)}{held} ({Code.KILLED_FOR_MEMORY.name})"

    def _look(self, found: Iterable[tuple[CgroupMemory, _Kills]]) -> None:
        now = self._clock()
        for group, kills in found:
            count = group.kills()
            kills.unclaimed = [at for at in kills.unclaimed if now - at <= CLAIM_S]
            kills.unclaimed += [now] * min(max(0, count - kills.seen), _MAX_CGROUPS)
            kills.seen = count
