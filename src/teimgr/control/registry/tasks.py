"""Model tasks: downloads, trials and deletions, at most one at a time per model, independent of the HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from teimgr.control.registry.records import DownloadProgress, ModelStatus
from teimgr.errors import ModelBusy, TeimgrError, Unavailable

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class Observable(Generic[ValueT]):
    """A value that can be watched until `close`. A slow watcher misses intermediate values, never the last one."""

    def __init__(self, value: ValueT) -> None:
        self.value = value
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, value: ValueT) -> None:
        if value != self.value:
            self.value = value
            self._wake()

    def close(self) -> None:
        """End all watchers after the present value."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[ValueT]:
        """The present value, and each later one."""
        while True:
            changed, closed = self._changed, self._closed
            yield self.value
            if closed:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@dataclass(slots=True)
class ModelTask:
    """One task; a deletion has no `status`, only a download has `progress`."""

    status: ModelStatus | None
    progress: Observable[DownloadProgress] | None = None
    task: asyncio.Task[None] | None = None

    async def finished(self) -> None:
        """Wait until it is done. Cancelling the wait does not cancel the task.

        Raises:
            TeimgrError: why it failed.
            Unavailable: the daemon stops.
        """
        assert self.task is not None
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise Unavailable("the daemon is stopping")
        self.task.result()


# Of downloads that failed, as callers choose the ids.
_ERRORS_KEPT = 1000


class ModelTasks:
    """At most one `ModelTask` per model: entered and removed without an await in between, so two cannot overlap."""

    def __init__(self) -> None:
        self._tasks: dict[str, ModelTask] = {}
        self._download_errors: dict[str, str] = {}
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def of(self, model_id: str) -> ModelTask | None:
        return self._tasks.get(model_id)

    def download_error(self, model_id: str) -> str | None:
        """Why the last download of a model failed; None once another task has begun."""
        return self._download_errors.get(model_id)

    def check_idle(self, model_id: str) -> None:
        """Check that no task is under way for a model.

        Raises:
            ModelBusy: there is one, which the text names.
        """
        if (busy := self._tasks.get(model_id)) is not None:
            raise ModelBusy(model_id, busy.status.value if busy.status else "being deleted")

    def begin(self, model_id: str, task: ModelTask, run: Callable[[], Coroutine[Any, Any, None]]) -> ModelTask:
        """Start `run` as the task of a model.

        Raises:
            ModelBusy: a task is under way for it.
            Unavailable: the daemon stops.
        """
        self.check_idle(model_id)
        if self._closed:
            raise Unavailable("the daemon is stopping")
        self._tasks[model_id] = task
        self._download_errors.pop(model_id, None)
        task.task = asyncio.create_task(run(), name=f"work on {model_id}")
        task.task.add_done_callback(lambda ended: self._ended(model_id, task, ended))  # before any `finished`
        return task

    async def close(self) -> None:
        """Cancel all tasks, and begin no more."""
        self._closed = True
        running = {task.task for task in self._tasks.values() if task.task is not None}
        for each in running:
            each.cancel()
        if running:
            await asyncio.wait(running)

    def _ended(self, model_id: str, task: ModelTask, ended: asyncio.Task[None]) -> None:
        del self._tasks[model_id]
        error = None if ended.cancelled() else ended.exception()
        fields = {"model": model_id, "work": task.status.value if task.status else "deletion"}
        if isinstance(error, TeimgrError):
            log.warning("model work failed", extra={**fields, "reason": error.message})
            if task.status is ModelStatus.DOWNLOADING:
                self._download_errors[model_id] = error.message
                if len(self._download_errors) > _ERRORS_KEPT:
                    del self._download_errors[next(iter(self._download_errors))]
        elif error is not None:
            log.error("model work ended by a defect", exc_info=error, extra=fields)
        if task.progress is not None:
            task.progress.close()
