"""A download as the daemon sees it: the fetcher's process, what it says, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from teimgr.errors import ModelDownloadFailed, Refused, TeimgrError, error_from_code
from teimgr.registry.fetcher import Order

FETCHER = "teimgr.registry.fetcher"
RATE_WINDOW_S = 10.0
_LAST_WORDS_CHARS = 2000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a download is. `phase` is waiting (others are before it), listing, fetching or done.

    Totals are None until the hub has said what there is; `eta_s` is None while nothing comes. What was there before
    counts as done, and not towards the rate.
    """

    phase: str = "waiting"
    bytes_done: int = 0
    bytes_total: int | None = None
    files_done: int = 0
    files_total: int | None = None
    rate_bytes_per_s: float | None = None
    eta_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a finished download left: the snapshot's folder, its commit, and whether the hub asks for a licence."""

    path: Path
    commit: str
    gated: bool


class Rate:
    """Bytes per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def at(self, now: float, count: int) -> float | None:
        """The rate, `count` bytes being there at `now`; None before there are two marks."""
        self._marks.append((now, count))
        while len(self._marks) > 2 and self._marks[0][0] < now - RATE_WINDOW_S:
            self._marks.popleft()
        began, before = self._marks[0]
        return max(0.0, (count - before) / (now - began)) if now > began else None


class Download:
    """One download, which moves `progress` and counts `received_bytes`; `run` is its whole life."""

    def __init__(
        self, order: Order, cache_folder: Path, progress: Observable[Progress], environ: Mapping[str, str] = os.environ
    ) -> None:
        self.order = order
        self.progress = progress
        self.received_bytes = 0
        self._environ = {**environ, "HF_HUB_CACHE": str(cache_folder), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._rate = Rate()
        self._plan: dict[str, Any] = {}
        self._verdict: dict[str, Any] = {}

    async def run(self) -> Fetched:
        """Fetch. Cancelled, it leaves no process behind; what came so far is kept for another time.

        Raises:
            ModelNotFound, ModelGated: the hub says no.
            ModelDownloadFailed: anything else.
        """
        self._move(phase="listing")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", FETCHER, self.order.to_json()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,  # a ^C at the daemon's terminal is the daemon's business
        )
        try:
            words, _ = await asyncio.gather(_last_words(process), self._listen(process))
            status = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return self._concluded(status, words)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "bytes_total" in said:
                self._plan = said
                self._rate.at(time.monotonic(), 0)
                self._move(phase="fetching", bytes_total=said["bytes_total"], files_total=said["files_total"])
            elif "bytes_done" in said:
                self._count(said)
            else:
                self._verdict = said

    def _count(self, news: Mapping[str, int]) -> None:
        if not self._plan:
            return
        self.received_bytes = news["bytes_received"]
        rate = self._rate.at(time.monotonic(), self.received_bytes)
        left_bytes = self._plan["bytes_total"] - news["bytes_done"]
        self._move(
            bytes_done=news["bytes_done"],
            files_done=news["files_done"],
            rate_bytes_per_s=None if rate is None else round(rate, 1),
            eta_s=round(left_bytes / rate, 1) if rate else None,
        )

    def _concluded(self, status: int, words: str) -> Fetched:
        model_id, verdict = self.order.model_id, self._verdict
        if "path" in verdict:
            self._move(phase="done", eta_s=0.0)
            return Fetched(Path(verdict["path"]), verdict["commit"], bool(self._plan.get("gated")))
        if "code" in verdict:
            raise _as_failure(model_id, error_from_code(verdict["code"], verdict["message"]))
        log.error("a fetcher ended without a word", extra={"model": model_id, "status": status, "stderr": words})
        raise ModelDownloadFailed(model_id, f"the fetching process ended with status {status}: {_last_line(words)}")

    def _move(self, **change: Any) -> None:
        self.progress.set(replace(self.progress.value, **change))


def _as_failure(model_id: str, error: TeimgrError) -> TeimgrError:
    """What the caller is told: a hub that does not answer is a failed download, whatever else it is to a worker."""
    if isinstance(error, Refused | ModelDownloadFailed):
        return error
    return ModelDownloadFailed(model_id, error.message)


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """The end of what it said on stderr, read to its end so that it never blocks on it."""
    assert process.stderr is not None
    words = ""
    while chunk := await process.stderr.read(1 << 16):
        words = (words + chunk.decode("utf-8", "replace"))[-_LAST_WORDS_CHARS:]
    return words


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


ValueT = TypeVar("ValueT")


class Observable(Generic[ValueT]):
    """The latest value, and every later one until `close`. A slow watcher misses values in between, never the last."""

    def __init__(self, value: ValueT) -> None:
        self.value = value
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, value: ValueT) -> None:
        """From now on it is `value`."""
        if value != self.value:
            self.value = value
            self._wake()

    def close(self) -> None:
        """It changes no more."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[ValueT]:
        """The value now, and again whenever it changed."""
        while True:
            changed, closed = self._changed, self._closed
            yield self.value
            if closed:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
