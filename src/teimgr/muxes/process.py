"""One mux process: launched or adopted, known by a descriptor that no other process can take over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from teimgr.launch.processes import Process, boot_id, look_up, open_pidfd

# glibc gives every buffer of some megabytes back to the kernel and faults it in again: raised thresholds make Arrow
# calls of 10,000 texts 2.5 to 3.5 times as fast through a mux (DESIGN.md, decisions).
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True, slots=True)
class MuxRunFile:
    """Which process a mux is, and the hash of what it was told."""

    pid: int
    start_time: int
    boot_id: str
    config_hash: str

    @classmethod
    def read(cls, path: Path) -> MuxRunFile | None:
        """What the file says; None when it says nothing that can be used."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Replace the file at `path`."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


class MuxProcess:
    """A live or just ended process. `close` it when it is gone, or to let it go on alone."""

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._child = child

    @classmethod
    def launch(cls, command: Sequence[str], log_path: Path) -> MuxProcess:
        """Start `command`; its output goes to the end of the log file. Raises OSError."""
        with log_path.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | _MALLOC,
                start_new_session=True,
            )
        return cls(child.pid, os.pidfd_open(child.pid), child)  # our child: the number cannot be another's yet

    @classmethod
    def adopt(cls, found: MuxRunFile) -> MuxProcess | None:
        """The process of a run file, None when it has ended."""
        if found.boot_id != boot_id():
            return None
        pidfd = open_pidfd(Process(found.pid, found.start_time))
        return None if pidfd is None else cls(found.pid, pidfd)

    def run_file(self, config_hash: str) -> MuxRunFile | None:
        """What the next daemon has to know to adopt it; None when it has ended already."""
        process = look_up(self.pid)
        return None if process is None else MuxRunFile(self.pid, process.start_time, boot_id(), config_hash)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone does not mind."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def ended(self) -> None:
        """Return when the process is gone. One wait at a time."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)

    async def gone_within(self, limit_s: float) -> bool:
        """Whether it ends in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self.ended()
        except TimeoutError:
            return False
        return True

    def close(self) -> int | None:
        """Let go of it; the result is its exit status where it has ended and was our child."""
        os.close(self._pidfd)
        return None if self._child is None else self._child.poll()
