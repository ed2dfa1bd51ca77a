"""The messages of a RerankStream made one request, at byte level: nothing is decoded."""

from __future__ import annotations

import asyncio

from teimgr.errors import InvalidInput, TooLarge
from teimgr.wire.frames import Flag
from teimgr.wire.protobuf import Slice, varint

# With more messages of a stream in flight it is no conversation any more, and goes to the bulk lane.
FEW = 4
# Answers that a slow client has not taken lie in memory: large ones shrink the window to about this much.
HELD_BYTES = 64 * 1024 * 1024


class StreamWindow:
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


# Field 1 of teimgr.v1.RerankPairs, wire type 2.
_REQUEST = b"\x0a"
# A pair of two bytes is some hundreds once it is decoded.
MAX_PAIRS = 100_000


class PairCollector:
    """`tei.v1.RerankStreamRequest` messages on their way to be one `teimgr.v1.RerankPairs` of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._count = 0

    def add(self, request: Slice) -> None:
        """Take one more.

        Raises:
            TooLarge: all of them together are over the limit, or they are too many.
        """
        head = _REQUEST + varint(len(request))
        size = len(self._buffer) + len(head) + len(request)
        if size > self._limit_bytes:
            raise TooLarge(f"Stream larger than max ({size} vs. {self._limit_bytes} bytes)")
        if self._count == MAX_PAIRS:
            raise TooLarge(f"Stream longer than max ({MAX_PAIRS + 1} vs. {MAX_PAIRS} messages)")
        self._buffer += head
        self._buffer += request
        self._count += 1

    @property
    def flags(self) -> Flag:
        """The lane of so many pairs; a stream waits for room."""
        return Flag.WAIT | Flag.BULK if self._count > FEW else Flag.WAIT

    def payload(self) -> bytes:
        """The `RerankPairs`.

        Raises:
            InvalidInput: there was no request.
        """
        if not self._count:
            raise InvalidInput("Missing rerank request")
        return bytes(self._buffer)
