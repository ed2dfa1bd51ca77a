"""How long a thread keeps the GIL while another thread waits for it: CPython's switch interval.

Python's default is 5 ms, and each callback of an event loop may have to wait that long for a thread that computes.
Half a millisecond costs a worker 5 % of its processor time under 64 callers, whose engine threads and loop then
interrupt each other far more often than they need to. So the interval is short while long work of a caller runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_SHORT_S = 0.0005
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
