"""Client of the nursery (the fork server): keeps it and its standby running, requests forks.

The standby is a process that the nursery has forked when its imports were done. When the nursery dies, the standby is
the nursery from then on, at once and without an import, and forks its own standby. Only where both are dead is a new
nursery started, which imports for seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from teimgr.launch.nursery import TorchBuild
from teimgr.launch.nursery_process import STANDBY_LIMIT_S, Forked, NurseryProcess
from teimgr.launch.process_handle import LaunchFailed, RunFile
from teimgr.observability.logs import last_line, open_log

FORK_LIMIT_S = 30.0
# Before another standby is forked in place of one that died or could not be forked.
_STANDBY_PAUSE_S = 1.0
_LOG_LIMIT_BYTES = 1 << 20

log = logging.getLogger(__name__)


class NurseryLink:
    """Keeps one nursery and one standby; `options` are the arguments after the nursery's control descriptor."""

    def __init__(self, options: Sequence[str], log_path: Path) -> None:
        self._options = options
        self._log_path = log_path
        self._run_file = log_path.with_suffix(".run")
        self._standby_run_file = log_path.with_name("standby.run")
        self._serving: NurseryProcess | None = None
        self._standby: NurseryProcess | None = None
        self._replenishing: asyncio.Task[None] | None = None
        self._one_fork = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._serving.pid if self._serving else None

    @property
    def standby_pid(self) -> int | None:
        return self._standby.pid if self._standby else None

    def start(self) -> None:
        """Start the nursery, if there is none; does not wait for its imports.

        Raises:
            LaunchFailed: the process cannot be started.
        """
        if self._serving is None:
            try:
                self._serving = self._spawn()
            except OSError as error:
                raise LaunchFailed(f"the nursery cannot be started: {error}") from error
            _record(self._serving, self._run_file)

    def kill_leftover(self) -> None:
        """Kill the nursery and the standby of an earlier daemon, which may be stalled with a request in the queue."""
        for path in (self._run_file, self._standby_run_file):
            found = RunFile.read(path)
            if found is not None and (pidfd := found.open_pidfd()) is not None:
                log.warning("killing the nursery of an earlier daemon", extra={"pid": found.pid})
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)

    async def ready(self) -> None:
        """Return when the imports are done.

        Raises:
            LaunchFailed: they fail, or take too long.
        """
        await self._running().ready()

    async def build(self) -> TorchBuild:
        """The build of torch that workers have, when the imports are done.

        Raises:
            LaunchFailed: as `ready`.
        """
        process = self._running()
        await process.ready()
        return process.build

    async def fork(self, request: dict[str, str], listener: int, log_fd: int, ports: Mapping[int, int]) -> Forked:
        """Fork a worker, which gets copies of the descriptors; `ports` are those of shared sockets, by port.

        Raises:
            NurseryDied: it died before the answer; if it had forked, there is a run file.
            LaunchFailed: the fork failed.
        """
        async with self._one_fork:
            process = await self._proven()
            descriptors = [listener, log_fd, *ports.values()]
            return await process.request({**request, "ports": [*ports]}, descriptors, FORK_LIMIT_S)

    async def close(self) -> None:
        """End the nursery and its standby; the workers continue."""
        self._closed = True
        if self._replenishing is not None:
            self._replenishing.cancel()
            await asyncio.wait({self._replenishing})
        await asyncio.gather(*(each.end() for each in (self._serving, self._standby) if each is not None))
        for path in (self._run_file, self._standby_run_file):
            path.unlink(missing_ok=True)

    def _running(self) -> NurseryProcess:
        if self._closed:
            raise LaunchFailed("the daemon is ending")
        self.start()
        assert self._serving is not None
        return self._serving

    async def _proven(self) -> NurseryProcess:
        """The nursery when it is ready; one that was a standby until now has answered, which must not take long.

        Raises:
            LaunchFailed: as `ready`.
        """
        while True:
            process = self._running()
            try:
                await process.ready()
            except LaunchFailed:
                if process.is_proven:
                    raise
                continue
            if not process.is_proven:
                await self._fork_standby(process)
            if not process.has_ended:
                return process

    def _spawn(self) -> NurseryProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "teimgr.launch.nursery", str(theirs.fileno()), *self._options]
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            output = open_log(self._log_path, _LOG_LIMIT_BYTES, 1)
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C in our terminal must not end it
                )
            finally:
                os.close(output)
            try:
                pidfd = os.pidfd_open(child.pid)
            except OSError:
                child.kill()
                child.wait()
                raise
            undo.pop_all()
        return NurseryProcess(self, child.pid, pidfd, ours, child)

    # The standby

    async def _fork_standby(self, process: NurseryProcess) -> None:
        """Have `process` fork a standby. Without an answer `process` is killed; other failures are logged."""
        limit_s = FORK_LIMIT_S if process.is_proven else STANDBY_LIMIT_S
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, ExitStack() as undo:
                undo.callback(ours.close)  # which ends the standby, if there is one
                forked = await process.request({"standby": True}, [theirs.fileno()], limit_s)
                undo.pop_all()
        except (LaunchFailed, OSError) as error:
            log.warning("no standby of the nursery", extra={"reason": str(error)})
            return
        self._standby = NurseryProcess(self, forked.pid, forked.pidfd, ours)
        _record(self._standby, self._standby_run_file)
        if self._closed:
            await self._standby.end()

    async def _replenish(self, pause_s: float) -> None:
        while self._standby is None:
            await asyncio.sleep(pause_s)
            pause_s = _STANDBY_PAUSE_S
            async with self._one_fork:
                if self._serving is None:  # it dies at its start; the next launch tries again
                    return
                try:
                    process = await self._proven()
                except LaunchFailed:
                    return
                if process.threads > 1:  # its children have to import again, so a standby is worth nothing
                    return
                if self._standby is None:
                    await self._fork_standby(process)

    def _want_standby(self, pause_s: float = 0.0) -> None:
        if not self._closed and (self._replenishing is None or self._replenishing.done()):
            self._replenishing = asyncio.create_task(self._replenish(pause_s), name="standby of the nursery")

    # Of the processes

    def on_ready(self, process: NurseryProcess) -> None:
        if process is self._serving:
            self._want_standby()

    def on_died(self, process: NurseryProcess) -> str:
        """The reason. A nursery that was ready is replaced at once, so that the next launch need not wait."""
        if process is self._standby:
            self._standby = None
            reason = "the standby of the nursery died"
            if not self._closed:
                log.warning(reason, extra={"pid": process.pid})
            self._want_standby(_STANDBY_PAUSE_S)
            return reason
        self._serving, self._standby = self._standby, None
        reason = f"the nursery died: {last_line(self._log_path) or 'it left no message'}"
        if self._closed:
            return reason
        log.error("nursery died", extra={"reason": reason, "standby": self.pid})
        if self._serving is not None:
            _record(self._serving, self._run_file)
            self._want_standby()
        elif process.was_ready:
            try:
                self.start()
            except LaunchFailed as error:
                log.error("nursery cannot be started again yet", extra={"reason": str(error)})
        return reason


def _record(process: NurseryProcess, path: Path) -> None:
    with suppress(OSError):  # the file only lets the next daemon end it sooner
        if run_file := RunFile.of(process.pid):
            run_file.write(path)
