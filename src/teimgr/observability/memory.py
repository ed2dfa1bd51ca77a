"""Memory of a process as the kernel counts it, from /proc."""

from __future__ import annotations

from pathlib import Path

_KIB = 1024


def proc_sizes(pid: int | str, file: str) -> dict[str, int]:
    """Sizes in bytes from `/proc/<pid>/<file>`, such as `status` or `smaps_rollup`; empty where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if len(row) == 3 and row[2] == "kB"}


def private_bytes(sizes: dict[str, int]) -> int | None:
    """What would be free without the process, from its `smaps_rollup`; None where the kernel does not say."""
    known = [sizes[key] for key in ("Private_Clean", "Private_Dirty") if key in sizes]
    return sum(known) if known else None
