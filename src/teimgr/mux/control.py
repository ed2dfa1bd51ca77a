"""The mux's control socket: a line of JSON per message, from whichever daemon is connected.

    {"policy": {…}}            who may call, from now on; no answer
    {"snapshot": [entry, …]}   take this for the directory; no answer
    {"stats": true}            answered by one line of counters
    {"stop": grace_s}          finish within `grace_s` seconds and exit; no answer

Lines are carried out in order, so the answer to `stats` says that what came before it is done.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from teimgr.auth.policy import Policy
from teimgr.directory import RoutingSnapshot

_log = logging.getLogger(__name__)
_LINE_BYTES = 64 * 1024 * 1024


class MuxControl:
    """The server end. `on_orphaned` is called when no daemon was connected for `orphan_grace_s` seconds."""

    def __init__(
        self,
        path: Path,
        orphan_grace_s: float,
        *,
        on_policy: Callable[[Policy], None],
        on_snapshot: Callable[[RoutingSnapshot], None],
        on_stop: Callable[[float], None],
        on_orphaned: Callable[[], None],
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._path = path
        self._orphan_grace_s = orphan_grace_s
        self._on_policy = on_policy
        self._on_snapshot = on_snapshot
        self._on_stop = on_stop
        self._on_orphaned = on_orphaned
        self._stats = stats
        self._server: asyncio.Server | None = None
        self._daemons: set[asyncio.Task[None]] = set()
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._inode = 0

    async def open(self) -> None:
        """Listen; a socket file left by a dead process is replaced."""
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=_LINE_BYTES)
        self._path.chmod(0o600)
        self._inode = self._path.stat().st_ino
        self._expect_daemon()

    async def close(self) -> None:
        """Stop listening, drop the daemons, remove the socket file if it is still this process's own."""
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        if self._server is not None:
            self._server.close()
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        for task in self._daemons:
            task.cancel()
        if self._daemons:
            await asyncio.wait(self._daemons)

    def _expect_daemon(self) -> None:
        loop = asyncio.get_running_loop()
        self._orphan_timer = loop.call_later(self._orphan_grace_s, self._on_orphaned)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        task = asyncio.create_task(self._serve(reader, writer))
        self._daemons.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._daemons.discard(task)
        if not self._daemons and self._server is not None and self._server.is_serving():
            self._expect_daemon()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("control connection failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                await self._obey(line, writer)
        except (ConnectionError, ValueError) as error:
            _log.warning("control connection dropped: %s", error)
        finally:
            writer.close()

    async def _obey(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        message = json.loads(line)
        if "policy" in message:  # before a snapshot, which opens the door
            self._on_policy(Policy.from_json(json.dumps(message["policy"])))
        if "snapshot" in message:
            self._on_snapshot(RoutingSnapshot.from_json(json.dumps(message["snapshot"])))
        if message.get("stats"):
            writer.write(json.dumps(self._stats()).encode() + b"\n")
            await writer.drain()
        if "stop" in message:
            self._on_stop(float(message["stop"]))
