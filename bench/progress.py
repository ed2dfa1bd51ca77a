"""The course of a run: progress on stderr, a limit of its time, and what was measured before an interrupt is kept.

The limit and SIGTERM arrive as an interrupt (SIGINT), which a scenario catches around its measurements by `partial`.
State is of the process, which runs one scenario.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# After the limit what is measured is written and servers are ended; an end that hangs is interrupted as well.
_END_S = 120.0
_began = time.monotonic()
_limit_s = float("inf")
_share = 1.0  # of the limit, until which further rounds may run
_reason = ""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`, and on SIGTERM. Of the main thread alone."""
    global _began, _limit_s, _reason
    _began, _limit_s, _reason = time.monotonic(), seconds, ""
    handlers = (
        (signal.SIGINT, signal.default_int_handler),  # a shell's background job ignores it
        (signal.SIGTERM, _interrupt),
        (signal.SIGALRM, _interrupt),
    )
    former = [(number, signal.signal(number, handler)) for number, handler in handlers]
    signal.setitimer(signal.ITIMER_REAL, seconds, _END_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in former:
            signal.signal(number, handler)
        _limit_s = float("inf")


def say(text: str) -> None:
    """One line on stderr, with the seconds since the run began."""
    print(f"[{time.monotonic() - _began:6.1f} s] {text}", file=sys.stderr, flush=True)


def rounds(count: int) -> Iterator[int]:
    """1 to `count`, ended early before a round that would not end within the limit, as the longest one took, or a
    further one within the share that `until` gives.
    """
    global _reason
    longest_s = 0.0
    for number in range(1, count + 1):
        began = time.monotonic()
        most_s = _limit_s if number == 1 else _share * _limit_s
        if began - _began + longest_s > most_s:
            part = "" if number == 1 or _share == 1.0 else f"{_share:.0%} of "
            _reason = f"{part}the limit of {_limit_s:g} s, after {number - 1} of {count} rounds"
            say(f"ended by {_reason}")
            return
        say(f"round {number} of {count}")
        yield number
        longest_s = max(longest_s, time.monotonic() - began)


@contextmanager
def until(share: float) -> Iterator[None]:
    """Leave the rest of the limit to what follows the block: see `rounds`."""
    global _share
    former, _share = _share, share
    try:
        yield
    finally:
        _share = former


@contextmanager
def partial() -> Iterator[None]:
    """An interrupt ends the block, not the run; `incomplete` is then why."""
    global _reason
    try:
        yield
    except KeyboardInterrupt:
        _reason = f"the limit of {_limit_s:g} s" if limit_passed() else "an interrupt"
        _reason += f", {time.monotonic() - _began:.0f} s after its begin"
        say(f"ended by {_reason}; what was measured is written")


def incomplete() -> str:
    """What ended the run early; empty where nothing did."""
    return _reason


def limit_passed() -> bool:
    """Whether an interrupt is that of the limit."""
    return time.monotonic() - _began >= _limit_s


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)
