"""A download as the daemon runs it: the fetcher's process, its messages, and its result."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from teimgr.control.registry.fetcher import FetchRequest
from teimgr.control.registry.records import DownloadProgress
from teimgr.control.registry.tasks import Observable
from teimgr.errors import ModelDownloadFailed, Refused, error_from_code
from teimgr.wire.json_messages import read_line

FETCHER = "teimgr.control.registry.fetcher"
RATE_WINDOW_S = 10.0
_STDERR_CHARS = 2000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished download: the snapshot's folder, its commit, and whether the hub requires a licence to be accepted."""

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
            start_new_session=True,  # a ^C at the daemon's terminal must not reach it
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
            raise ModelDownloadFailed(model_id, error.message)  # such as a hub that does not answer
        log.error("a fetcher ended without a result", extra={"model": model_id, "status": status, "stderr": stderr})
        lines = stderr.strip().splitlines() or ["no output"]
        raise ModelDownloadFailed(model_id, f"the fetching process ended with status {status}: {lines[-1]}")

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
