"""What a call costs others: the time for which it holds the GIL, memory and processor time of processes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

from teimgr.control.launch.nursery import NAME, STANDBY_NAME

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


async def watch_turns(held_s: list[float]) -> None:
    """Append the processor time of each turn of the running loop, until it is cancelled.

    Garbage is not collected meanwhile: teimgr's processes do that rarely, and what the tests have made is not theirs.
    """
    gc.disable()
    try:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            held_s.append(time.thread_time() - began)
    finally:
        gc.enable()


def resident_mib(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """By what the process is and its pid: `worker 4711`."""
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            found[f"{_kind(process)} {process.pid}"] = round(process.memory_info().rss / 2**20, 2)
    return found


def processor_seconds(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Seconds of processor time so far, named as in `resident_mib`."""
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[f"{_kind(process)} {process.pid}"] = times.user + times.system
    return found


def _kind(process: psutil.Process) -> str:
    """By its name, as workers have the command line of their nursery."""
    name, command = process.name(), " ".join(process.cmdline())
    if name in (NAME, STANDBY_NAME):
        return name.removeprefix("teimgr-")
    if "teimgr.mux" in command:
        return "mux"
    return "daemon" if " serve" in command else "worker"
