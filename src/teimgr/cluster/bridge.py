"""The daemon's side of the bridge to Ray: starts the bridge process, restarts it when it ends, and calls it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from teimgr.cluster.messages import LINE_LIMIT_BYTES, read_message
from teimgr.errors import Unavailable
from teimgr.observability.logs import last_line, open_log
from teimgr.wire.json_messages import write_line

READY_LIMIT_S = 60.0
_END_LIMIT_S = 3.0
_FIRST_PAUSE_S = 0.25
_MAX_PAUSE_S = 5.0
_LOG_LIMIT_BYTES = 1 << 20

log = logging.getLogger(__name__)


class BridgeLost(Unavailable):
    """Ray cannot be reached now. Whether the operation was done is unknown."""


class ActorExists(Exception):
    """Another actor has this name."""


class ActorAbsent(Exception):
    """An actor with this name does not exist."""


class ActorLost(Exception):
    """The actor is dead, or its host is; the text is Ray's reason."""


class RayRefused(Unavailable):
    """Ray refused the operation; the message has its reason."""


class AnswerLate(Exception):
    """No answer within the limit."""


_ERRORS: Mapping[str, Callable[[str], Exception]] = {
    "exists": ActorExists,
    "absent": ActorAbsent,
    "lost": ActorLost,
    "timeout": AnswerLate,
    "ray": RayRefused,
}


class Bridge:
    """Keeps one bridge process connected to Ray at `address`, from `start` to `close`. `environ` is the process's."""

    def __init__(self, address: str, node_ip: str, environ: Mapping[str, str], log_path: Path) -> None:
        self.connected = asyncio.Event()
        self.problem = "not connected yet"
        """Why Ray cannot be reached; valid while it is not connected."""
        self._arguments = (address, node_ip)
        self._environ = environ
        self._log_path = log_path
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start connecting, if not yet started; `connected` is set once it succeeds."""
        self._task = self._task or asyncio.create_task(self._keep_running(), name="bridge to Ray")

    async def close(self) -> None:
        """End the process. The actors keep running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def call(self, op: str, **arguments: object) -> Any:
        """Have the bridge carry out an operation of `bridge_process.py`, which a cancellation ends there too.

        Raises:
            BridgeLost: the bridge is not connected, or its process ended.
            ActorExists, ActorAbsent, ActorLost, AnswerLate, RayRefused: as their names state.
        """
        if self._writer is None or not self.connected.is_set():
            raise BridgeLost(f"no connection to Ray: {self.problem}")
        id = next(self._ids)
        reply = self._calls[id] = asyncio.get_running_loop().create_future()
        try:
            write_line(self._writer, id=id, op=op, **arguments)
            return await reply
        except asyncio.CancelledError:
            if self._writer is not None:
                write_line(self._writer, cancel=id)
            raise
        finally:
            del self._calls[id]

    async def _keep_running(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._run()
            except OSError as error:
                self.problem = f"the bridge cannot be started: {error}"
            if asyncio.get_running_loop().time() - began > READY_LIMIT_S:
                pause_s = _FIRST_PAUSE_S
            log.warning("no connection to Ray", extra={"reason": self.problem})
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    async def _run(self) -> None:
        """Run one bridge process from start to end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        output = open_log(self._log_path, _LOG_LIMIT_BYTES, 1)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220  as fast as any other way
                [sys.executable, "-P", "-m", "teimgr.cluster.bridge_process", str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(output)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_LIMIT_BYTES)
        try:
            await self._read(reader)
        finally:
            self.connected.clear()
            self._writer.close()
            self._writer = None
            for reply in self._calls.values():
                if not reply.done():
                    reply.set_exception(BridgeLost("the connection to Ray was lost"))
            await asyncio.shield(asyncio.to_thread(_end, process))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                first = await read_message(reader)
        except TimeoutError:
            first, self.problem = None, f"Ray did not answer within {READY_LIMIT_S:g} s"
        else:
            self.problem = last_line(self._log_path) or "the bridge ended without a message"
        if first is None:
            return
        self.connected.set()
        log.info("connected to Ray", extra={"ray": first.get("ready")})
        while (answer := await read_message(reader)) is not None:
            reply = self._calls.get(answer["id"])
            if reply is None or reply.done():
                continue
            if "error" in answer:
                kind, text = answer["error"]
                reply.set_exception(_ERRORS.get(kind, RayRefused)(text))
            else:
                reply.set_result(answer["value"])
        self.problem = last_line(self._log_path) or "the bridge ended"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a bridge whose socket is closed, and kill one that hangs. Blocking."""
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
