"""The run of one batch: validation, requests, and publication of the results.

The record of a batch contains the set of requests with a result and the committed lengths of the two files of results.
After a kill, the run continues with the requests not in the set. The next commit to a file truncates it to its
committed length.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from teimgr.api.batches.batch_record import Batch, BatchFault, ResultPart, Status
from teimgr.api.batches.batch_store import BatchStore, ResultLine
from teimgr.api.batches.disk import Disk
from teimgr.api.batches.files import BATCH_OUTPUT, FileStore, StoredFile
from teimgr.api.batches.lines import (
    CANCELLED,
    EXPIRED,
    CallSlots,
    CheckModel,
    InputRequest,
    LineError,
    Send,
    answered,
    read_requests,
    result_line,
    validate,
)
from teimgr.api.gateway.routes import DialectPath
from teimgr.errors import QuotaExceeded, StorageFull
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics

log = logging.getLogger(__name__)

NO_ROOM_PAUSE_S = 5.0
_COMMIT_S = 1.0
# This many bytes start a commit at once; at twice as many, further results wait.
_COMMIT_BYTES = 4 * 2**20


class Results:
    """Finished requests of one batch, committed every second.

    Attributes:
        has_room: Clear while too many bytes wait; then no further request should begin.
        problem: Why the last commit failed: a full disk, or an exhausted quota.
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


# Longer than any line allowed by `max_line_kb`, now or when the file was validated.
_LONGEST_LINE_BYTES = 32 * 2**20
_BODIES_BYTES = 4 * 2**20  # of one batch in memory or in the workers


@dataclass(frozen=True)
class RunTools:
    """Shared by all runs. `max_line_bytes` bounds a line of an input file."""

    files: FileStore
    store: BatchStore
    disk: Disk
    slots: CallSlots
    metrics: DaemonMetrics
    max_line_bytes: int


@dataclass(frozen=True)
class Destination:
    """The target of a batch's requests, as its owner."""

    path: DialectPath
    send: Send
    check_model: CheckModel


class BatchRun:
    """The run of one batch, from its current status to its end."""

    def __init__(self, batch: Batch, destination: Destination, tools: RunTools) -> None:
        self.batch = batch
        self._destination = destination
        self._tools = tools
        self._results = Results(batch, tools.store, tools.metrics)
        self._problem: str | None = None
        self._cancelled = asyncio.Event()
        if batch.status is Status.CANCELLING:
            self._cancelled.set()

    @property
    def problem(self) -> str | None:
        """Why the batch cannot go on at present, if anything."""
        return self._problem or self._results.problem

    def cancel(self) -> None:
        """End the run soon, with what is done so far. The status of the batch is `cancelling`."""
        self._cancelled.set()

    async def run(self) -> None:
        """Work until the batch has ended. Cancelling the task leaves it as it is, for a later run."""
        try:
            await self._run()
        except asyncio.CancelledError:
            await self._results.commit()  # a later run need not repeat them
            raise
        except Exception as error:
            log.exception("a batch failed", extra={"batch": self.batch.id})
            self.batch.faults.append(BatchFault("internal_error", f"{type(error).__name__}: see the daemon's log."))
            await self._publish(Status.FAILED)

    async def _run(self) -> None:
        batch = self.batch
        if batch.status is Status.VALIDATING:
            await self._until_stopped(self._validate())
        if batch.status is Status.IN_PROGRESS and await self._until_stopped(self._work()):
            await self._enter(Status.FINALIZING)
        if batch.status is Status.FAILED:
            return
        if batch.status is Status.FINALIZING:
            await self._publish(Status.COMPLETED)
        elif self._cancelled.is_set():
            await self._write_off(CANCELLED)
            await self._publish(Status.CANCELLED)
        else:
            await self._write_off(EXPIRED)
            await self._publish(Status.EXPIRED)

    # Steps

    async def _validate(self) -> None:
        batch, tools = self.batch, self._tools
        limits = (tools.max_line_bytes, tools.files.settings.max_lines)
        path = tools.files.path(batch.input_file_id)
        found = await validate(tools.disk, path, batch.endpoint, *limits, self._destination.check_model)
        batch.note_validated(found.total, found.model, found.faults)
        await self._enter(Status.FAILED if found.faults else Status.IN_PROGRESS)

    async def _work(self) -> None:
        """Have every request that has no result answered. What was answered is kept where this is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                committing = group.create_task(self._results.commit_regularly())
                await self._answer_all()
                committing.cancel()
        except BaseExceptionGroup as failures:
            raise _first_of(failures) from None
        await self._results.commit_all()

    async def _answer_all(self) -> None:
        concurrency = self._tools.files.settings.concurrency
        places, bodies = asyncio.Semaphore(concurrency), ByteBudget(_BODIES_BYTES)

        async def one(request: InputRequest) -> None:
            try:
                to = self._destination
                line = await answered(self.batch.id, request, to.path.dialect, to.send, self._tools.slots)
                self._results.add(line)
            finally:
                bodies.give_back(len(request.body))
                places.release()

        async with asyncio.TaskGroup() as group, aclosing(self._open_requests()) as requests:
            async for request in requests:
                await self._results.has_room.wait()
                await places.acquire()
                await bodies.take(len(request.body))
                group.create_task(one(request))

    async def _write_off(self, why: LineError) -> None:
        """A line of error for each request without a result; left out if the disk is full."""
        if not self.batch.total:  # not validated
            return
        async with aclosing(self._open_requests()) as requests:
            async for request in requests:
                self._results.add(result_line(self.batch.id, request, why))
                if not self._results.has_room.is_set() and not await self._results.commit():
                    return
        await self._results.commit()

    async def _publish(self, end: Status) -> None:
        """Make the results files of the owner, and end the batch."""
        batch, progress = self.batch, self.batch.progress
        await self._tools.store.cut_tails(batch)
        output = await self._published(progress.output, "output")
        batch.note_published(output, await self._published(progress.error, "error"))
        await self._enter(end)

    async def _published(self, part: ResultPart, name: str) -> str | None:
        batch, files = self.batch, self._tools.files
        if not part.lines:
            await self._tools.disk.run(files.remove_data, part.id)
            return None
        now = files.clock()
        expires = now + files.lifetime_s(batch.output_lifetime_s)
        filename = f"{batch.id}_{name}.jsonl"
        file = StoredFile(part.id, batch.owner, filename, BATCH_OUTPUT, part.size, now, expires)
        await self._until_room(lambda: files.publish(file))
        return part.id

    # Parts of steps

    async def _until_stopped(self, step: Coroutine[Any, Any, None]) -> bool:
        """True if `step` ended; False where the batch was cancelled or its window passed before."""
        left_s = max(0.0, self.batch.expires - self._tools.files.clock())
        working = asyncio.ensure_future(step)
        stopping = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({working, stopping}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.wait({working, stopping})

    async def _open_requests(self) -> AsyncGenerator[InputRequest]:
        """The requests that have no result, neither a committed one nor one that waits."""
        batch, tools = self.batch, self._tools
        path = tools.files.path(batch.input_file_id)
        done, waiting = batch.progress.done, self._results.rows()
        async with aclosing(read_requests(tools.disk, path, batch.endpoint, _LONGEST_LINE_BYTES)) as chunks:
            async for chunk in chunks:
                for request in chunk:
                    if isinstance(request, BatchFault) or request.row in done or request.row in waiting:
                        continue
                    yield request

    async def _enter(self, status: Status) -> None:
        """Come to a status, and save it; a batch that is being cancelled comes to a final one only."""
        batch = self.batch
        if batch.status is Status.CANCELLING and not status.is_final:
            return
        batch.enter(status, self._tools.files.clock())
        await self._until_room(lambda: self._tools.store.save(batch))
        log.info("batch", extra={"batch": batch.id, "status": status.value})

    async def _until_room(self, save: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await save()
            except StorageFull as error:
                self._problem = error.message
                await asyncio.sleep(NO_ROOM_PAUSE_S)
            else:
                self._problem = None
                return


def _first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single failure in nested groups."""
    first = failures.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
