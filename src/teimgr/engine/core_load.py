"""Chooses CPU threads by the load of the host's workers, which all map one file with their loads.

A worker uses all cores while the others are idle, and gives a part back within half a second after another begins to
work, without messages: each worker writes its load into its slot of the file and reads the others'.

The file has no other processes: for these, `HelperWaits` records how long small batches wait. A step ends with its
slowest thread, and a thread on a core shared with another process may pause for milliseconds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_SLOTS = 1024  # workers of a host in the file; further ones use only their own threads
# Fields of a slot, float64: threads of the running batch (0: none) and its start; cores in use and the time of that
# figure. Times are seconds of the monotonic clock, which is the same for all processes of a host.
_RUNNING, _SINCE, _LOAD, _WRITTEN = range(4)
_FIELDS = 4
_BYTES = _SLOTS * _FIELDS * 8

_WINDOW_S = 0.2  # minimum time over which a load is averaged: a single query does not count as load
_FRESH_S = 0.5  # an older load counts as 0: its worker is idle or gone
_READ_EVERY_S = 0.02  # between reads of the other slots, which take part of a small batch's time
_BUSY_CORES = 0.1  # workers with a smaller load get no share of the cores

_HELD_UP_S = 0.001  # a batch that waited longer was held up
_LATEST, _MAX_HELD_UP = 8, 2  # window of batches; slow if more than `_MAX_HELD_UP` of them waited
_ALONE_S = 1.0


class CoreLoad:
    """The slot of this worker in the file at `path`, which is created if it is missing.

    Used by the engine's threads. If all slots are taken, the worker uses only its share of the cores.

    Raises:
        OSError: the file cannot be created or mapped.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._file, 0, _BYTES)  # fails here if the disk is full: no SIGBUS later
            self._memory = mmap.mmap(self._file, _BYTES)
        except BaseException:
            os.close(self._file)
            raise
        self._table = np.frombuffer(self._memory, np.float64).reshape(_SLOTS, _FIELDS)
        self._slot = next((slot for slot in range(_SLOTS) if self._claim(slot)), None)
        if self._slot is not None:
            self._table[self._slot] = 0.0
        self._read_at = 0.0
        self._lock = threading.Lock()
        self._computing: dict[int, tuple[float, int]] = {}  # by thread, start and threads of its batch
        self._used_s, self._window_began = 0.0, time.monotonic()
        self._others = 0.0, 0

    def threads(self, own: int, most: int) -> int:
        """How many threads to compute the next batch with, from `own` to `most`.

        The largest of three: its own share; an equal part of the cores among those that compute now, so that two busy
        workers of five have half each; the cores that the others leave free.

        Args:
            own: The worker's share of the cores (`CpuThreads.own`), which it has whatever the others do.
            most: All cores that it may use (`CpuThreads.most`).
        """
        if own >= most:
            return own
        now = time.monotonic()
        with self._lock:
            if self._slot is None:
                return own
            if now - self._read_at > _READ_EVERY_S:
                self._read_at, self._others = now, self._load_of_others(now)
            cores, workers = self._others
        return min(most, max(own, most // (workers + 1), round(most - cores)))

    @contextmanager
    def computing(self, threads: int) -> Iterator[None]:
        """Note on how many threads a batch of the calling thread runs."""
        caller, began = threading.get_ident(), time.monotonic()
        with self._lock:
            around = self._computing.get(caller)  # a batch that is interrupted by queries
            self._computing[caller] = began, threads
            self._write_running()
        try:
            yield
        finally:
            now = time.monotonic()
            with self._lock:
                del self._computing[caller]
                if around is not None:
                    self._computing[caller] = around
                self._write_running()
                self._used_s += 0.0 if around else (now - began) * threads
                if self._slot is not None and (elapsed := now - self._window_began) >= _WINDOW_S:
                    self._table[self._slot, _LOAD], self._table[self._slot, _WRITTEN] = self._used_s / elapsed, now
                    self._used_s, self._window_began = 0.0, now

    def _write_running(self) -> None:
        if self._slot is not None:
            began = [moment for moment, _ in self._computing.values()]
            self._table[self._slot, _SINCE] = min(began, default=0.0)
            self._table[self._slot, _RUNNING] = sum([threads for _, threads in self._computing.values()])

    def close(self) -> None:
        """Free the slot; not called twice."""
        with self._lock:
            if self._slot is not None:
                self._table[self._slot] = 0.0
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, self._slot))
                self._slot = None
            os.close(self._file)

    def _load_of_others(self, now: float) -> tuple[float, int]:
        """The cores that other workers compute on, and how many workers these are."""
        rows = self._table
        age = now - rows[:, _WRITTEN]
        is_fresh = (age >= 0) & (age < _FRESH_S)  # negative if the file is from before a restart of the host
        loads = np.where(is_fresh, rows[:, _LOAD], 0.0)
        # A batch that runs longer than a window counts before it ends, unless its process was killed.
        is_long = (rows[:, _RUNNING] > 0) & (now - rows[:, _SINCE] > _WINDOW_S)
        for slot in np.flatnonzero(is_long):
            loads[slot] = rows[slot, _RUNNING] if self._is_taken(int(slot)) else 0.0
        loads[self._slot] = 0.0
        return float(loads.sum()), int((loads > _BUSY_CORES).sum())

    def _claim(self, slot: int) -> bool:
        """Lock the slot's bytes for as long as the file is open; the kernel gives them back when the process ends."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, slot))
        except OSError:
            return False
        return True

    def _is_taken(self, slot: int) -> bool:
        """True if another open file has locked the slot."""
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, slot))
        return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


_LOCK = "@hhqqi4x"  # Linux's struct flock


def _lock(kind: int, slot: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, slot * _FIELDS * 8, _FIELDS * 8, 0)


class HelperWaits:
    """Records how long the latest small batches waited for helper threads. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: deque[bool] = deque(maxlen=_LATEST)
        self._alone_until = 0.0

    def threads(self, most: int) -> int:
        """Return the threads for a small batch: `most`, or one for a second after several batches were held up."""
        return 1 if self._clock() < self._alone_until else most

    def note(self, waited_s: float) -> None:
        """A batch on several threads has waited so long for them."""
        with self._lock:
            self._latest.append(waited_s > _HELD_UP_S)
            if sum(self._latest) > _MAX_HELD_UP:
                self._latest.clear()
                self._alone_until = self._clock() + _ALONE_S
