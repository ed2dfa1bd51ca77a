"""One worker process of this host: its end is seen through a pidfd, whoever its parent is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from teimgr.launch.base import KILL_LIMIT_S, Exit, LaunchFailed
from teimgr.launch.logfile import last_complaint
from teimgr.launch.runfile import Traces
from teimgr.spec import WorkerSpec

_STATUS_LIMIT_S = 2.0


class LocalHandle:
    """`WorkerHandle` of a process on this host; `status` is absent for an adopted one, which is not our child."""

    def __init__(
        self,
        spec: WorkerSpec,
        traces: Traces,
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

    def on_gone(self, call: Callable[[LocalHandle], None]) -> None:
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
