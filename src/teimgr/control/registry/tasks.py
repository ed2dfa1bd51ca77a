"""Model tasks: downloads, trials and deletions, at most one at a time per model, independent of the HTTP request.

Also a download as the daemon runs it: the fetcher's process, its messages, and its result.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from teimgr.control.registry.fetcher import FetchRequest
from teimgr.control.registry.records import DownloadProgress, ModelStatus
from teimgr.errors import ModelBusy, ModelDownloadFailed, Refused, TeimgrError, Unavailable, error_from_code
from teimgr.wire.json_messages import read_line

log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class Observable(Generic[ValueT]):
    """A value that can be watched until `close`. A slow watcher may miss intermediate values but not the last."""

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


_ERRORS_KEPT = 1000


class ModelTasks:
    """At most one `ModelTask` per model, added and removed without an await between check and change."""

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
        task.task.add_done_callback(lambda ended: self._ended(model_id, task, ended))  # runs before any `finished`
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
            log.error("model task failed with an unexpected exception", exc_info=error, extra=fields)
        if task.progress is not None:
            task.progress.close()


FETCHER = "teimgr.control.registry.fetcher"
RATE_WINDOW_S = 10.0
_STDERR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished download: the snapshot's folder, its commit, and whether the hub requires accepting a licence."""

    path: Path
    commit: str
    gated: bool


class Rate:
    """Bytes per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def at(self, now: float, count: int) -> float | None:
        """The rate, with `count` bytes received at `now`; None before the second mark."""
        self._marks.append((now, count))
        while len(self._marks) > 2 and self._marks[0][0] < now - RATE_WINDOW_S:
            self._marks.popleft()
        began, before = self._marks[0]
        return max(0.0, (count - before) / (now - began)) if now > began else None


class Download:
    """One download. `run` fetches the model, updating `progress` and `received_bytes`."""

    def __init__(
        self,
        order: FetchRequest,
        cache_folder: Path,
        progress: Observable[DownloadProgress],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.order = order
        self.progress = progress
        self.received_bytes = 0
        self._environ = {**environ, "HF_HUB_CACHE": str(cache_folder), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._rate = Rate()
        self._plan: dict[str, Any] = {}
        self._result: dict[str, Any] = {}

    async def run(self) -> Fetched:
        """Fetch the model. Cancelled, it leaves no process behind; what was received is kept for the next download.

        Raises:
            ModelNotFound, ModelGated: the hub refuses.
            ModelDownloadFailed: anything else.
        """
        self._update(phase="listing")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", FETCHER, json.dumps(asdict(self.order))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,  # Ctrl-C at the daemon's terminal must not reach it
        )
        try:
            stderr, _ = await asyncio.gather(_stderr_end(process), self._read_messages(process))
            status = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        model_id, result = self.order.model_id, self._result
        if "path" in result:
            self._update(phase="done", eta_s=0.0)
            return Fetched(Path(result["path"]), result["commit"], bool(self._plan.get("gated")))
        if "code" in result:
            error = error_from_code(result["code"], result["message"])
            if isinstance(error, Refused | ModelDownloadFailed):
                raise error
            raise ModelDownloadFailed(model_id, error.message)
        log.error(
            "download process ended without a result", extra={"model": model_id, "status": status, "stderr": stderr}
        )
        lines = stderr.strip().splitlines() or ["no output"]
        raise ModelDownloadFailed(model_id, f"the download process ended with status {status}: {lines[-1]}")

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while (message := await read_line(process.stdout)) is not None:
            if "bytes_total" in message:
                self._plan = message
                self._rate.at(time.monotonic(), 0)
                self._update(phase="fetching", bytes_total=message["bytes_total"], files_total=message["files_total"])
            elif "bytes_done" not in message:
                self._result = message
            elif self._plan:
                self.received_bytes = message["bytes_received"]
                rate = self._rate.at(time.monotonic(), self.received_bytes)
                left_bytes = self._plan["bytes_total"] - message["bytes_done"]
                self._update(
                    bytes_done=message["bytes_done"],
                    files_done=message["files_done"],
                    rate_bytes_per_s=None if rate is None else round(rate, 1),
                    eta_s=round(left_bytes / rate, 1) if rate else None,
                )

    def _update(self, **change: Any) -> None:
        self.progress.set(replace(self.progress.value, **change))


async def _stderr_end(process: asyncio.subprocess.Process) -> str:
    """The last characters of stderr, which is read to its end so that the process never blocks on it."""
    assert process.stderr is not None
    text = ""
    while chunk := await process.stderr.read(1 << 16):
        text = (text + chunk.decode("utf-8", "replace"))[-_STDERR_CHARS:]
    return text
