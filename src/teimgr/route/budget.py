"""A bound on bytes under way, with a fair queue for those who may wait."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """At most `limit_bytes` taken at a time; one taker alone always fits, however large.

    For one event loop. Waiters are served in the order they came, so a large one is not overtaken for ever.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.taken_bytes = 0
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def try_take(self, count: int) -> bool:
        """Take `count` bytes if they fit now and nobody waits."""
        if self._waiting or not self._fits(count):
            return False
        self.taken_bytes += count
        return True

    async def take(self, count: int) -> None:
        """Take `count` bytes, as soon as they fit."""
        if self.try_take(count):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, count)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)
            else:
                self._waiting.remove(place)
                self._serve()
            raise

    def give_back(self, count: int) -> None:
        """Return what was taken; the next waiters that fit go on."""
        self.taken_bytes -= count
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, count = self._waiting.popleft()
            self.taken_bytes += count
            turn.set_result(None)

    def _fits(self, count: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + count <= self._limit_bytes
