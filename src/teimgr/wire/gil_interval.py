"""How long a thread keeps the GIL while another thread waits for it: CPython's switch interval.

Python's default is 5 ms, and each callback of an event loop may have to wait that long for a thread that computes.
Half a millisecond costs a worker 5 % of its processor time under 64 callers, whose engine threads and loop then
interrupt each other far more often than they need to. So the interval is short while long work of a caller runs.

That alone does not help a loop much: libuv takes the GIL for each callback anew, and waits each time for the interval
and for the call that holds it then. A thread that computes for seconds therefore sleeps for a moment now and then.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_SHORT_S = 0.0005
# A loop has this of each part of the other thread's time, which is a tenth longer for it.
_WORK_S, _REST_S = 0.001, 0.0001
_lock = Lock()
_users = 0
_usual_s = 0.0


def use_short_turns() -> None:
    """Keep the interval short for the life of this process: one without engine threads, or with a GPU."""
    sys.setswitchinterval(_SHORT_S)


@contextmanager
def short_turns() -> Iterator[None]:
    """Keep the interval short within the block, on any thread and for all threads of the process."""
    global _users, _usual_s
    with _lock:
        if not _users:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(_SHORT_S)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_usual_s)


class Rests:
    """Sleeps of a thread without an event loop, by which those with one go on: call it between two short steps."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        """Sleep for a moment if the last time was a millisecond ago, and this thread runs no loop."""
        if time.perf_counter() - self._since < _WORK_S:
            return
        if asyncio._get_running_loop() is None:
            time.sleep(_REST_S)
        self._since = time.perf_counter()
