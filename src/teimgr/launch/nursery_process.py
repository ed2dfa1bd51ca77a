"""One nursery (fork server) process or its standby, as the daemon sees it: readiness, requests, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from teimgr.launch.nursery import MESSAGE_LIMIT_BYTES, TorchBuild
from teimgr.launch.process_handle import KILL_LIMIT_S, LaunchFailed, reap

IMPORT_LIMIT_S = 120.0
# A standby has imported everything: it only has to run, and to fork where it is to prove that it can.
STANDBY_LIMIT_S = 5.0
# The process may print a traceback after its socket has closed.
_TRACEBACK_LIMIT_S = 2.0
# How long it may take to end at SIGTERM.
_END_LIMIT_S = 2.0

log = logging.getLogger(__name__)


class NurseryDied(LaunchFailed):
    """The nursery ended before it answered."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new process. The receiver closes `pidfd`; `status` becomes None if the nursery dies first."""

    pid: int
    pidfd: int
    status: asyncio.Future[int | None]


class NurseryOwner(Protocol):
    """Who has the process; it is called in the event loop."""

    def on_ready(self, process: NurseryProcess) -> None:
        """The imports are done."""

    def on_died(self, process: NurseryProcess) -> str:
        """The process is gone; the result is the reason."""


class NurseryProcess:
    """One process, from its start to its end. `child` is None for a standby, whose parent is another nursery.

    It takes over `pidfd` and `control`.
    """

    def __init__(
        self,
        owner: NurseryOwner,
        pid: int,
        pidfd: int,
        control: socket.socket,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self.build = TorchBuild()
        self.threads = 0
        self.is_proven = child is not None
        """Whether it has run since it may have to serve; a standby that was forked long ago may be stopped or hang."""
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._pidfd = pidfd
        self._control = control
        self._control.setblocking(False)
        self._child = child
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._reply: asyncio.Future[Forked] | None = None
        self._request = 0
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
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
            await asyncio.wait_for(
                asyncio.shield(self._ready), STANDBY_LIMIT_S if self._child is None else IMPORT_LIMIT_S
            )
        except TimeoutError:
            await self._kill()
            raise LaunchFailed("the nursery's imports do not end") from None

    async def request(self, request: Mapping[str, Any], descriptors: Sequence[int], limit_s: float) -> Forked:
        """Have a process forked; one call at a time, after `ready`. Without an answer in time it is killed.

        Raises:
            NurseryDied: it died before the answer; if it had forked, there is a run file.
            LaunchFailed: the fork failed, or there was no answer.
        """
        try:
            self._request += 1
            self._reply = self._loop.create_future()
            message = json.dumps({"id": self._request, **request}).encode()
            if len(message) > MESSAGE_LIMIT_BYTES:
                raise LaunchFailed(f"the spec is {len(message)} bytes long, over {MESSAGE_LIMIT_BYTES}")
            socket.send_fds(self._control, [message], descriptors)
            return await asyncio.wait_for(self._reply, limit_s)
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
        self._send_signal(signal.SIGTERM)  # during its imports it would not notice a closed socket
        try:
            await asyncio.wait_for(self._gone.wait(), _END_LIMIT_S)
        except TimeoutError:
            await self._kill()  # stopped, or it hangs

    async def _kill(self) -> None:
        """Kill it and wait, so that it cannot fork a worker later."""
        self._send_signal(signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), KILL_LIMIT_S)

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
            status = self._statuses.pop(message["pid"], None)
            if status is not None and not status.done():
                status.set_result(message["status"])
        elif self._reply is None or message["id"] != self._request or self._reply.done():
            _kill_unclaimed(pidfd)
        else:
            self.is_proven = True
            self._on_reply(self._reply, message, pidfd)

    def _on_reply(self, reply: asyncio.Future[Forked], message: dict[str, Any], pidfd: int | None) -> None:
        if "error" in message:
            reply.set_exception(LaunchFailed(message["error"]))
        elif pidfd is None:  # the kernel drops a descriptor for which this process has no room
            with suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)
            text = "no descriptor is left for a worker: raise the limit of open files (RLIMIT_NOFILE)"
            reply.set_exception(LaunchFailed(text))
        else:
            status = self._statuses[message["pid"]] = self._loop.create_future()
            # The process may have exited, and its status be the next message: the caller gets the future itself.
            reply.set_result(Forked(message["pid"], pidfd, status))

    def _on_ready(self, threads: int, missing: list[str]) -> None:
        self.threads = threads
        if not self._ready.done():
            self._ready.set_result(None)
        if threads != 1:
            log.warning("nursery has several threads; workers start slowly", extra={"threads": threads})
        for problem in missing:
            log.warning("nursery could not import", extra={"problem": problem})
        self._owner.on_ready(self)

    def _on_ended(self) -> None:
        reason = "the nursery died"
        try:
            self._readable()  # the last reported exits
            self._release()
            reason = self._owner.on_died(self)
        finally:  # waiting calls must fail even if something else goes wrong
            self._fail(NurseryDied(reason))

    def _release(self) -> None:
        self._gone.set()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        # The end of the stream may not have been seen: a child that was just forked may hold the other end.
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._child is not None:
            self._child.wait()
        else:
            reap(self.pid)  # its parent has done so, unless it is dead and orphans come to this process

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
