"""Longest time that other threads of a process could not run Python: what a call that holds the GIL costs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_TICK_S = 0.0005


class GilProbe:
    """Within its block a thread asks for the GIL every half millisecond. `held_s` is the longest wait.

    A wait counts for no more than the processor time that the process used in it, so that other processes do not count.
    Up to some 6 ms are waited for any thread that runs Python (`sys.getswitchinterval`).
    """

    def __init__(self) -> None:
        self.held_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gil-probe")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        wall, used = time.perf_counter(), time.process_time()
        while not self._stopped.wait(0):
            time.sleep(_TICK_S)
            wall_now, used_now = time.perf_counter(), time.process_time()
            self.held_s = max(self.held_s, min(wall_now - wall, used_now - used))
            wall, used = wall_now, used_now


def held_s(work: Callable[[], object], repeats: int = 1) -> float:
    """The longest wait beside `work`, whose result is dropped within it; the shortest of several repeats."""
    found = []
    for _ in range(repeats):
        with GilProbe() as probe:
            work()
        found.append(probe.held_s)
    return min(found)
