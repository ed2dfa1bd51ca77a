"""How far a stream may run ahead of its answers."""

from __future__ import annotations

import asyncio

# With more messages of a stream in flight it is no conversation any more, and goes to the bulk lane.
FEW = 4
# Answers that a slow client has not taken lie in memory: large ones shrink the window to about this much.
HELD_BYTES = 64 * 1024 * 1024


class Window:
    """How many messages of one stream may be in flight: `limit`, fewer while the answers are large.

    For one task that enters.
    """

    def __init__(self, limit: int) -> None:
        self.in_flight = 0
        self._limit = limit
        self._allowed = limit
        self._room = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether this many in flight are bulk work."""
        return self.in_flight > FEW

    async def enter(self) -> None:
        """Wait for room, and take it."""
        while self.in_flight >= self._allowed:
            self._room.clear()
            await self._room.wait()
        self.in_flight += 1

    def leave(self, answer_bytes: int = 0) -> None:
        """A message is done with; its answer had that many bytes."""
        self.in_flight -= 1
        if answer_bytes:
            self._allowed = min(self._limit, max(FEW, HELD_BYTES // answer_bytes))
        self._room.set()
