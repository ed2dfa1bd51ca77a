"""Shares the turns of an event loop among connections, so that no client's bytes hold it for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Cost of what is processed in one turn of the loop for all connections together, in units of `Framing.receive`: some
# 8 ms at most, the time of a header block of Huffman strings that is as long as one may be.
TURN_UNITS = 600
# What every connection may have processed in a turn in any case: a few small calls.
MIN_UNITS = 64


class LoopTurns:
    """Units of work for the connections of one event loop: each has `MIN_UNITS` a turn, all share `TURN_UNITS`.

    Connections that need more wait for later turns, in order.
    """

    def __init__(self) -> None:
        self._left = TURN_UNITS
        self._waiting: deque[Callable[[], bool]] = deque()
        self._is_scheduled = False

    @property
    def units(self) -> int:
        """What a connection may have processed now."""
        return max(self._left, MIN_UNITS)

    def spend(self, units: float) -> None:
        """Count what was processed for a connection; its least part is free."""
        if units > MIN_UNITS:
            self._left -= int(units)
            self._schedule()

    def wait(self, catch_up: Callable[[], bool]) -> None:
        """Call `catch_up` in a later turn, and again in turns after that while it returns True."""
        self._waiting.append(catch_up)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._left = TURN_UNITS
        while self._waiting:
            is_first = self._left == TURN_UNITS
            catch_up = self._waiting.popleft()
            if catch_up():
                # One that had less than a whole turn is the next; it may need that much for a single frame.
                (self._waiting.append if is_first else self._waiting.appendleft)(catch_up)
                self._schedule()
                return
