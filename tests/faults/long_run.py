"""The frame of commands that run for minutes: a signal ends them in order, with every daemon that they have started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from tests.support.daemon_process import close_all

INTERRUPTED = 130
"""The exit status after SIGINT or SIGTERM."""
# A cancellation that comes in the moment in which a wait ends may be lost (asyncio in Python 3.11).
_AGAIN_S = 15


def run(main: Callable[[], int]) -> int:
    """The exit status of `main`; at its end, however it comes, no daemon of this process is left.

    SIGTERM does what SIGINT does, once more where that had no effect: it cancels what `asyncio.run` runs, and is a
    KeyboardInterrupt elsewhere.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, _interrupt_once)
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return INTERRUPTED
    finally:
        signal.alarm(0)
        close_all()


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.alarm(_AGAIN_S)
    signal.raise_signal(signal.SIGINT)
