"""Client of the nursery (the fork server): keeps it and its standby running, and requests forks.

The nursery forks a standby after its imports. If the nursery dies, the standby replaces it at once and forks its own
standby. A new nursery, whose imports take seconds, is started only if both have died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from teimgr.control.launch.nursery import MESSAGE_LIMIT_BYTES, TorchBuild
from teimgr.control.launch.process_handle import KILL_LIMIT_S, LaunchFailed, RunFile, reap
from teimgr.observability.logs import last_line, open_log

IMPORT_LIMIT_S = 120.0
STANDBY_LIMIT_S = 5.0
_TRACEBACK_LIMIT_S = 2.0  # a process may print a traceback after its socket has closed
_END_LIMIT_S = 2.0  # after SIGTERM
FORK_LIMIT_S = 30.0
_STANDBY_PAUSE_S = 1.0  # before another attempt to fork a standby
_LOG_LIMIT_BYTES = 1 << 20

log = logging.getLogger(__name__)


class NurseryDied(LaunchFailed):
    """The nursery exited before it answered."""


class Ending(NamedTuple):
    """Exit status of a forked process, and its peak private memory (0 if unknown)."""

    status: int
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Forked:
    """A new process. The receiver closes `pidfd`; `ending` becomes None if the nursery dies first."""

    pid: int
    pidfd: int
    ending: asyncio.Future[Ending | None]


class NurseryLink:
    """Keeps one nursery and one standby; `options` are the nursery's arguments after the control descriptor.

    `killed` returns the cause if the kernel has just killed a nursery for memory, otherwise "".
    """

    def __init__(self, options: Sequence[str], log_path: Path, killed: Callable[[], str] = str) -> None:
        self._options = options
        self._killed = killed
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
        """Start the nursery unless it runs; does not wait for its imports.

        Raises:
            LaunchFailed: the process cannot be started.
        """
        if self._serving is None:
            try:
                self._serving = self._spawn()
            except OSError as error:
                raise LaunchFailed(f"cannot start the nursery: {error}") from error
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
        command = [sys.executable, "-P", "-m", "teimgr.control.launch.nursery", str(theirs.fileno()), *self._options]
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
                    start_new_session=True,  # Ctrl-C at the daemon's terminal must not reach it
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
                undo.callback(ours.close)  # ends the standby
                forked = await process.request({"standby": True}, [theirs.fileno()], limit_s)
                undo.pop_all()
        except (LaunchFailed, OSError) as error:
            log.warning("standby of the nursery not started", extra={"reason": str(error)})
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
                if self._serving is None:  # it died at its start; the next launch tries again
                    return
                try:
                    process = await self._proven()
                except LaunchFailed:
                    return
                if process.threads > 1:  # its children import again, so a standby is useless
                    return
                if self._standby is None:
                    await self._fork_standby(process)

    def _want_standby(self, pause_s: float = 0.0) -> None:
        if not self._closed and (self._replenishing is None or self._replenishing.done()):
            self._replenishing = asyncio.create_task(self._replenish(pause_s), name="standby of the nursery")

    # Events of the processes

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
        cause = self._killed() or f"died: {last_line(self._log_path) or 'it left no message'}"
        reason = f"the workers' fork server {cause}"
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
                log.error("nursery not restarted; trying again", extra={"reason": str(error)})
        return reason


def _record(process: NurseryProcess, path: Path) -> None:
    with suppress(OSError):  # optional: lets the next daemon end it sooner
        if run_file := RunFile.of(process.pid):
            run_file.write(path)


class NurseryProcess:
    """One nursery process. `child` is None for a standby, which another nursery forked.

    It takes over `pidfd` and `control`.
    """

    def __init__(
        self,
        owner: NurseryLink,
        pid: int,
        pidfd: int,
        control: socket.socket,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self.build = TorchBuild()
        self.threads = 0
        self.is_proven = child is not None
        """True after its first reply. A standby may hang since its fork, so a failure before that leads to the next
        process instead of an error."""
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._pidfd = pidfd
        self._control = control
        self._control.setblocking(False)
        self._child = child
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._reply: asyncio.Future[Forked] | None = None
        self._request = 0
        self._endings: dict[int, asyncio.Future[Ending | None]] = {}
        self._gone = asyncio.Event()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._pidfd, self._on_ended)
        self._loop.add_reader(self._control.fileno(), self._readable)

    @property
    def was_ready(self) -> bool:
        return self._ready.done()

    @property
    def has_ended(self) -> bool:
        return self._gone.is_set()

    async def ready(self) -> None:
        """Return when the imports are done.

        Raises:
            LaunchFailed: they fail, or take too long.
        """
        try:
            async with asyncio.timeout(STANDBY_LIMIT_S if self._child is None else IMPORT_LIMIT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self._kill()
            raise LaunchFailed("the nursery's imports took too long") from None

    async def request(self, request: Mapping[str, Any], descriptors: Sequence[int], limit_s: float) -> Forked:
        """Have a process forked; one call at a time, after `ready`. Without an answer in time it is killed.

        Raises:
            NurseryDied: it died before the answer; if it had forked, there is a run file.
            LaunchFailed: the fork failed, or the nursery did not answer.
        """
        try:
            self._request += 1
            self._reply = self._loop.create_future()
            message = json.dumps({"id": self._request, **request}).encode()
            if len(message) > MESSAGE_LIMIT_BYTES:
                raise LaunchFailed(f"the spec is {len(message)} bytes long, over {MESSAGE_LIMIT_BYTES}")
            socket.send_fds(self._control, [message], descriptors)
            async with asyncio.timeout(limit_s):
                return await self._reply
        except TimeoutError:
            await self._kill()
            raise LaunchFailed("the nursery did not answer") from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        except (BrokenPipeError, ConnectionResetError) as error:
            await self._kill()
            raise NurseryDied(f"the workers' fork server has exited: {error}") from error
        except OSError as error:
            raise LaunchFailed(f"cannot send the request to the nursery: {error}") from error
        finally:
            self._reply = None

    async def end(self) -> None:
        self._send_signal(signal.SIGTERM)  # during imports it does not notice a closed socket
        try:
            async with asyncio.timeout(_END_LIMIT_S):
                await self._gone.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        """Kill it and wait, so that it cannot fork a worker later."""
        self._send_signal(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_LIMIT_S):
                await self._gone.wait()

    def _send_signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _readable(self) -> None:
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                message, descriptors = b"", []
            if not message:
                self._loop.remove_reader(self._control.fileno())
                self._kill_timer = self._loop.call_later(_TRACEBACK_LIMIT_S, self._send_signal, signal.SIGKILL)
                return
            self._on_message(json.loads(message), *descriptors)

    def _on_message(self, message: dict[str, Any], pidfd: int | None = None) -> None:
        if "threads" in message:
            self.build = TorchBuild(**message["torch"] | {"archs": tuple(message["torch"]["archs"])})
            self._on_ready(message["threads"], message["missing"])
        elif "status" in message:
            ending = self._endings.pop(message["pid"], None)
            if ending is not None and not ending.done():
                ending.set_result(Ending(message["status"], message.get("peak_bytes", 0)))
        elif self._reply is None or message["id"] != self._request or self._reply.done():
            _kill_unclaimed(pidfd)
        else:
            self.is_proven = True
            self._on_reply(self._reply, message, pidfd)

    def _on_reply(self, reply: asyncio.Future[Forked], message: dict[str, Any], pidfd: int | None) -> None:
        if "error" in message:
            reply.set_exception(LaunchFailed(message["error"]))
        elif pidfd is None:  # the kernel drops descriptors above the limit of open files
            with suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)
            text = "too many open files for a worker: raise the limit of open files (RLIMIT_NOFILE)"
            reply.set_exception(LaunchFailed(text))
        else:
            ending = self._endings[message["pid"]] = self._loop.create_future()
            # The exit may be the next message, so the caller gets the future itself.
            reply.set_result(Forked(message["pid"], pidfd, ending))

    def _on_ready(self, threads: int, missing: list[str]) -> None:
        self.threads = threads
        if not self._ready.done():
            self._ready.set_result(None)
        if threads != 1:
            log.warning("nursery has several threads; workers start slowly", extra={"threads": threads})
        for problem in missing:
            log.warning("nursery could not preload", extra={"problem": problem})
        self._owner.on_ready(self)

    def _on_ended(self) -> None:
        reason = "the workers' fork server died"
        try:
            self._readable()  # read the last exits
            self._release()
            reason = self._owner.on_died(self)
        finally:  # waiting calls must fail in any case
            self._fail(NurseryDied(reason))

    def _release(self) -> None:
        self._gone.set()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        # A child that was just forked may hold the other end, so there may have been no end of stream.
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._child is not None:
            self._child.wait()
        else:
            reap(self.pid)  # its parent reaps it, unless it died and orphans are ours

    def _fail(self, error: LaunchFailed) -> None:
        for future in (self._ready, self._reply):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved
        for ending in self._endings.values():
            if not ending.done():
                ending.set_result(None)


def _kill_unclaimed(pidfd: int | None) -> None:
    if pidfd is not None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
