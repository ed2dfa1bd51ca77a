"""Lets a few of those that wait go on in each turn of the event loop, so that many together never hold it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class Turns:
    """`per_turn` callers of `begin` go on in each turn of the loop; the others in later turns, by callers in rotation.

    For one event loop at a time.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # by caller, the next one first
        self._loop: asyncio.AbstractEventLoop | None = None  # the one in which the next turn is scheduled

    async def begin(self, caller: Hashable) -> None:
        """Return when `caller` may go on: at once unless this turn is used up or others wait."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(begins)
        self._schedule()
        await begins

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._loop, self._left = None, self._per_turn
        while self._left and self._waiting:
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            begins = own.popleft()
            if own:
                self._waiting[caller] = own  # behind the others
            if not begins.done():  # else its client has gone
                begins.set_result(None)
                self._left -= 1
        if self._waiting:
            self._schedule()
