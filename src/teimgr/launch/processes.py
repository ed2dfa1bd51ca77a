"""What the kernel says of a process, so that a number in a file cannot be mistaken for another process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<pid>/stat after the parenthesised name, counted from 0 (proc_pid_stat(5) counts from 1, name is 2).
_STATE, _START_TIME = 0, 19


@dataclass(frozen=True, slots=True)
class Process:
    """One process for good: its number may be given away again, the pair with `start_time` is not.

    `start_time` is clock ticks since the boot named by `boot_id()`.
    """

    pid: int
    start_time: int

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + self.start_time / _TICKS_PER_S


def look_up(pid: int) -> Process | None:
    """The process that has this number now; None when there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name may hold spaces and parentheses of its own
    return None if fields[_STATE] in "ZX" else Process(pid, int(fields[_START_TIME]))


def open_pidfd(process: Process) -> int | None:
    """A descriptor that becomes readable when `process` ends; None when it has ended, whoever has its number now."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # From here on the number cannot be reused unseen: the same start time means the same process.
    if look_up(process.pid) == process:
        return pidfd
    os.close(pidfd)
    return None


@cache
def boot_id() -> str:
    """Changes with every boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def thread_count() -> int:
    """Threads of this process, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  names are enough
