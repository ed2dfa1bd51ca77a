"""Memory of this host as the system reports it: what is there, and what new processes may take, by cgroups too."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Of version 2 and version 1 of cgroups: below the mount point, the limit, the use, and the key of the cache in it.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes() -> int | None:
    """Memory that new processes may take, of this host or by our cgroup's limit; None if neither is reported."""
    known = (_meminfo_bytes("MemAvailable"), cgroup_free_bytes())
    return min((size for size in known if size is not None), default=None)


def host_memory() -> tuple[int, int]:
    """Memory of this host, or the container's limit where that is less, and how much of it is in use; bytes."""
    total = _meminfo_bytes("MemTotal") or 0
    used = total - (_meminfo_bytes("MemAvailable") or total)
    try:
        limit = int((_CGROUPS / "memory.max").read_text())
        if limit < total:
            return limit, int((_CGROUPS / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return total, used


def _meminfo_bytes(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def cgroup_free_bytes(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the memory limits of this process's cgroup and of those above it leave; None without a limit.

    Cache that the kernel gives up first counts as free. In a container the path may be that of the host, where only
    the mount point is ours.
    """
    try:
        memberships = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    left = []
    for _, controllers, path in memberships:
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, *files = _CGROUP_FILES[bool(controllers)]
        group = root / folder / path.lstrip("/")
        while group.is_relative_to(root / folder):
            left.append(_free_in(group, *files))
            group = group.parent
    return min((each for each in left if each is not None), default=None)


def _free_in(group: Path, limit: str, use: str, cache: str) -> int | None:
    try:
        most = (group / limit).read_text().strip()
        if most == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(most) - int((group / use).read_text()) + int(stat.get(cache, 0)))
    except (OSError, ValueError):  # the root has no limit, and a path of the host is not here
        return None
