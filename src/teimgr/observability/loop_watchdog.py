"""A watchdog of the event loop: records what held it for more than 200 ms, with the stack and the request.

A thread asks the loop for a sign of life twice a second, and at once if the loop's thread ran without a pause for a
tenth of a second. A loop that the machine gives no processor is not held: the kernel counts how long its thread waited
for one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

HELD_S = 0.2
_LOOK_S = 0.1
_LOOKS = 5  # of which the last asks in any case
_BUSY_PART = 0.8
_ALARM_S = 600.0
"""How long a held loop is an alarm."""


class LoopWatchdog:
    """Watches the loop that runs when it is made, until `stop`. Any thread may read `held`, a count, and `held_s`."""

    def __init__(self, name: str) -> None:
        self.held = 0
        self.held_s = 0.0
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._counts = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last: tuple[float, str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def alarms(self) -> list[str]:
        """A sentence about the last time the loop was held, for ten minutes."""
        if self._last is None or time.monotonic() - self._last[0] > _ALARM_S:
            return []
        return [self._last[1]]

    def _run(self) -> None:
        looks, ran_s = 0, self._times()[0]
        while not self._stopped.wait(_LOOK_S):
            looks, ran_before_s, ran_s = looks + 1, ran_s, self._times()[0]
            if looks < _LOOKS and ran_s - ran_before_s < _BUSY_PART * _LOOK_S:
                continue
            looks = 0
            try:
                self._check()
            except RuntimeError:  # the loop is closed
                return

    def _check(self) -> None:
        beat, began, used_s = threading.Event(), time.monotonic(), time.process_time()
        ran_s, waited_s = self._times()
        self._loop.call_soon_threadsafe(beat.set)
        if beat.wait(HELD_S):
            return
        is_late = time.monotonic() - began > 2 * HELD_S  # this thread was held up too: by the GIL, or by the machine
        frame = sys._current_frames().get(self._loop_thread)
        doing, stack = _doing(frame), "".join(traceback.format_stack(frame)) if frame is not None else ""
        del frame
        while not beat.wait(HELD_S):
            if self._stopped.is_set() or self._loop.is_closed():
                return
        seconds = time.monotonic() - began
        ran_now_s, waited_now_s = self._times()
        starved = ran_now_s - ran_s < HELD_S and waited_now_s - waited_s > seconds / 2
        idle = is_late and time.process_time() - used_s < seconds / 2  # the process was stopped
        if starved or idle:
            return
        self.held += 1
        self.held_s += seconds
        self._last = time.monotonic(), f"the event loop of {self._name} was held for {seconds:.1f} s: {doing}"
        log.warning("event loop held", extra={"seconds": round(seconds, 3), "doing": doing, "stack": stack})

    def _times(self) -> tuple[float, float]:
        """Seconds that the loop's thread has run, and waited for a processor; 0 if the kernel does not count them."""
        try:
            ran, waited, _ = self._counts.read_text().split()
            return int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0


def _doing(frame: FrameType | None) -> str:
    """The innermost request or call among the variables of a stack, with its size, and the function that runs."""
    where = "" if frame is None else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    while frame is not None:
        for name in ("request", "call"):
            if (found := frame.f_locals.get(name)) is None:
                continue
            method, path = getattr(found, "method", None), getattr(found, "path", "")
            size = getattr(found, "size_bytes", None)
            if size is None and isinstance(body := getattr(found, "body", None), bytes | bytearray | memoryview):
                size = len(body)
            if method is not None:
                return (
                    f"{method} {path}, {size} bytes, in {where}" if size is not None else f"{method} {path}, in {where}"
                )
        frame = frame.f_back
    return where
