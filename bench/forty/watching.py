"""Eyes on a fleet while calls run: the memory that its workers add, how many there are, and every event."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.fleet import Fleet
from teimgr.observability.memory import private_bytes, proc_sizes

LOOK_S = 0.1
_EVENTS_S = 2.0
_LAST = 1000
_WORKER = "tei:"


@dataclass
class Seen:
    """Samples of the memory of all workers, each with how many there were, and the events in their order."""

    memory: list[tuple[int, int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def most_bytes(self) -> int:
        return max((size for size, _ in self.memory), default=0)

    @property
    def most_workers(self) -> int:
        return max((workers for _, workers in self.memory), default=0)


@contextmanager
def watching(fleet: Fleet) -> Iterator[Seen]:
    """Within the block memory is sampled and events are read."""
    seen, over = Seen(), threading.Event()

    def look() -> None:
        seen.memory.append(_memory_of(fleet))

    def read() -> None:
        seen.events += events_after(fleet, seen.events[-1]["id"] if seen.events else 0)

    threads = [
        threading.Thread(target=_again, args=(look, LOOK_S, over)),
        threading.Thread(target=_again, args=(read, _EVENTS_S, over)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join()
        read()


def _again(work: Callable[[], None], interval_s: float, over: threading.Event) -> None:
    while not over.wait(interval_s):
        work()


def _memory_of(fleet: Fleet) -> tuple[int, int]:
    """Memory that the workers have of their own, beside what they share with their fork server, and their number.

    It is what a budget is for: what comes back when a worker ends. Mapped files are page cache. A worker that has ended
    by the end of the look does not count: what it gave back may be in what was read of its successor.
    """
    sizes = {}
    for process in fleet.process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(_WORKER):
                sizes[process] = private_bytes(proc_sizes(process.pid, "smaps_rollup")) or 0
    kept = [size for process, size in sizes.items() if _runs(process)]
    return sum(kept), len(kept)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def events_after(fleet: Fleet, id: int) -> list[dict[str, Any]]:
    """The events after one, oldest first."""
    address = f"http://127.0.0.1:{fleet.api_port}/events?last={_LAST}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return [event for event in json.loads(answer.read()) if event["id"] > id]
