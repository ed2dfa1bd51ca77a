"""The native library's threads as tests run them; imports no torch, so that a script of a test starts at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from teimgr.engine.native_library import native_library

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
RUN = ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def run(body: Callable[[], object], threads: int) -> None:
    """Run `body` on so many threads."""
    library = native_library()
    assert library is not None
    assert library.run_threads is not None
    RUN(library.run_threads)(BODY(lambda _: body() and None), None, threads, 0)


def helpers() -> set[int]:
    """The ids of the helpers that live in this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text() == "teimgr-helper\n":
                found.add(int(task.name))
    return found
