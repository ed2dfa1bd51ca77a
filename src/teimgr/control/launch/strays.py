"""Stray workers: live processes of a run directory, or children of the nursery, without a handle in the launcher.

A stray is a defect: it would keep serving and hold memory although no instance owns it. `Sweep` ends it, with an alarm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from teimgr.control.background import regularly
from teimgr.control.launch.process_handle import (
    LaunchFailed,
    ProcessHandle,
    ProcessId,
    WorkerPaths,
    WorkerRunFile,
    all_worker_paths,
    boot_id,
    children_of,
    look_up,
    open_pidfd,
)

SWEEP_INTERVAL_S = 10.0
ALARM_S = 3600.0
"""Duration of the alarm about a stray."""
_MAX_ALARMS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stray:
    """A live worker process without an owner. `key` identifies it; `instance` is "" if unknown.

    `end` kills it, and raises LaunchFailed if it does not exit after SIGKILL.
    """

    key: str
    instance: str
    pid: int
    end: Callable[[], Awaitable[object]]


def without_handle(
    run_dir: Path, incarnations: Collection[str], pids: Collection[int], nursery: Collection[int | None]
) -> list[Stray]:
    """Workers that are not among those known by `incarnations` and `pids`: processes with a run file, and children of
    the `nursery` and its standby without one, such as those whose answer was lost.

    Raises:
        OSError: they cannot be looked for, for lack of descriptors.
    """
    found = []
    for paths in all_worker_paths(run_dir):
        run_file = WorkerRunFile.read(paths.run_file) if paths.incarnation not in incarnations else None
        if run_file and run_file.boot_id == boot_id() and look_up(run_file.pid) == run_file.process:
            end = partial(_kill, run_file.process, paths)
            found.append(Stray(paths.incarnation, run_file.instance, run_file.pid, end))
    known = {*pids, *nursery, *(each.pid for each in found)}
    return found + [
        Stray(f"process {each.pid} of {each.start_time}", "", each.pid, partial(_kill, each, None))
        for each in children_of(*nursery)
        if each.pid not in known
    ]


async def _kill(process: ProcessId, paths: WorkerPaths | None) -> None:
    if (pidfd := open_pidfd(process)) is not None:
        await ProcessHandle(process.pid, pidfd).stop(0)
    if paths is not None:
        paths.remove()


class Sweep:
    """Periodically ends strays: workers from `find` whose incarnation is not in `owned()` in two consecutive looks.

    One look is not enough, since a new worker has no supervisor for a moment.
    """

    def __init__(
        self, find: Callable[[Collection[str]], Awaitable[Iterable[Stray]]], owned: Callable[[], Collection[str]]
    ) -> None:
        self._find = find
        self._owned = owned
        self._suspects: set[str] = set()
        self._found: deque[tuple[float, str]] = deque(maxlen=_MAX_ALARMS)
        self._task: asyncio.Task[None] | None = None

    def begin(self, after: Callable[[], Awaitable[None]]) -> None:
        """Sweep at intervals once `after` returns, until `end`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(after), name="sweep for stray workers")

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def alarms(self) -> list[str]:
        """A sentence for each stray of the last hour."""
        since = time.monotonic() - ALARM_S
        return [text for at, text in self._found if at >= since]

    async def look(self) -> None:
        """End the workers that had no supervisor at the last look and have none now."""
        strays = {stray.key: stray for stray in await self._find(self._owned())}
        proven = [stray for key, stray in strays.items() if key in self._suspects]
        self._suspects = set(strays)
        await asyncio.gather(*map(self._end_stray, proven))

    async def _run(self, after: Callable[[], Awaitable[None]]) -> None:
        await after()
        await regularly(self.look, SWEEP_INTERVAL_S, "sweep for stray workers failed", log)

    async def _end_stray(self, stray: Stray) -> None:
        facts = {"instance": stray.instance, "pid": stray.pid, "incarnation": stray.key}
        log.error("ending a worker that no instance owns", extra=facts)
        of = f"{stray.instance}: " if stray.instance else ""
        self._found.append((time.monotonic(), f"{of}a worker that no instance owns was ended (pid {stray.pid})"))
        try:
            await stray.end()
        except LaunchFailed as error:
            log.error("stray worker does not die", extra=facts | {"reason": str(error)})
