"""The memory of one process: the kernel's figures, and the GPU's driver's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; None where nobody says. `private_bytes` is what would be free again without the process."""

    peak_rss_bytes: int | None
    private_bytes: int | None
    device_bytes: int | None


def read_memory(pid: int, gpu_uuid: str | None, stats: Mapping[str, Any]) -> Memory:
    """The figures now. The worker's own peak on the device is taken where its `stats` have one, else the driver's."""
    status, rollup = _fields(pid, "status"), _fields(pid, "smaps_rollup")
    private = [rollup[key] for key in ("Private_Clean", "Private_Dirty") if key in rollup]
    device_bytes = stats.get("device_peak_bytes")
    if device_bytes is None and gpu_uuid is not None:
        device_bytes = driver_bytes(pid, gpu_uuid)
    return Memory(status.get("VmHWM"), sum(private) if private else None, device_bytes)


def driver_bytes(pid: int, gpu_uuid: str) -> int | None:
    """What the driver has given a process on a card; None where it does not tell, as inside some containers."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        used = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
        return used.get(pid)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _fields(pid: int, name: str) -> dict[str, int]:
    """The figures in kB of a file of /proc, as bytes; none where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if len(row) == 3 and row[2] == "kB"}
