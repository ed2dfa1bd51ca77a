"""Periodic sweep for stray workers: live processes that no supervisor has, which it ends, with an alarm.

A supervisor ends with its instance, and a launch that is cancelled leaves nothing; so a stray is a defect. Without the
sweep it would serve, hold its memory and outlive the daemon while no list has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from teimgr.control.launch.launcher import Launcher
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.launch.strays import Stray

SWEEP_INTERVAL_S = 10.0
ALARM_S = 3600.0
"""How long the alarm of a stray stays."""
_MAX_ALARMS = 16

log = logging.getLogger(__name__)


class Sweep:
    """Ends workers of `launcher` that are not among `owned()`, their incarnations, in two looks in a row.

    One look is not enough: a worker that was forked just now has no supervisor for a moment.
    """

    def __init__(self, launcher: Launcher, owned: Callable[[], Collection[str]]) -> None:
        self._launcher = launcher
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
        strays = {stray.key: stray for stray in await self._launcher.strays(self._owned())}
        proven = [stray for key, stray in strays.items() if key in self._suspects]
        self._suspects = set(strays)
        await asyncio.gather(*map(self._end_stray, proven))

    async def _run(self, after: Callable[[], Awaitable[None]]) -> None:
        await after()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.look()
            except Exception:  # of one look, such as no descriptors left
                log.exception("sweep for stray workers failed")

    async def _end_stray(self, stray: Stray) -> None:
        facts = {"instance": stray.instance, "pid": stray.pid, "incarnation": stray.key}
        log.error("ending a worker that no instance owns", extra=facts)
        of = f"{stray.instance}: " if stray.instance else ""
        self._found.append((time.monotonic(), f"{of}a worker that no instance owns was ended (pid {stray.pid})"))
        try:
            await stray.end()
        except LaunchFailed as error:
            log.error("stray worker does not die", extra=facts | {"reason": str(error)})
