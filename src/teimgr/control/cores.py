"""How many CPU cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """The cores of our affinity mask, or fewer where a container's quota allows less; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, _quota_cores(cpu_max) or allowed))


def _quota_cores(cpu_max: Path) -> int | None:
    """The quota in whole cores, rounded to the nearest; None where there is no limit."""
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
