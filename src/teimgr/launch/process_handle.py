"""One mux process: launched or adopted, known by a descriptor that no other process can take over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from teimgr.files import write_atomically
from teimgr.launch.launcher import KILL_LIMIT_S, Exit, LaunchFailed
from teimgr.launch.log_files import last_complaint
from teimgr.launch.run_files import ProcessId, WorkerPaths, boot_id, look_up, open_pidfd
from teimgr.spec import WorkerSpec

_STATUS_LIMIT_S = 2.0


class LocalWorker:
    """`WorkerHandle` of a process on this host; `status` is absent for an adopted one, which is not our child."""

    def __init__(
        self,
        spec: WorkerSpec,
        traces: WorkerPaths,
        pid: int,
        pidfd: int,
        started_at: float,
        log_path: Path,
        status: asyncio.Future[int | None] | None,
    ) -> None:
        self.spec = spec
        self.incarnation = traces.incarnation
        self.socket = traces.socket
        self.pid = pid
        self.started_at = started_at
        self.log_path = log_path
        self._traces = traces
        self._pidfd = pidfd
        self._status = status
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended.set)
        self._exit = asyncio.create_task(self._conclude(), name=f"exit of worker {pid}")

    async def wait(self) -> Exit:
        """As the protocol says."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, ask: bool = True) -> Exit:
        """As the protocol says."""
        if ask and grace_s > 0 and not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        if not await self._gone_within(grace_s):
            self._kill()
            if not await self._gone_within(KILL_LIMIT_S):
                raise LaunchFailed(f"process {self.pid} is still there {KILL_LIMIT_S:g} s after SIGKILL")
        return await self.wait()

    def on_gone(self, call: Callable[[LocalWorker], None]) -> None:
        """Call this once when the process is gone, or released."""
        self._exit.add_done_callback(lambda _: call(self))

    async def release(self) -> None:
        """Forget the process; it goes on."""
        self._exit.cancel()
        await asyncio.wait({self._exit})

    def _kill(self) -> None:
        if self._ended.is_set():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # a worker leads a group of its own
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # unless it is too young to have one

    async def _gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait({self._exit}, timeout=timeout_s)
        return bool(done)

    async def _conclude(self) -> Exit:
        try:
            await self._ended.wait()
        finally:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        exit = Exit(await self._exit_status(), self._traces.read_last_words(), last_complaint(self.log_path))
        self._traces.remove()
        return exit

    async def _exit_status(self) -> int | None:
        if self._status is not None:
            done, _ = await asyncio.wait({self._status}, timeout=_STATUS_LIMIT_S)
            if done and self._status.result() is not None:
                return self._status.result()
        return self._reap()

    def _reap(self) -> int | None:
        """The status where we have become the parent: the first process of a container inherits all orphans."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status) if pid else None


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
        write_atomically(path, json.dumps(asdict(self)).encode())


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
        pidfd = open_pidfd(ProcessId(found.pid, found.start_time))
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
