"""Work in bulk gives way to queries between two of its steps, where it calls `give_way`.

Where each lane has a thread, that of bulk waits there until no query is computed, as the threads of the native forward
do within a forward. Where one thread serves both lanes, it computes the queries that wait.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from teimgr.engine.native_library import native_library

_here = threading.local()  # `serve`, of a thread of both lanes within a bulk batch


def allow_wait(most_s: float) -> None:
    """Let the calling thread wait in its next calls of `give_way`, at most this long together; for threads other than
    the engine's."""
    if (library := native_library()) is not None and library.gives_way:
        library.set_wait(ctypes.c_int64(int(most_s * 1e9)))


def give_way() -> None:
    """Between two steps of work: compute the queries that wait, or wait for those that others compute, if the thread
    may do so."""
    serve = getattr(_here, "serve", None)
    if serve is not None:
        with serving(None):
            serve()
    elif (library := native_library()) is not None and library.gives_way:
        library.wait_for_foreground()


@contextmanager
def serving(serve: Callable[[], None] | None) -> Iterator[None]:
    """Within the block `give_way` calls `serve` on this thread, but not within that."""
    former, _here.serve = getattr(_here, "serve", None), serve
    try:
        yield
    finally:
        _here.serve = former
