"""Memory of this host as the system reports it: what is there, what new processes may take, and how many the kernel
killed for want of it, by cgroups of both versions too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_GIB = 2**30


class _Files(NamedTuple):
    """Below the mount point, the limit, the use, the prefix of keys in memory.stat, and the file of kills."""

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
    """The cgroup of a process and those above it, of both versions; `process` is its pid, or "self".

    In a container the path may be that of the host, where only the mount point is ours.
    """

    def __init__(self, process: int | str = "self", root: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._proc = proc
        try:
            lines = (proc / str(process) / "cgroup").read_text().splitlines()
        except OSError:  # it has ended, or the kernel has none
            lines = []
        self.groups = tuple(_groups(root, lines))
        """Folders with their files, of each version the nearest first."""

    def free_bytes(self) -> int | None:
        """What the limits leave; None without a limit. Cache of files counts as free, as in the host's MemAvailable."""
        limited = (_limit_and_use(*each) for each in self.groups)
        return min((max(0, limit - used) for limit, used in filter(None, limited)), default=None)

    def lowest(self) -> tuple[int, int] | None:
        """The lowest limit and what is in use there, without such cache, in bytes; None without a limit."""
        return min(filter(None, (_limit_and_use(*each) for each in self.groups)), default=None)

    def kills(self) -> int:
        """How many processes the kernel has killed for memory here so far; of the whole host where no cgroup counts."""
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
    """What a reason calls the memory of this host."""
    limit = _limit_below(_meminfo_bytes("MemTotal") or 0, CgroupMemory())
    return "host memory" if limit is None else f"host memory (the cgroup allows {gib(limit[0])})"


def allowed_memory(group: CgroupMemory) -> str:
    """What bounds the memory of a process, as in `the cgroup allows 1.4 GiB`."""
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
    except (OSError, ValueError):  # the root has no limit, and a path of the host is not here
        return None


def _count(file: Path) -> int | None:
    """The number of `oom_kill` in a file of counters."""
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
