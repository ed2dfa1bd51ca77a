"""Eyes on a fleet while calls run: the memory that its workers add, how many there are, and every event."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.fleet import Fleet
from teimgr.observability.memory import proc_sizes

LOOK_S = 0.1
_EVENTS_S = 2.0
_LAST = 1000
_WORKER, _FORK_SERVERS = "tei:", ("teimgr-nursery", "teimgr-standby")


@dataclass
class Seen:
    """Samples of added memory in bytes with the number of workers then, and the events in their order."""

    memory: list[tuple[int, int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def most_bytes(self) -> int:
        return max((size for size, _ in self.memory), default=0)

    @property
    def most_workers(self) -> int:
        return max((workers for _, workers in self.memory), default=0)


@contextmanager
def watching(fleet: Fleet, idle_bytes: int) -> Iterator[Seen]:
    """Within the block memory is sampled and events are read; `idle_bytes` are `memory_of` a fleet without workers."""
    seen, over = Seen(), threading.Event()

    def look() -> None:
        sample = memory_of(fleet)
        if sample is not None:
            seen.memory.append((sample[0] - idle_bytes, sample[1]))

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


def memory_of(fleet: Fleet) -> tuple[int, int] | None:
    """Memory of the workers and their fork servers in proportion to who shares it (PSS), and the number of workers.

    Mapped files are left out: they are page cache. None where a process came or went meanwhile, as the parts of a page
    that several share would then not add up.
    """
    before = _members(fleet)
    sizes = [proc_sizes(pid, "smaps_rollup").get("Pss_Anon") for pid in before]
    if None in sizes or _members(fleet) != before:
        return None
    return sum(size or 0 for size in sizes), sum(name.startswith(_WORKER) for name in before.values())


def _members(fleet: Fleet) -> dict[int, str]:
    found = {}
    for process in fleet.process.children(recursive=True):
        try:
            name = process.name()
        except psutil.NoSuchProcess:
            continue
        if name.startswith(_WORKER) or name in _FORK_SERVERS:
            found[process.pid] = name
    return found


def events_after(fleet: Fleet, id: int) -> list[dict[str, Any]]:
    """The events after one, oldest first."""
    address = f"http://127.0.0.1:{fleet.api_port}/events?last={_LAST}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return [event for event in json.loads(answer.read()) if event["id"] > id]
