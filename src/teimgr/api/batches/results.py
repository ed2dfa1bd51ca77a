"""Results of a run that wait for the disk, and their commits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from teimgr.api.batches.batch_record import Batch
from teimgr.api.batches.batch_store import BatchStore, ResultLine
from teimgr.errors import QuotaExceeded, StorageFull
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics

NO_ROOM_PAUSE_S = 5.0
_COMMIT_S = 1.0
# A commit begins at once at this many bytes; at twice as many, further results must wait.
_COMMIT_BYTES = 4 * 2**20


class Results:
    """Finished requests of one batch: added as they come, committed every second.

    Attributes:
        has_room: Clear while too many bytes wait; no further request should begin then.
        problem: Why the last commit failed, if it did: the disk is full, or a quota is used up.
    """

    def __init__(self, batch: Batch, store: BatchStore, metrics: DaemonMetrics) -> None:
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.problem: str | None = None
        self._batch = batch
        self._store = store
        self._metrics = metrics
        self._waiting: list[ResultLine] = []
        self._bytes = 0
        self._is_due = asyncio.Event()

    def add(self, line: ResultLine) -> None:
        self._waiting.append(line)
        self._bytes += len(line.data)
        self._note_size()

    def rows(self) -> set[int]:
        """The requests whose results wait."""
        return {line.row for line in self._waiting}

    async def commit_regularly(self) -> None:
        """Commit every second, and whenever much waits, until this is cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_COMMIT_S):
                    await self._is_due.wait()
            if not await self.commit():
                await asyncio.sleep(NO_ROOM_PAUSE_S)

    async def commit_all(self) -> None:
        """Commit what waits; try again while the disk is full."""
        while True:
            if await self.commit():
                return
            await asyncio.sleep(NO_ROOM_PAUSE_S)

    async def commit(self) -> bool:
        """Commit what waits; False if the disk is full: it goes on waiting."""
        lines = self._waiting.copy()
        if lines:
            try:
                await self._store.commit(self._batch, lines)
            except (QuotaExceeded, StorageFull) as error:
                self.problem = error.message
                return False
            del self._waiting[: len(lines)]
            self._bytes -= sum(len(line.data) for line in lines)
            self._note_size()
            failed = sum(line.is_error for line in lines)
            self._metrics.count(catalogue.BATCH_LINES, "failed", by=failed)
            self._metrics.count(catalogue.BATCH_LINES, "completed", by=len(lines) - failed)
        self.problem = None
        return True

    def _note_size(self) -> None:
        for event, is_set in (
            (self._is_due, self._bytes >= _COMMIT_BYTES),
            (self.has_room, self._bytes < 2 * _COMMIT_BYTES),
        ):
            if is_set:
                event.set()
            else:
                event.clear()
