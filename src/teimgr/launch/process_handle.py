"""Processes that outlive the daemon: their identity, their run file, and a handle to wait for, signal and stop one.

A pid may be reused. A process is identified by pid and start time within one boot (`ProcessId`, `RunFile`), and held by
a pidfd, which never refers to another process (`ProcessHandle`). Workers and muxes use the same classes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

from teimgr.atomic_write import write_atomically
from teimgr.launch.launcher import Exit, LaunchFailed

KILL_LIMIT_S = 10.0
"""How long a process may take to vanish after SIGKILL before we call it stuck."""

# Fields of /proc/<pid>/stat after the parenthesised name, counted from 0 (proc_pid_stat(5) counts from 1, name is 2).
_STATE, _START_TIME = 0, 19
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid with the start time of its process, in clock ticks since boot: unique within one boot."""

    pid: int
    start_time: int

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + self.start_time / _TICKS_PER_S


def look_up(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name may itself hold spaces and parentheses
    return None if fields[_STATE] in "ZX" else ProcessId(pid, int(fields[_START_TIME]))


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when `process` ends; None when it has ended, even if its pid was reused."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pidfd pins the pid's process: if the start time still matches now, it is the one that was meant.
    if look_up(process.pid) == process:
        return pidfd
    os.close(pidfd)
    return None


@cache
def boot_id() -> str:
    """Changes with every boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class RunFile:
    """A JSON file by which the next daemon finds a process to adopt; subclasses add what it was started with."""

    pid: int
    start_time: int
    boot_id: str

    @classmethod
    def of(cls, pid: int, **facts: str) -> Self | None:
        """The run file of a live process; None when it has ended already."""
        process = look_up(pid)
        return cls(pid=pid, start_time=process.start_time, boot_id=boot_id(), **facts) if process else None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The inverse of `write`; None when the file is missing or does not identify a process."""
        try:
            found = cls(**json.loads(path.read_text()))
            return found if isinstance(found.pid, int) and isinstance(found.start_time, int) else None
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @property
    def process(self) -> ProcessId:
        """The identity of the process within its boot."""
        return ProcessId(self.pid, self.start_time)

    def open_pidfd(self) -> int | None:
        """A pidfd of the process if it is still alive: the check before an adoption."""
        return open_pidfd(self.process) if self.boot_id == boot_id() else None


class ProcessHandle:
    """Waits for one process and stops it. The pidfd is closed when the process has ended, or by `release`.

    The process leads a process group of its own, which ends with it.
    """

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._child = child
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended.set)
        self._exit = asyncio.create_task(self._watch(), name=f"exit of process {pid}")

    @classmethod
    def spawn(cls, command: Sequence[str], log_path: Path, environ: Mapping[str, str]) -> ProcessHandle:
        """Start `command`; its output is appended to the log file. Raises OSError."""
        with log_path.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        return cls(child.pid, os.pidfd_open(child.pid), child)  # a child's pid is not reused before it is reaped

    @classmethod
    def adopt(cls, run_file: RunFile) -> ProcessHandle | None:
        """The process of a run file that an earlier daemon left; None when it has ended."""
        pidfd = run_file.open_pidfd()
        return None if pidfd is None else cls(run_file.pid, pidfd)

    async def wait(self) -> Exit:
        """Return when the process is gone. Any number may wait."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, ask: bool = True) -> Exit:
        """Send SIGTERM, wait `grace_s`, kill the process group, wait `KILL_LIMIT_S`.

        Without `ask`, or without grace, there is no SIGTERM. A later call with less grace cuts an earlier one short.

        Raises:
            LaunchFailed: the process is still there after all that.
        """
        if ask and grace_s > 0:
            self.send_signal(signal.SIGTERM)
        if not await self._gone_within(grace_s):
            self._kill_group()
            if not await self._gone_within(KILL_LIMIT_S):
                raise LaunchFailed(f"process {self.pid} is still there {KILL_LIMIT_S:g} s after SIGKILL")
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def release(self) -> None:
        """Close the pidfd and forget the process, which goes on."""
        self._exit.cancel()
        await asyncio.wait({self._exit})

    async def exit_status(self) -> int | None:
        """The exit status of a process that has ended, None where it is not our child."""
        return self._child.poll() if self._child is not None else _reap(self.pid)

    def describe_exit(self, status: int | None) -> Exit:
        """What `wait` returns, made once when the process has ended."""
        return Exit(status)

    async def _watch(self) -> Exit:
        try:
            await self._ended.wait()
        finally:
            self._ended.set()  # also when released: the pidfd must not be used any more
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        return self.describe_exit(await self.exit_status())

    async def _gone_within(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait({self._exit}, timeout=limit_s)
        return bool(done)

    def _kill_group(self) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # it may be too young to lead a group


def _reap(pid: int) -> int | None:
    """The exit status where an adopted process is our child: the first process of a container inherits all orphans."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped else None
