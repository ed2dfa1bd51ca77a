"""Kills by the kernel for memory (OOM kills), as distinct from other deaths by SIGKILL.

The kernel counts the kills of each cgroup, before the process is gone. So a count that has risen when a process is
found dead by SIGKILL explains its death. A rise without a death is forgotten after `CLAIM_S`: it was of another process
in the same cgroup.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from teimgr.control.launch.process_handle import ExitReport
from teimgr.control.ledger.system_memory import CgroupMemory, allowed_memory, gib
from teimgr.errors import Code

CLAIM_S = 10.0
_LOOK_INTERVAL_S = 5.0
_MAX_CGROUPS = 1000


@dataclass(slots=True)
class _Kills:
    seen: int
    unclaimed: list[float] = field(default_factory=list)  # when each was found


class MemoryKills:
    """The kills in the cgroups of watched processes; each explains one death."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[object, tuple[CgroupMemory, _Kills]] = {}

    def watch(self, group: CgroupMemory) -> None:
        """Count the kills of a cgroup from now on."""
        if group.groups not in self._found and len(self._found) < _MAX_CGROUPS:
            self._found[group.groups] = group, _Kills(group.kills())

    async def keep_looking(self) -> None:
        """Look at the counters regularly, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            self._look(self._found.values())

    def explain(self, group: CgroupMemory, status: int | None, peak_bytes: int, process: str) -> ExitReport | None:
        """Why a process of the cgroup died that was not killed by us, if the kernel killed it for memory.

        `status` is its exit status, None if unknown; `peak_bytes` the most private memory that it had, 0 if unknown.
        """
        found = self._found.get(group.groups)
        if found is None or status not in (None, -signal.SIGKILL):
            return None
        self._look((found,))
        if not (unclaimed := found[1].unclaimed):
            return None
        unclaimed.pop()
        held = f", the {process} held {gib(peak_bytes)}" if peak_bytes else ""
        text = f"killed by the kernel for memory: {allowed_memory(group)}{held} ({Code.KILLED_FOR_MEMORY.name})"
        return ExitReport(Code.KILLED_FOR_MEMORY, text, permanent=False)

    def _look(self, found: Iterable[tuple[CgroupMemory, _Kills]]) -> None:
        now = self._clock()
        for group, kills in found:
            count = group.kills()
            kills.unclaimed = [at for at in kills.unclaimed if now - at <= CLAIM_S]
            kills.unclaimed += [now] * min(max(0, count - kills.seen), _MAX_CGROUPS)
            kills.seen = count
