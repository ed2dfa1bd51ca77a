"""Frame protocol on an asyncio transport: receives large payloads without copies, writes once per loop tick."""

from __future__ import annotations

import asyncio
from typing import cast

from teimgr.wire.frames import HEADER, FrameType, Header, pack_header, unpack_header

Payload = bytes | bytearray | memoryview

# A payload above this size is received straight into a buffer of its own instead of through the shared one.
_OWN_BUFFER_BYTES = 64 * 1024
_SHARED_BUFFER_BYTES = 256 * 1024
# Longest wait of a frame that may linger, and the number of queued parts (two per frame) that ends it.
_LINGER_S = 0.001
_LINGER_PARTS = 64


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a link. Subclasses implement `frame_received` and `link_lost`.

    Sending never blocks: the frames of one loop tick leave in one write, and producers observe `unsent_bytes` for
    backpressure. A frame longer than `max_frame_bytes` closes the link, because it cannot be skipped unread.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Payload] = []
        self._flush_scheduled = False
        self._linger: asyncio.TimerHandle | None = None
        self._shared = bytearray(_SHARED_BUFFER_BYTES)
        self._filled = 0
        self._header: Header | None = None
        self._own = bytearray()
        self._own_filled = 0

    def frame_received(self, header: Header, payload: bytes) -> None:
        """Process a complete frame; its context, if any, is in the header."""
        raise NotImplementedError

    def link_lost(self, error: Exception | None) -> None:
        """The connection was lost; called once."""
        raise NotImplementedError

    @property
    def unsent_bytes(self) -> int:
        """Bytes accepted by `send` that the socket has not taken."""
        waiting = sum(len(part) for part in self._outgoing)
        return waiting + (self._transport.get_write_buffer_size() if self._transport else 0)

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self,
        type: FrameType,
        method: int,
        id: int,
        payload: Payload = b"",
        *,
        flags: int = 0,
        deadline_ms: int = 0,
        linger: bool = False,
        context: bytes = b"",
    ) -> None:
        """Queue one frame, to be written at the end of this loop tick; a closed link drops it.

        A frame that may `linger` waits up to a millisecond for others: a stream's frames come one per tick, and one
        write for each would be a third of a stream's cost.
        """
        if not self.is_open:
            return
        head = pack_header(len(context) + len(payload), type, method, id, flags, deadline_ms, len(context))
        self._outgoing.append(head + context)
        if payload:
            self._outgoing.append(payload)
        if linger and len(self._outgoing) < _LINGER_PARTS:
            if self._linger is None and not self._flush_scheduled:
                self._linger = self._loop.call_later(_LINGER_S, self._flush)
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Write what is queued, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._outgoing.clear()
        if self._linger is not None:
            self._linger.cancel()
        self.link_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Receive into the large payload that is incomplete, else into the shared buffer."""
        if self._own:
            return memoryview(self._own)[self._own_filled :]
        return memoryview(self._shared)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._own:
            self._own_filled += nbytes
            if self._own_filled == len(self._own):
                self._finish_own()
            return
        self._filled += nbytes
        self._parse()

    def eof_received(self) -> bool:
        """Treat a half-close as the end of the connection."""
        return False

    def _parse(self) -> None:
        offset = 0
        shared = self._shared
        while self._filled - offset >= HEADER.size:
            header = unpack_header(shared, offset)
            if header.length > self._max_frame_bytes:
                self._break()
                return
            end = offset + HEADER.size + header.length
            if end > self._filled:
                if header.length > _OWN_BUFFER_BYTES:
                    self._start_own(header, offset + HEADER.size)
                    return
                break
            header, start = _with_context(header, shared, offset + HEADER.size)
            payload = bytes(memoryview(shared)[start:end])
            offset = end
            self.frame_received(header, payload)
        remaining = self._filled - offset
        if offset and remaining:
            shared[:remaining] = shared[offset : self._filled]
        self._filled = remaining

    def _start_own(self, header: Header, start: int) -> None:
        self._header = header
        self._own = bytearray(header.length)
        self._own_filled = self._filled - start
        self._own[: self._own_filled] = memoryview(self._shared)[start : self._filled]
        self._filled = 0

    def _finish_own(self) -> None:
        assert self._header is not None
        header, start = _with_context(self._header, self._own, 0)
        payload = bytes(memoryview(self._own)[start:])
        self._header, self._own, self._own_filled = None, bytearray(), 0
        self.frame_received(header, payload)

    def _break(self) -> None:
        self._filled = 0
        if self._transport is not None:
            self._transport.abort()


def _with_context(header: Header, buffer: bytearray, start: int) -> tuple[Header, int]:
    """The header with the context at `start`, and the offset of the payload."""
    if not header.context_bytes:
        return header, start
    begin = start + min(header.context_bytes, header.length)
    return Header(*header[:-1], bytes(memoryview(buffer)[start:begin])), begin
