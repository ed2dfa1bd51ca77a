"""Gives freed memory back to the kernel once a process is idle after a peak: `malloc_trim`, on its own thread.

The allocator keeps what many connections or large calls took, a mux on purpose (`control/launch/mux_launcher.py`):
given back during a load it would only be taken again.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time

from teimgr.observability.memory import resident_bytes

log = logging.getLogger(__name__)

IDLE_S = 4.0
# A process that uses less than this part of a core is idle: watchdogs, probes and scrapes take a percent or two.
_IDLE_PART = 0.1
# What a process may have beyond the least memory that it had.
_GROWTH = 1.05
_GROWTH_BYTES = 4 * 2**20
# How long a process worked since the last time, and how many times as long since one that gave little back, as the
# memory was in use. One large call takes less work than that: growth since the last time counts as well.
_WORK_S = 0.1
_USELESS = 10
_GROWTH_SINCE_BYTES = 16 * 2**20


class MemoryReturn:
    """Trims this process's heap when it was idle for `idle_s` after work and has grown, until `stop`.

    `trims` counts, for tests. Where the C library has no `malloc_trim` nothing happens.
    """

    def __init__(self, idle_s: float = IDLE_S, work_s: float = _WORK_S) -> None:
        self.trims = 0
        self._idle_s = idle_s
        self._work_s = work_s
        self._least_bytes = self._last_bytes = resident_bytes()
        self._due_s = time.process_time() + work_s
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._stopped = threading.Event()
        if self._trim is not None:
            threading.Thread(target=self._run, name="memory-return", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        began, used_s = time.monotonic(), time.process_time()
        while not self._stopped.wait(self._idle_s):
            began_before, began, used_before_s, used_s = began, time.monotonic(), used_s, time.process_time()
            is_idle = used_s - used_before_s < _IDLE_PART * (began - began_before)
            if is_idle:
                self._give_back(is_due=used_s > self._due_s)

    def _give_back(self, is_due: bool) -> None:
        before = resident_bytes()
        self._least_bytes = min(self._least_bytes, before)
        is_due = is_due or before > self._last_bytes + _GROWTH_SINCE_BYTES
        if not is_due or before <= self._least_bytes * _GROWTH + _GROWTH_BYTES or self._trim is None:
            return
        began = time.monotonic()
        self._trim(0)
        self._last_bytes = after = resident_bytes()
        taken_ms = round((time.monotonic() - began) * 1e3, 1)
        is_useful = before > after * _GROWTH
        self._due_s = time.process_time() + self._work_s * (1 if is_useful else _USELESS)
        self.trims += 1
        log.debug("memory given back", extra={"before_mib": before >> 20, "after_mib": after >> 20, "ms": taken_ms})
