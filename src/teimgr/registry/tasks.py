"""What is being done with models: one thing at a time with each, in tasks of the daemon's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from teimgr.errors import ModelBusy, TeimgrError, Unavailable
from teimgr.registry.download import Observable, Progress
from teimgr.registry.model_view import ModelStatus

log = logging.getLogger(__name__)

Doing = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class ModelTask:
    """One piece of work; without a `status` it is a deletion. `progress` is that of a download."""

    status: ModelStatus | None
    progress: Observable[Progress] | None = None
    task: asyncio.Task[None] | None = None

    async def finished(self) -> None:
        """Return when it is done. Whoever waits may go away: the work goes on.

        Raises:
            TeimgrError: why it failed.
            Unavailable: the daemon stops.
        """
        assert self.task is not None
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise Unavailable("the daemon is stopping")
        self.task.result()


class ModelTasks:
    """At most one `Work` per model: it is entered and left without an await in between, so two cannot meet."""

    def __init__(self) -> None:
        self._works: dict[str, ModelTask] = {}
        self._failures: dict[str, str] = {}
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._works)

    def of(self, model_id: str) -> ModelTask | None:
        """What is being done with a model now."""
        return self._works.get(model_id)

    def failure_of(self, model_id: str) -> str | None:
        """Why the last download of a model failed; nothing begun since."""
        return self._failures.get(model_id)

    def refuse_if_busy(self, model_id: str) -> None:
        """Say no where something is being done.

        Raises:
            ModelBusy: the text says what.
        """
        if (work := self._works.get(model_id)) is not None:
            raise ModelBusy(model_id, work.status.value if work.status else "being deleted")

    def begin(self, model_id: str, work: ModelTask, do: Doing) -> ModelTask:
        """Have `do` done, unless the model is busy.

        Raises:
            ModelBusy: it is.
            Unavailable: the daemon stops.
        """
        self.refuse_if_busy(model_id)
        if self._closed:
            raise Unavailable("the daemon is stopping")
        self._works[model_id] = work
        self._failures.pop(model_id, None)
        work.task = asyncio.create_task(_run(do), name=f"work on {model_id}")
        work.task.add_done_callback(lambda task: self._ended(model_id, work, task))  # before anybody waits for it
        return work

    async def close(self) -> None:
        """Give up all of it, and begin no more."""
        self._closed = True
        tasks = {work.task for work in self._works.values() if work.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, model_id: str, work: ModelTask, task: asyncio.Task[None]) -> None:
        del self._works[model_id]
        error = None if task.cancelled() else task.exception()
        about = {"model": model_id, "work": work.status.value if work.status else "deletion"}
        if isinstance(error, TeimgrError):
            log.warning("model work failed", extra={**about, "reason": error.message})
            if work.status is ModelStatus.DOWNLOADING:
                self._failures[model_id] = error.message
        elif error is not None:
            log.error("model work ended by a defect", exc_info=error, extra=about)
        if work.progress is not None:
            work.progress.close()


async def _run(do: Doing) -> None:
    await do()
