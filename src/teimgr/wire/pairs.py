"""The messages of a RerankStream made one request, at byte level: nothing is decoded."""

from __future__ import annotations

from teimgr.errors import InvalidInput, TooLarge
from teimgr.wire.fields import Slice, varint
from teimgr.wire.frames import Flag
from teimgr.wire.window import FEW

# Field 1 of teimgr.v1.RerankPairs, wire type 2.
_REQUEST = b"\x0a"
# A pair of two bytes is some hundreds once it is decoded.
MAX_PAIRS = 100_000


class Pairs:
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
