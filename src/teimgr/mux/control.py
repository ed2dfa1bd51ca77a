"""Control socket of the mux: one line of JSON per message, from any number of daemons.

    {"policy": {…}}            replace the access policy; no reply
    {"snapshot": [entry, …]}   replace the directory; no reply
    {"stats": true}            replied by one line of counters
    {"stop": grace_s}          drain within `grace_s` seconds and exit; no reply

Lines are processed in order, so the reply to `stats` confirms those before it.
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
    """Server of the control socket. `on_orphaned` is called after `orphan_grace_s` seconds without a daemon."""

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
        self._start_orphan_timer()

    async def close(self) -> None:
        """Stop listening, close the connections, remove the socket file if it is still this process's own."""
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

    def _start_orphan_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._orphan_timer = loop.call_later(self._orphan_grace_s, self._on_orphaned)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        task = asyncio.create_task(self._serve(reader, writer))
        self._daemons.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._daemons.discard(task)
        if not self._daemons and self._server is not None and self._server.is_serving():
            self._start_orphan_timer()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("control connection failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                await self._process(line, writer)
        except (ConnectionError, ValueError) as error:
            _log.warning("control connection dropped: %s", error)
        finally:
            writer.close()

    async def _process(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        message = json.loads(line)
        if "policy" in message:  # before a snapshot, which lets the server start
            self._on_policy(Policy.from_json(json.dumps(message["policy"])))
        if "snapshot" in message:
            self._on_snapshot(RoutingSnapshot.from_json(json.dumps(message["snapshot"])))
        if message.get("stats"):
            writer.write(json.dumps(self._stats()).encode() + b"\n")
            await writer.drain()
        if "stop" in message:
            self._on_stop(float(message["stop"]))
