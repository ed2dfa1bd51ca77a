"""The daemon's batches: creation, listing, cancellation, scheduling, and deletion of old files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial

from teimgr.api.batches.batch_record import Batch, Status, new_batch_id, window_s
from teimgr.api.batches.batch_store import BatchStore
from teimgr.api.batches.disk import Disk, make_private_folder
from teimgr.api.batches.files import BATCH, DAY_S, FileStore, StoredFile
from teimgr.api.batches.lines import CallSlots
from teimgr.api.batches.run import BatchRun, Destination, RunTools
from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.routes import DialectPath, paths
from teimgr.config.settings import Settings
from teimgr.errors import Forbidden, InvalidConfig, ObjectInUse, QuotaExceeded, ValidationError
from teimgr.http.auth.policy import ANONYMOUS, Caller, PolicyInForce, Right
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, add
from teimgr.observability.metrics import DaemonMetrics
from teimgr.wire.frames import HttpReply

log = logging.getLogger(__name__)

MAX_RUNNING = 16  # including batches that wait for their model
_SWEEP_S = 60.0
_INFERENCE = frozenset({Right.INFERENCE})

ENDPOINTS: dict[str, DialectPath] = {
    path.path: path for path in paths() if "{" not in path.path and path.path.startswith(("/v1/", "/v2/"))
}
"""The endpoints of batches: inference routes whose body names the model."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request for a batch. `output_lifetime_s` None: the default lifetime."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None


class Batches:
    """Files and batches of one daemon, in the folder `batches` beside its state file.

    Call `load` first. An owner is the name of an API key. Batches run within the block of `running`.
    """

    def __init__(
        self,
        settings: Settings,
        gateway: Gateway,
        policy: PolicyInForce,
        metrics: DaemonMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = settings.batches
        self._folder = settings.state_file.parent / "batches"
        self._disk = Disk()
        self.files = FileStore(self._folder / "files", limits, self._disk, clock)
        self._store = BatchStore(self._folder / "records", self._disk, self.files)
        self._gateway = gateway
        self._policy = policy
        self._settings = limits
        line_bytes = min(limits.max_line_kb * 1024, settings.inference_max_body_mb * 2**20)
        slots = CallSlots(limits.concurrency)
        self._tools = RunTools(self.files, self._store, self._disk, slots, metrics, line_bytes)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_running = False
        self._broken: set[str] = set()  # batches whose run failed

    async def load(self) -> None:
        """Read what an earlier daemon left.

        Raises:
            InvalidConfig: the folder cannot be used.
        """
        try:
            await self._disk.run(self._load)
        except OSError as error:
            raise InvalidConfig(f"Cannot use batches directory: {self._folder}: {error.strerror}") from error

    def _load(self) -> None:
        make_private_folder(self._folder)
        self._store.load()
        self.files.load(self._store.unpublished())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run unfinished batches, old and new ones, while the block runs. At its end they stay as they are."""
        self._is_running = True
        sweeping = asyncio.create_task(self._sweep_regularly(), name="end of old files and batches")
        self._start_runs()
        try:
            yield
        finally:
            self._is_running = False
            tasks = {sweeping, *self._tasks.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def close(self) -> None:
        """End the threads. Blocks until their current work is done."""
        self._disk.close()

    # Calls

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """A new batch of requests in a file of `owner`.

        Raises:
            ValidationError: the endpoint, the window or the purpose of the file is wrong.
            ObjectNotFound: there is no such file.
            QuotaExceeded: too many batches of `owner` have not ended.
            StorageFull: the disk has no room.
        """
        if request.endpoint not in ENDPOINTS:
            raise ValidationError(f"endpoint: must be one of {', '.join(ENDPOINTS)} (got {request.endpoint[:80]!r})")
        window = window_s(request.completion_window)
        file = self.files.get(owner, request.input_file_id)
        if file.purpose != BATCH:
            raise ValidationError(f"input_file_id: the purpose of the file must be 'batch', not '{file.purpose}'")
        if sum(not batch.status.is_final for batch in self._store.of(owner)) >= self._settings.max_batches:
            raise QuotaExceeded(
                f"{self._settings.max_batches} batches of this API key have not ended, as many as batches.max_batches"
                " allows"
            )
        now = self.files.clock()
        batch = Batch(
            id=new_batch_id(),
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created=now,
            expires=now + window,
            metadata=request.metadata,
            output_lifetime_s=request.output_lifetime_s,
        )
        await self._store.add(batch)
        self._start_runs()
        return batch

    def get(self, owner: str, id: str) -> Batch:
        """A batch of `owner`; raises ObjectNotFound."""
        return self._store.get(owner, id)

    def of(self, owner: str) -> list[Batch]:
        """The batches of `owner`, oldest first."""
        return self._store.of(owner)

    async def cancel(self, owner: str, id: str) -> Batch:
        """Begin to cancel a batch; its requests without a result become lines of error.

        Raises:
            ObjectNotFound: there is no such batch.
            ObjectInUse: it has ended, or its results are being published (`finalizing`).
            StorageFull: the disk has no room; it is cancelled all the same, unless the daemon is killed.
        """
        batch = self._store.get(owner, id)
        batch.check_can_be_cancelled()
        if batch.status is not Status.CANCELLING:
            batch.enter(Status.CANCELLING, self.files.clock())
            if (run := self._runs.get(id)) is not None:
                run.cancel()
            await self._store.save(batch)
            self._start_runs()
        return batch

    async def delete_file(self, owner: str, id: str) -> StoredFile:
        """Delete a file of `owner`, and return what it was.

        Raises:
            ObjectNotFound: there is no such file.
            ObjectInUse: a batch that has not ended reads it.
        """
        file = self.files.get(owner, id)
        if batch := next((each for each in self._store.unfinished() if each.input_file_id == id), None):
            raise ObjectInUse(f"The file is the input of {batch.id}, which has not ended; cancel that first")
        await self.files.delete(id)
        return file

    def alarms(self) -> list[str]:
        """One alarm for all batches that wait for disk space."""
        problems = [run.problem for run in self._runs.values() if run.problem]
        return [f"{len(problems)} batches cannot continue: {problems[0]}"] if problems else []

    async def page(self) -> Page:
        """The gauges of the metrics page."""
        page: Page = {}
        counts = self._store.by_status()
        for status in Status:
            add(page, catalogue.BATCHES_BY_STATUS, counts[status], status=status.value)
        add(page, catalogue.STORED_BYTES, self.files.stored_bytes)
        return page

    # Runs

    def _start_runs(self) -> None:
        """Start waiting batches while there is a place: of the owner with the fewest running first, then the oldest."""
        if not self._is_running:
            return
        waiting = [batch for batch in self._store.unfinished() if batch.id not in self._runs.keys() | self._broken]
        at_work = Counter(run.batch.owner for run in self._runs.values())
        while waiting and len(self._runs) < MAX_RUNNING:
            batch = min(waiting, key=lambda each: at_work[each.owner])  # of equal ones, the oldest
            waiting.remove(batch)
            at_work[batch.owner] += 1
            send, check = partial(self._send, batch), partial(self._check_model, batch)
            to = Destination(ENDPOINTS[batch.endpoint], send, check)
            run = self._runs[batch.id] = BatchRun(batch, to, self._tools)
            # A new context, without that of the request which started it.
            task = self._tasks[batch.id] = asyncio.create_task(run.run(), name=batch.id, context=Context())
            task.add_done_callback(partial(self._run_ended, batch))

    def _run_ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._runs[batch.id], self._tasks[batch.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "batch failed; it is resumed at the daemon's next start", extra={"batch": batch.id}, exc_info=error
            )
            self._broken.add(batch.id)
        self._start_runs()

    async def _send(self, batch: Batch, body: bytes) -> HttpReply:
        return await self._gateway.answer_bulk(ENDPOINTS[batch.endpoint], body, self._caller(batch.owner))

    def _check_model(self, batch: Batch, model: str) -> None:
        self._gateway.check_model(model, self._caller(batch.owner))

    def _caller(self, owner: str) -> Caller:
        """The owner with the rights of its key at present.

        Raises:
            Forbidden: there is no such key any more, or it lacks the right of inference.
        """
        keys = self._policy.now.keys
        if keys is None:
            return ANONYMOUS
        caller = next((key.caller() for key in keys if key.name == owner), None)
        if caller is None:
            raise Forbidden(f"The API key '{owner}' is no longer accepted")
        caller.require(_INFERENCE)
        return caller

    # Old files and batches

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except OSError as error:
                log.warning("cannot delete old files", extra={"error": str(error)})
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """Delete files that have expired and that no unfinished batch reads, and batches that ended long ago."""
        in_use = {batch.input_file_id for batch in self._store.unfinished()}
        for file in self.files.expired():
            if file.id not in in_use:
                await self.files.delete(file.id)
        since = self.files.clock() - self._settings.retention_days * DAY_S
        for batch in self._store.ended_before(since):
            await self._store.remove(batch)
