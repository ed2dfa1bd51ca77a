"""What a client has sent on one HTTP/2 stream and nobody has read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from teimgr.errors import InvalidInput, TeimgrError


class Inbox:
    """Bytes in the order they came, with HTTP/2's flow control: the client may send more once somebody waits for it.

    It stands in for the buffer that grpclib gives a stream, which keeps an object per DATA frame and takes an empty one
    for the end. `acknowledge` is called with the number of bytes that the client may send anew.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._data = bytearray()
        self._unacknowledged = 0
        self._ended = False
        self._failure: TeimgrError | None = None
        self._news = asyncio.Event()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes; none when the client has said everything before.

        Raises:
            InvalidInput: it ended in the middle.
            TeimgrError: what `fail` was given, once nothing more is there.
        """
        while len(self._data) < size and not self._ended:
            if self._failure is not None:
                raise self._failure
            self._acknowledge(self.unacked_size())
            self._news.clear()
            await self._news.wait()
        if not self._data:
            return b""
        if len(self._data) < size:
            raise InvalidInput("Malformed message: the stream ends inside it")
        taken = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return taken

    def fail(self, error: TeimgrError) -> None:
        """Nobody waits for the client any longer."""
        self._failure = error
        self._news.set()

    # What grpclib calls.

    def add(self, data: bytes, ack_size: int) -> None:
        """A DATA frame came; it counts for `ack_size` bytes of the client's window."""
        self._data += data
        self._unacknowledged += ack_size
        self._news.set()

    def eof(self) -> None:
        """The client has said everything."""
        self._ended = True
        self._news.set()

    def unacked_size(self) -> int:
        """The bytes that are to be acknowledged now; they are counted once."""
        size, self._unacknowledged = self._unacknowledged, 0
        return size
