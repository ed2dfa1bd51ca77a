"""Resident memory and processor time of processes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil

from teimgr.control.launch.nursery import NAME, STANDBY_NAME


def resident_mib(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """By what the process is and its pid: `worker 4711`."""
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            found[f"{_kind(process)} {process.pid}"] = round(process.memory_info().rss / 2**20, 2)
    return found


def processor_seconds(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Seconds of processor time so far, named as in `resident_mib`."""
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[f"{_kind(process)} {process.pid}"] = times.user + times.system
    return found


def _kind(process: psutil.Process) -> str:
    """By its name, as workers have the command line of their nursery."""
    name, command = process.name(), " ".join(process.cmdline())
    if name in (NAME, STANDBY_NAME):
        return name.removeprefix("teimgr-")
    if "teimgr.mux" in command:
        return "mux"
    return "daemon" if " serve" in command else "worker"
