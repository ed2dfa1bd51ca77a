"""Memory of processes as the kernel counts it, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_KIB = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process, shared parts included; 0 where /proc is missing."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


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
