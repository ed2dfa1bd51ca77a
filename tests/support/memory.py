"""Resident memory of processes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def resident_mib(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """By what the process is and its pid: `worker 4711`. Workers have their nursery's command line."""
    found: dict[str, float] = {}
    commands: dict[int, str] = {}
    parents: dict[int, int] = {}
    for process in processes:
        with suppress(psutil.Error):
            found[str(process.pid)] = process.memory_info().rss / 2**20
            commands[process.pid], parents[process.pid] = " ".join(process.cmdline()), process.ppid()
    return {f"{_kind(int(pid), commands, parents)} {pid}": round(mib, 2) for pid, mib in found.items()}


def _kind(pid: int, commands: dict[int, str], parents: dict[int, int]) -> str:
    command = commands[pid]
    if "teimgr.mux" in command:
        return "mux"
    if "launch.nursery" in command:
        return "worker" if "launch.nursery" in commands.get(parents[pid], "") else "nursery"
    return "daemon" if " serve" in command else "worker"
