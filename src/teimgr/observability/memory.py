"""Memory of processes as the kernel counts it, garbage collection, memory given back; the limit of open files."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_KIB = 1024
_OPEN_FILES = 65536
_NEVER = 1_000_000  # as the third threshold of garbage collections
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PF_FORKNOEXEC = 0x40
_M_MMAP_THRESHOLD = -3  # of malloc.h
_MAPPED_BYTES = 2**22


def resident_bytes() -> int:
    """Return the resident memory of this process, including shared parts; 0 if /proc is missing."""
    return resident_bytes_of(os.getpid()) or 0


def resident_bytes_of(pid: int) -> int | None:
    """Return the resident memory of a process, including shared parts, like `resident_bytes`; None if it cannot be
    read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


def proc_sizes(pid: int | str, file: str) -> dict[str, int]:
    """Sizes in bytes from lines such as `VmRSS:  12 kB` of `/proc/<pid>/<file>`, by key; empty where it cannot be read.

    `file` is `status` or `smaps_rollup`.
    """
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if len(row) == 3 and row[2] == "kB"}


def private_bytes(sizes: dict[str, int]) -> int | None:
    """Return the memory that only this process has and its end gives back, from its `smaps_rollup`; None if not
    reported.

    Pages of mapped files, such as weights, are not counted: they are page cache, which the kernel gives up first.
    """
    known = [sizes[key] for key in ("Private_Dirty", "Swap") if key in sizes]
    return sum(known) if known else None


class PrivateMemory:
    """The private memory of this process, read often. Make it at the start of the process.

    Adding up all mappings takes milliseconds, so that is done when the process has done twice as much as the last time.
    In between the part of the anonymous memory that is shared with the process that forked this one counts as the same.
    It shrinks with every page of it that is written for the first time, mostly by the first calls.
    Once that process has ended, the kernel calls the shared part private; here it stays what it was last.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._shared_bytes = _anonymous_bytes() if _is_fork() else 0
        self._due_at = 0

    def read(self, calls: int = 0) -> int | None:
        """Bytes, as `private_bytes`; None if the kernel reports none. `calls` are those that were taken so far."""
        if calls >= self._due_at:
            if (private := private_bytes(proc_sizes("self", "smaps_rollup"))) is None:
                return None
            self._due_at = 2 * calls + 1
            if os.getppid() == self._parent:  # asked last: it was alive while the kernel counted
                self._shared_bytes = max(0, _anonymous_bytes() - private)
                return private
        return max(0, _anonymous_bytes() - self._shared_bytes)


def _is_fork() -> bool:
    """True if this process is a fork that has run no other program since."""
    stat = Path("/proc/self/stat")
    return stat.exists() and bool(int(stat.read_text().rpartition(")")[2].split()[6]) & _PF_FORKNOEXEC)


def _anonymous_bytes() -> int:
    try:
        resident, of_files = Path("/proc/self/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(of_files)) * _PAGE_BYTES


def raise_file_limit() -> None:
    """Raise this process's limit of open files, and that of the processes it starts, as far as it may.

    The usual 1024 ends near 250 instances; a library that closes all descriptors one by one bears no unlimited number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache
def max_connections() -> int:
    """Return the most clients that may be connected: half of the files that the process may open. Read once at the
    start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit if limit > 0 else _OPEN_FILES) // 2


@contextmanager
def young_collections_alone() -> Iterator[None]:
    """A block, of imports, in which no garbage collection looks at all that there is: each takes up to 0.3 s, a dozen
    come, and they find next to nothing.
    """
    young, older, _ = thresholds = gc.get_threshold()
    gc.set_threshold(young, older, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def collect_garbage_rarely() -> None:
    """Exclude present objects from garbage collection, and look for cycles less often: calls make few.

    With CPython's default the collector takes some percent of the time of short calls, and each full collection stops
    the daemon, or a worker with MiniLM, for 60 to 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def map_large_buffers() -> None:
    """Have the C library map each buffer of 4 MiB or more apart from its heap, whatever was freed before.

    The heap copies a buffer that grows: a body that comes to 32 MiB held the event loop for 16 to 60 ms. The kernel
    moves a mapped one without a copy. For the daemon only: workers and muxes reuse such memory with every call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


log = logging.getLogger(__name__)

IDLE_S = 4.0
# A process that uses less than this part of a core is idle enough: watchdogs, probes and scrapes take a percent or two,
# 60 short queries a second some 15, beside which a worker kept 300 MiB of the largest bodies that it had read.
_IDLE_PART = 0.25
# Memory that a process may use beyond its recorded minimum before memory is returned.
_GROWTH = 1.05
_GROWTH_BYTES = 4 * 2**20
# Processor time between two returns of memory, and its factor after a return that freed little because the memory was
# in use. One large call takes less time than that, so growth since the last return counts as well.
_WORK_S = 0.1
_USELESS = 10
_GROWTH_SINCE_BYTES = 16 * 2**20


class MemoryReturn:
    """Trims this process's heap when it was idle for `idle_s` after work and has grown, until `stop`.

    If memory were given back during work, it would only be taken again.

    `trims` counts, for tests. If the C library lacks `malloc_trim`, nothing happens.
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
