"""Client of the nursery (the fork server): starts its process, restarts it when it dies, requests forks."""

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
from typing import Any

from teimgr.launch.nursery import MESSAGE_LIMIT_BYTES, TorchBuild
from teimgr.launch.process_handle import KILL_LIMIT_S, LaunchFailed, RunFile
from teimgr.observability.logs import last_line, open_log

IMPORT_LIMIT_S = 120.0
FORK_LIMIT_S = 30.0
_LOG_LIMIT_BYTES = 1 << 20
# The process may print a traceback after its socket has closed.
_TRACEBACK_LIMIT_S = 2.0
# How long it may take to end at SIGTERM.
_END_LIMIT_S = 2.0

log = logging.getLogger(__name__)


class NurseryDied(LaunchFailed):
    """The nursery ended before it answered."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new worker. The receiver closes `pidfd`; `status` becomes None if the nursery dies first."""

    pid: int
    pidfd: int
    status: asyncio.Future[int | None]


class NurseryLink:
    """Keeps one nursery process running; `options` are the arguments after its control descriptor."""

    def __init__(self, options: Sequence[str], log_path: Path) -> None:
        self._options = options
        self._log_path = log_path
        self._run_file = log_path.with_suffix(".run")
        self._process: _NurseryProcess | None = None
        self._one_fork = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._process.process.pid if self._process else None

    def start(self) -> None:
        """Start the process, if there is none; does not wait for its imports.

        Raises:
            LaunchFailed: the process cannot be started.
        """
        if self._process is None:
            try:
                self._process = _NurseryProcess(self._spawn(), self._on_died)
            except OSError as error:
                raise LaunchFailed(f"the nursery cannot be started: {error}") from error
            with suppress(OSError):  # the file only lets the next daemon end it sooner
                if run_file := RunFile.of(self._process.process.pid):
                    run_file.write(self._run_file)

    def kill_leftover(self) -> None:
        """Kill the nursery of an earlier daemon, which may be stalled with a request to fork in its queue."""
        found = RunFile.read(self._run_file)
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
            return await self._running().fork(request, listener, log_fd, ports)

    def _running(self) -> _NurseryProcess:
        if self._closed:
            raise LaunchFailed("the daemon is ending")
        self.start()
        assert self._process is not None
        return self._process

    async def close(self) -> None:
        """End the nursery; the workers continue."""
        self._closed = True
        if self._process is not None:
            await self._process.end()
        self._run_file.unlink(missing_ok=True)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "teimgr.launch.nursery", str(theirs.fileno()), *self._options]
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            output = open_log(self._log_path, _LOG_LIMIT_BYTES, 1)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C in our terminal must not end it
                )
            finally:
                os.close(output)
            undo.pop_all()
        ours.setblocking(False)
        return process, ours

    def _on_died(self, was_ready: bool) -> str:
        """The reason. A nursery that was ready is replaced at once, so that the next launch need not wait."""
        self._process = None
        reason = f"the nursery died: {last_line(self._log_path) or 'it left no message'}"
        if not self._closed:
            log.error("nursery died", extra={"reason": reason})
            if was_ready:
                try:
                    self.start()
                except LaunchFailed as error:
                    log.error("nursery cannot be started again yet", extra={"reason": str(error)})
        return reason


class _NurseryProcess:
    """One nursery process, from its start to its end."""

    def __init__(self, spawned: tuple[subprocess.Popen[bytes], socket.socket], on_died: Callable[[bool], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.process, self._control = spawned
        self._on_died = on_died
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.build = TorchBuild()
        self._reply: asyncio.Future[Forked] | None = None
        self._request = 0
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
        self._gone = asyncio.Event()
        self._kill_timer: asyncio.TimerHandle | None = None
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            self._control.close()
            self.process.kill()
            self.process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._on_ended)
        self._loop.add_reader(self._control.fileno(), self._readable)

    async def ready(self) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), IMPORT_LIMIT_S)
        except TimeoutError:
            self.process.kill()
            raise LaunchFailed("the nursery's imports do not end") from None

    async def fork(self, request: dict[str, str], listener: int, log_fd: int, ports: Mapping[int, int]) -> Forked:
        """As `NurseryLink.fork`; one call at a time."""
        await self.ready()
        try:
            self._request += 1
            self._reply = self._loop.create_future()
            message = json.dumps({"id": self._request, **request, "ports": [*ports]}).encode()
            if len(message) > MESSAGE_LIMIT_BYTES:
                raise LaunchFailed(f"the spec is {len(message)} bytes long, over {MESSAGE_LIMIT_BYTES}")
            socket.send_fds(self._control, [message], [listener, log_fd, *ports.values()])
            return await asyncio.wait_for(self._reply, FORK_LIMIT_S)
        except TimeoutError:
            await self._kill()
            raise LaunchFailed("the nursery does not answer") from None
        except asyncio.CancelledError:  # the caller stopped waiting
            await self._kill()
            raise
        except (BrokenPipeError, ConnectionResetError) as error:
            await self._kill()
            raise NurseryDied(f"the nursery is gone: {error}") from error
        except OSError as error:
            raise LaunchFailed(f"the request cannot be sent to the nursery: {error}") from error
        finally:
            self._reply = None

    async def end(self) -> None:
        self.process.terminate()  # during its imports it would not notice a closed socket
        try:
            await asyncio.wait_for(self._gone.wait(), _END_LIMIT_S)
        except TimeoutError:
            await self._kill()  # stopped, or it hangs

    async def _kill(self) -> None:
        """Kill it and wait, so that it cannot fork a worker later."""
        self.process.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), KILL_LIMIT_S)

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
                self._kill_timer = self._loop.call_later(_TRACEBACK_LIMIT_S, self.process.kill)
                return
            self._on_message(json.loads(message), *descriptors)

    def _on_message(self, message: dict[str, Any], pidfd: int | None = None) -> None:
        if "threads" in message:
            self.build = TorchBuild(**message["torch"] | {"archs": tuple(message["torch"]["archs"])})
            self._on_ready(message["threads"], message["missing"])
        elif "status" in message:
            status = self._statuses.pop(message["pid"], None)
            if status is not None and not status.done():
                status.set_result(message["status"])
        elif self._reply is None or message["id"] != self._request or self._reply.done():
            _kill_unclaimed(pidfd)
        elif "error" in message:
            self._reply.set_exception(LaunchFailed(message["error"]))
        elif pidfd is None:  # the kernel drops a descriptor for which this process has no room
            with suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)
            text = "no descriptor is left for a worker: raise the limit of open files (RLIMIT_NOFILE)"
            self._reply.set_exception(LaunchFailed(text))
        else:
            status = self._statuses[message["pid"]] = self._loop.create_future()
            # The worker may have exited, and its status be the next message: the caller gets the future itself.
            self._reply.set_result(Forked(message["pid"], pidfd, status))

    def _on_ready(self, threads: int, missing: list[str]) -> None:
        if not self._ready.done():
            self._ready.set_result(None)
        if threads != 1:
            log.warning("nursery has several threads; workers start slowly", extra={"threads": threads})
        for problem in missing:
            log.warning("nursery could not import", extra={"problem": problem})

    def _on_ended(self) -> None:
        reason = "the nursery died"
        try:
            self._readable()  # the last reported exits
            self._release()
            reason = self._on_died(self._ready.done())
        finally:  # waiting calls must fail even if something else goes wrong
            self._fail(NurseryDied(reason))
            self._gone.set()

    def _release(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        # The end of the stream may not have been seen: a child that was just forked may hold the other end.
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        self.process.wait()

    def _fail(self, error: LaunchFailed) -> None:
        for future in (self._ready, self._reply):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # retrieved, in case nothing waits for it
        for status in self._statuses.values():
            if not status.done():
                status.set_result(None)


def _kill_unclaimed(pidfd: int | None) -> None:
    if pidfd is not None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
