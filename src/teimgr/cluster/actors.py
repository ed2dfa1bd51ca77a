"""The actors: one for each worker, which owns its process, and one for each host, which describes it.

They run in Ray's processes on the worker's host and only ask the host's node agent over its Unix socket. `bridge.py`
turns these classes into actors; they import nothing of Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from teimgr.cluster.messages import AGENT_VARIABLE, LINE_LIMIT_BYTES, HeldWorker, exit_to_dict, read_message
from teimgr.control.launch.process_handle import Exit, LaunchFailed, ProcessHandle, WorkerPaths, open_pidfd
from teimgr.files import file_size
from teimgr.observability.logs import LogSpan, last_warning
from teimgr.wire.json_messages import write_line

CONNECT_LIMIT_S = 5.0
AGENT_ABSENCE_S = 10.0
"""How long to wait for the agent, which may be restarting, to learn why a worker ended."""
_RETRY_PAUSE_S = 0.25

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WorkerActor:
    """Owns one worker or mux process: its name in the cluster is the mutex of a replica. Async; methods may be called
    while others wait."""

    def __init__(self) -> None:
        self._held: HeldWorker | None = None
        self._process: ProcessHandle | None = None
        self._exit: asyncio.Task[dict[str, Any]] | None = None

    async def ready(self) -> bool:
        """Return once Ray has placed the actor."""
        return True

    async def launch(self, spec: str, op: str = "launch") -> dict[str, Any]:
        """Have the node agent start a process: {"worker": …} as `HeldWorker`, or {"error": text}."""
        try:
            link = await _connect()
            write_line(link[1], op=op, spec=spec)
            answer = await read_message(link[0])
        except OSError as error:
            return {"error": f"no node agent: {error}"}
        if answer is None or "worker" not in answer:
            link[1].close()
            return {"error": answer["error"] if answer else "the node agent ended"}
        self._held = held = HeldWorker.from_dict(answer["worker"])
        if (pidfd := open_pidfd(held.process)) is not None:
            self._process = ProcessHandle(held.pid, pidfd)
        self._exit = asyncio.create_task(self._watch(held, link), name="exit of the worker")
        return {"worker": asdict(held)}

    async def describe(self) -> dict[str, Any]:
        """{"worker", "exit"}; the latter is None while it lives. {} before `launch` has ended."""
        if self._held is None or self._exit is None:
            return {}
        return {"worker": asdict(self._held), "exit": self._exit.result() if self._exit.done() else None}

    async def wait(self) -> dict[str, Any]:
        """Wait until the process has ended, and return the exit in the form of `exit_to_dict`."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, sigterm: bool) -> str | None:
        """Like `WorkerHandle.stop`; the result is the reason of a failure."""
        if self._process is not None:
            try:
                await self._process.stop(grace_s, sigterm=sigterm)
            except LaunchFailed as error:
                return str(error)
        return None

    async def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(signal.Signals(number))

    async def activity_s(self) -> float | None:
        """Like `WorkerHandle.activity_s`."""
        return None if self._process is None else await self._process.activity_s()

    async def _watch(self, held: HeldWorker, link: Link | None) -> dict[str, Any]:
        """Wait for the end of the process. After a restart of the agent, claim the process again."""
        gone_at: float | None = None
        while True:
            if link is not None:
                while (message := await read_message(link[0])) is not None:
                    if "exit" in message:
                        link[1].close()
                        found: dict[str, Any] = message["exit"]
                        return found
                    if "error" in message:
                        break
                link[1].close()
            link = None
            if self._process is None or self._process.has_ended:
                gone_at = gone_at or time.monotonic()
                if time.monotonic() - gone_at > AGENT_ABSENCE_S:
                    return _own_description(held)
            await asyncio.sleep(_RETRY_PAUSE_S)
            with suppress(OSError):
                link = await _connect()
                write_line(link[1], op="claim", incarnation=held.incarnation, pid=held.pid)


class HostActor:
    """Actor that describes its host."""

    async def facts(self, fleet: dict[str, Any]) -> dict[str, Any]:
        """Give the agent the `fleet`; return {"facts": …} as `NodeFacts`, or {"error": text} if it does not answer."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                reader, writer = await _connect()
                try:
                    write_line(writer, op="facts", fleet=fleet)
                    answer = await read_message(reader)
                finally:
                    writer.close()
        except OSError as error:  # TimeoutError is one of them
            return {"error": f"its node agent does not answer: {str(error) or 'timeout'}"}
        return answer if answer is not None else {"error": "its node agent ended"}


async def _connect() -> Link:
    """Open a connection to this host's agent. Raises OSError."""
    path = os.environ.get(AGENT_VARIABLE)
    if path is None:
        raise FileNotFoundError("Ray was not started by teimgr on this host")
    async with asyncio.timeout(CONNECT_LIMIT_S):
        return await asyncio.open_unix_connection(path, limit=LINE_LIMIT_BYTES)


def _own_description(held: HeldWorker) -> dict[str, Any]:
    """Return the exit of a worker whose agent is gone, without a status, and remove its files."""
    paths, log_path = WorkerPaths(Path(held.run_dir), held.incarnation), Path(held.log_path)
    span = LogSpan(log_path, 0, file_size(log_path))
    exit = Exit(None, paths.read_exit_report(), last_warning(log_path), span)
    paths.remove()
    return exit_to_dict(exit)
