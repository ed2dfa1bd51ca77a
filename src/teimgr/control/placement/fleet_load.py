"""The live workers of the fleet: how many there are on each host, and how many may load at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, KeysView


class FleetCounts:
    """The number of live workers by host; `set` is called when an instance changes."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self._instances: dict[str, Counter[str]] = {}  # those with live workers

    @property
    def instances(self) -> KeysView[str]:
        """The names of those with live workers."""
        return self._instances.keys()

    def set(self, name: str, alive: Counter[str]) -> None:
        """Count the workers of an instance again."""
        before = self._instances.pop(name, Counter[str]())
        self.alive.update(alive)
        self.alive.subtract(before)
        if alive:
            self._instances[name] = alive


class LoadSlots:
    """Bounds the workers that load at the same time on a device, first come first served; one always may.

    After a reboot all would else start at once, run out of memory, and out of time. `limit` gives the number for the
    UUID of a card, or for None, the CPU.
    """

    def __init__(self, limit: Callable[[str | None], int]) -> None:
        self._limit = limit
        self._loading: Counter[str | None] = Counter()
        self._waiting: defaultdict[str | None, deque[asyncio.Future[None]]] = defaultdict(deque)

    async def take(self, gpu: str | None) -> None:
        """Return when a worker may load; `give_back` must follow."""
        waiting = self._waiting[gpu]
        if not waiting and self._fits(gpu):
            self._loading[gpu] += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.give_back(gpu)
            elif granted in waiting:
                waiting.remove(granted)
            raise

    def give_back(self, gpu: str | None) -> None:
        """Return a slot, which the next may have."""
        self._loading[gpu] -= 1
        waiting = self._waiting[gpu]
        while waiting and self._fits(gpu):
            granted = waiting.popleft()
            if not granted.done():  # else its taker was cancelled just now
                self._loading[gpu] += 1
                granted.set_result(None)

    def _fits(self, gpu: str | None) -> bool:
        return self._loading[gpu] < max(1, self._limit(gpu))
