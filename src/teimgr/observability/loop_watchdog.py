"""Watchdog of the event loop: records what blocked it for more than 200 ms, with the stack and the request.

A thread schedules a callback on the loop twice a second, and also when the loop's thread has run for a tenth of a
second without a pause. Time in which the loop's thread waited for a processor does not count; the kernel reports it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

log = logging.getLogger(__name__)

HELD_S = 0.2
_LOOK_S = 0.1
_LOOKS = 5  # checks per half second; the last one always asks the loop
_BUSY_PART = 0.8
_ALARM_S = 600.0
"""How long the alarm of a blocked loop stays, in seconds."""
_SHOWN_CHARS = 80
_COUNTS_BYTES = 96  # fits the three numbers of `schedstat`


class LoopWatchdog:
    """Watches the loop that runs when it is made, until `stop`. Any thread may read `held`, a count, and `held_s`."""

    def __init__(self, name: str) -> None:
        self.held = 0
        self.held_s = 0.0
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._loop_times = _ThreadTimes()
        self._own_times = self._loop_times  # replaced by those of the watchdog's thread once it runs
        self._last: tuple[float, str] | None = None
        self._running = threading.Lock()  # held until `stop`: waiting for a lock is one call, for an event fifteen
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # already stopped
            self._running.release()

    def alarms(self) -> list[str]:
        """Return a sentence about the last time the loop was held, for ten minutes."""
        if self._last is None or time.monotonic() - self._last[0] > _ALARM_S:
            return []
        return [self._last[1]]

    def _run(self) -> None:
        self._own_times = _ThreadTimes()
        try:
            self._watch()
        finally:
            self._own_times.close()
            self._loop_times.close()

    def _watch(self) -> None:
        looks, ran_s, waited_s = 0, self._loop_times.ran_s(), self._own_times.waited_s()
        while not self._stops_within(_LOOK_S, waited_s):
            looks, ran_before_s, ran_s = looks + 1, ran_s, self._loop_times.ran_s()
            if looks < _LOOKS and ran_s - ran_before_s < _BUSY_PART * _LOOK_S:
                continue
            looks, waited_s = 0, self._own_times.waited_s()
            try:
                self._check()
            except RuntimeError:  # the loop is closed
                return

    def _stops_within(self, seconds: float, waited_s: float) -> bool:
        """Wait for `stop`. If the wait ends late, a thread held the GIL, and the loop waited for it too.

        `waited_s` is how long this thread had waited for a processor at most half a second ago.
        """
        began, used_s = time.monotonic(), time.process_time()
        is_stopped = self._running.acquire(timeout=seconds)
        self._check_end(began + seconds, used_s, waited_s)
        return is_stopped

    def _on_time(self, event: threading.Event, limit_s: float) -> bool:
        began, used_s, waited_s = time.monotonic(), time.process_time(), self._own_times.waited_s()
        is_set = event.wait(limit_s)
        self._check_end(began + limit_s, used_s, waited_s)
        return is_set

    def _check_end(self, due: float, used_s: float, waited_s: float) -> None:
        """Record what delayed this thread past `due`, unless it only waited for a processor."""
        late_s = time.monotonic() - due
        if late_s > HELD_S:
            late_s -= self._own_times.waited_s() - waited_s
            worked_s = min(late_s, time.process_time() - used_s)
            if worked_s > HELD_S:  # less: the thread with the GIL itself waited for a processor
                self._record(late_s, worked_s, self._holder(runs_itself=False))

    def _check(self) -> None:
        beat, began, used_s = threading.Event(), time.monotonic(), time.process_time()
        ran_s, waited_s = self._loop_times.ran_s(), self._loop_times.waited_s()
        self._loop.call_soon_threadsafe(beat.set)
        if self._on_time(beat, HELD_S):
            return
        is_late = time.monotonic() - began > 2 * HELD_S  # this thread was delayed too, by the GIL or the machine
        runs_itself = self._loop_times.ran_s() - ran_s > HELD_S / 4  # otherwise it waits for the GIL or a disk
        doing, stack = _doing(frame := self._holder(runs_itself=runs_itself)), _stack(frame)
        del frame
        while not beat.wait(HELD_S):
            if not self._running.locked() or self._loop.is_closed():
                return
        seconds = time.monotonic() - began
        ran_now_s, waited_now_s = self._loop_times.ran_s(), self._loop_times.waited_s()
        starved = ran_now_s - ran_s < HELD_S and waited_now_s - waited_s > seconds / 2
        idle = is_late and time.process_time() - used_s < seconds / 2  # the process was stopped
        if starved or idle:
            return
        # If the loop's thread hardly ran, it waited for the GIL, so the time of the process counts.
        loop_ran_s = ran_now_s - ran_s
        worked_s = loop_ran_s if loop_ran_s > seconds / 4 else min(seconds, time.process_time() - used_s)
        self._log(seconds, worked_s, doing, stack)

    def _record(self, seconds: float, worked_s: float, frame: FrameType | None) -> None:
        self._log(seconds, worked_s, _doing(frame), _stack(frame))

    def _log(self, seconds: float, worked_s: float, doing: str, stack: str) -> None:
        self.held += 1
        self.held_s += seconds
        self._last = time.monotonic(), f"the event loop of {self._name} was held for {seconds:.1f} s: {doing}"
        fields = {"seconds": round(seconds, 3), "processor_seconds": round(worked_s, 3)}
        log.warning("event loop held", extra={**fields, "doing": doing, "stack": stack})

    def _holder(self, *, runs_itself: bool) -> FrameType | None:
        """Return the stack that blocks the loop. If the loop's thread does not run, prefer a thread with a request."""
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        own = frames.pop(self._loop_thread, None)
        if runs_itself:
            return own
        return next((frame for frame in frames.values() if _request_in(frame)), own)


class _ThreadTimes:
    """How long the thread that makes this has run, and waited for a processor; for any thread, until `close`.

    It is read ten times a second in every process. The clock is read with the GIL, and the file that stays open in one
    call, because each call that releases the GIL has to wait for it again.
    """

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._counts = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._counts = -1

    def close(self) -> None:
        if self._counts >= 0:
            os.close(self._counts)
            self._counts = -1

    def ran_s(self) -> float:
        """Seconds; 0 once the thread has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0

    def waited_s(self) -> float:
        """Seconds; 0 if the kernel does not count them."""
        try:
            return int(os.pread(self._counts, _COUNTS_BYTES, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


def _stack(frame: FrameType | None) -> str:
    return "" if frame is None else "".join(traceback.format_stack(frame))


def _doing(frame: FrameType | None) -> str:
    """Return the innermost request or call among the variables of a stack, with its size and its caller's key, and the
    function that runs."""
    if frame is None:
        return ""
    where = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    key = next((name for one in _outwards(frame) if (name := getattr(one.f_locals.get("caller"), "name", None))), None)
    parts = (_request_in(frame), "" if key is None else f"of the key {str(key)[:_SHOWN_CHARS]!r}", f"in {where}")
    return ", ".join(filter(None, parts)) if parts[0] else where


def _request_in(frame: FrameType) -> str:
    """Return the innermost request, call or body that is parsed, with its size; may be empty."""
    for one in _outwards(frame):
        values = one.f_locals
        for name in ("request", "call"):
            found = values.get(name)
            if (method := getattr(found, "method", None)) is not None:
                size = getattr(found, "size_bytes", None)
                size = _length(getattr(found, "body", None)) if size is None else size
                return f"{method} {getattr(found, 'path', '')}" + ("" if size is None else f", {size} bytes")
        if isinstance(kind := values.get("kind"), type) and (size := _length(values.get("body"))) is not None:
            return f"{kind.__name__}, {size} bytes"
    return ""


def _length(body: object) -> int | None:
    return len(body) if isinstance(body, bytes | bytearray | memoryview) else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
