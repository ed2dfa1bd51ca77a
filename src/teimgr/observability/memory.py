"""Memory of processes as the kernel counts it, from /proc, and the limit of open files."""

from __future__ import annotations

import os
import resource
from functools import cache
from pathlib import Path

_KIB = 1024
_OPEN_FILES = 65536
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process, shared parts included; 0 where /proc is missing."""
    return resident_bytes_of(os.getpid()) or 0


def resident_bytes_of(pid: int) -> int | None:
    """Resident memory of a process, shared parts included, as `resident_bytes`; None where it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


def proc_sizes(pid: int | str, file: str) -> dict[str, int]:
    """Sizes in bytes from `/proc/<pid>/<file>`, such as `status` or `smaps_rollup`; empty where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if len(row) == 3 and row[2] == "kB"}


def private_bytes(sizes: dict[str, int]) -> int | None:
    """Memory that only this process uses, from its `smaps_rollup`; None where the kernel does not report it."""
    known = [sizes[key] for key in ("Private_Clean", "Private_Dirty") if key in sizes]
    return sum(known) if known else None


def raise_file_limit() -> None:
    """Raise this process's limit of open files, and that of the processes it starts, as far as it may.

    The usual 1024 ends near 250 instances; a library that closes all descriptors one by one bears no unlimited number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache
def max_connections() -> int:
    """How many clients may be connected: half of the files that the process may open. Read once, after the start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit if limit > 0 else _OPEN_FILES) // 2


# Of version 2 and version 1 of cgroups: below the mount point, the limit, the use, and the key of the cache in it.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
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
