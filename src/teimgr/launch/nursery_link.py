"""The daemon's end of the nursery: starts it, starts it again when it dies, asks it for workers."""

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

from teimgr.launch.launcher import LaunchFailed
from teimgr.launch.log_files import last_line, open_log
from teimgr.launch.nursery import MESSAGE_LIMIT_BYTES, TorchBuild
from teimgr.launch.process_handle import KILL_LIMIT_S

IMPORT_LIMIT_S = 120.0
FORK_LIMIT_S = 30.0
_LOG_LIMIT_BYTES = 1 << 20
# Between the end of its socket and the end of the process there may be a traceback to print.
_LAST_WORDS_LIMIT_S = 2.0

log = logging.getLogger(__name__)


class NurseryDied(LaunchFailed):
    """The nursery ended before it answered."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new worker. `pidfd` belongs to the receiver; `status` becomes None when nobody can tell any more."""

    pid: int
    pidfd: int
    status: asyncio.Future[int | None]


class NurseryLink:
    """Keeps one nursery process; `options` are the arguments after its control descriptor."""

    def __init__(self, options: Sequence[str], log_path: Path) -> None:
        self._options = options
        self._log_path = log_path
        self._life: _Life | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The nursery's process, while there is one."""
        return self._life.process.pid if self._life else None

    def start(self) -> None:
        """Make the process, if there is none; it imports while we go on.

        Raises:
            LaunchFailed: the system has no process for us.
        """
        if self._life is None:
            try:
                self._life = _Life(self._spawn(), self._died)
            except OSError as error:
                raise LaunchFailed(f"the nursery cannot be started: {error}") from error

    async def ready(self) -> None:
        """Return when the imports are done.

        Raises:
            LaunchFailed: they fail, or take too long.
        """
        await self._living().ready()

    async def build(self) -> TorchBuild:
        """What the torch that workers will have was built for.

        Raises:
            LaunchFailed: as `ready`.
        """
        life = self._living()
        await life.ready()
        return life.build

    async def fork(self, request: dict[str, str], listener: int, log_fd: int, ports: Mapping[int, int]) -> Forked:
        """A worker that owns copies of the descriptors; `ports` are those of shared sockets, by number.

        Raises:
            NurseryDied: before it answered; when there is a worker all the same, its run file says which.
            LaunchFailed: the nursery could not make it.
        """
        async with self._turn:
            return await self._living().fork(request, listener, log_fd, ports)

    def _living(self) -> _Life:
        if self._closed:
            raise LaunchFailed("the daemon is ending")
        self.start()
        assert self._life is not None
        return self._life

    async def close(self) -> None:
        """Let the nursery end; the workers go on."""
        self._closed = True
        if self._life is not None:
            await self._life.end()

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
                    start_new_session=True,  # a Ctrl-C in our terminal is not meant for it
                )
            finally:
                os.close(output)
            undo.pop_all()
        ours.setblocking(False)
        return process, ours

    def _died(self, was_ready: bool) -> str:
        """Why, in a sentence. One that was ready is replaced at once, so that the next launch need not wait."""
        self._life = None
        reason = f"the nursery died: {last_line(self._log_path) or 'it left no message'}"
        if not self._closed:
            log.error("nursery died", extra={"reason": reason})
            if was_ready:
                self._start_early()
        return reason

    def _start_early(self) -> None:
        try:
            self.start()
        except LaunchFailed as error:
            log.error("nursery cannot be started again yet", extra={"reason": str(error)})


class _Life:
    """One nursery process, from its start to the end of its control socket."""

    def __init__(self, spawned: tuple[subprocess.Popen[bytes], socket.socket], died: Callable[[bool], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.process, self._control = spawned
        self._died = died
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.build = TorchBuild()
        self._reply: asyncio.Future[Forked] | None = None
        self._request = 0
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
        self._gone = asyncio.Event()
        self._doom: asyncio.TimerHandle | None = None
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            self._control.close()
            self.process.kill()
            self.process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(self._control.fileno(), self._readable)

    async def ready(self) -> None:
        """As `NurseryLink.ready`."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), IMPORT_LIMIT_S)
        except TimeoutError:
            self.process.kill()
            raise LaunchFailed("the nursery's imports do not end") from None

    async def fork(self, request: dict[str, str], listener: int, log_fd: int, ports: Mapping[int, int]) -> Forked:
        """As `NurseryLink.fork`; one at a time."""
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
        except (BrokenPipeError, ConnectionResetError) as error:
            await self._kill()
            raise NurseryDied(f"the nursery is gone: {error}") from error
        except OSError as error:
            raise LaunchFailed(f"the nursery cannot be asked: {error}") from error
        finally:
            self._reply = None

    async def end(self) -> None:
        """Close the socket and see the process out."""
        self.process.terminate()  # it may be importing, and not look at its socket for seconds
        await self._gone.wait()

    async def _kill(self) -> None:
        """Have it gone when this returns, so that it makes no worker behind our back."""
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
                self._doom = self._loop.call_later(_LAST_WORDS_LIMIT_S, self.process.kill)
                return
            self._take(json.loads(message), *descriptors)

    def _take(self, said: dict[str, Any], pidfd: int | None = None) -> None:
        if "threads" in said:
            self.build = TorchBuild(**said["torch"] | {"archs": tuple(said["torch"]["archs"])})
            self._started(said["threads"], said["missing"])
        elif "status" in said:
            status = self._statuses.pop(said["pid"], None)
            if status is not None and not status.done():
                status.set_result(said["status"])
        elif self._reply is None or said["id"] != self._request or self._reply.done():
            _disown(pidfd)
        elif pidfd is None:
            self._reply.set_exception(LaunchFailed(said["error"]))
        else:
            status = self._statuses[said["pid"]] = self._loop.create_future()
            # The worker may have ended already, and its status be the next message: the caller gets the future itself.
            self._reply.set_result(Forked(said["pid"], pidfd, status))

    def _started(self, threads: int, missing: list[str]) -> None:
        if not self._ready.done():
            self._ready.set_result(None)
        if threads != 1:
            log.warning("nursery has several threads; workers start slowly", extra={"threads": threads})
        for problem in missing:
            log.warning("nursery could not import", extra={"problem": problem})

    def _ended(self) -> None:
        reason = "the nursery died"
        try:
            self._readable()  # the last ends it reported
            self._let_go()
            reason = self._died(self._ready.done())
        finally:  # whoever waits must hear of it, whatever else goes wrong
            self._fail(NurseryDied(reason))
            self._gone.set()

    def _let_go(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._doom is not None:
            self._doom.cancel()
        # A child that was just forked may still hold the other end: its end need not have been seen.
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        self.process.wait()

    def _fail(self, error: LaunchFailed) -> None:
        for future in (self._ready, self._reply):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits
        for status in self._statuses.values():
            if not status.done():
                status.set_result(None)


def _disown(pidfd: int | None) -> None:
    """Nobody waits for this worker any more: the launch that asked for it was abandoned."""
    if pidfd is not None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
