"""Reads frames of an HTTP/2 connection, server side, and checks their order, sizes and cost."""

from __future__ import annotations

import math
import struct
from enum import IntEnum

from teimgr.http.turns import REQUEST_UNITS

Payload = bytes | memoryview

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = struct.Struct(">BHBBI")  # length (24 bits), type, flags, stream
LONG = struct.Struct(">I")
SETTING = struct.Struct(">HI")
GOAWAY_BODY = struct.Struct(">II")

(
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION,
) = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
(
    TABLE_SIZE_SETTING,
    MAX_STREAMS_SETTING,
    INITIAL_WINDOW_SETTING,
    MAX_FRAME_SETTING,
    MAX_HEADER_LIST_SETTING,
    ENABLE_PUSH_SETTING,
) = 1, 3, 4, 5, 6, 2

DEFAULT_FRAME = 16_384
MAX_WINDOW = 2**31 - 1


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ConnectionBroken(Exception):
    """The client violated the protocol; the connection ends with GOAWAY and `code`."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(f"{code.name}: {why}")
        self.code = code


# Longest received DATA frame; other frames are limited to `DEFAULT_FRAME`.
RECEIVED_FRAME = 2**18
# Larger DATA payloads are not copied before the stream reads them.
_COPIED_BYTES = 4096
# The cost of frames in units of about 4 µs: header blocks may be Huffman-coded, DATA is copied, and SETTINGS may change
# the window of each stream.
_BLOCK_BYTES_PER_UNIT = 32
_DATA_BYTES_PER_UNIT = 8192
_STREAMS_PER_UNIT = 16
_OF_BLOCKS = frozenset((HEADERS, CONTINUATION))
_COSTLY = _OF_BLOCKS | {SETTINGS}


class _PartialData:
    """A partly received DATA frame: the bytes still to arrive."""

    __slots__ = ("flags", "left", "number", "padding")

    def __init__(self, number: int, flags: int, left: int, padding: int) -> None:
        self.number = number
        self.flags = flags
        self.left = left
        self.padding = padding


class FrameReader:
    """Reads frames and calls methods of the subclass.

    Parts of DATA frames are passed on as they arrive. Other frames, of up to 16 KiB, are buffered.
    """

    def __init__(self) -> None:
        self._rest, self._at = b"", 0  # received bytes, processed up to `_at`
        self._partial: _PartialData | None = None
        self._has_preface = self._has_settings = False
        self._open_block = 0  # the stream of an incomplete header block
        self._block_bytes = 0
        self.needed_units = 0
        """The cost of the next frame if it exceeded the units of `receive`, otherwise 0."""
        self.frames = 0
        """Complete frames received; a header block counts as one."""

    def receive(self, data: bytes = b"", units: float = math.inf) -> float:
        """Process `data`, after the bytes that earlier calls have left, as far as its frames cost at most `units`.

        Returns:
            The units that are left; frames are left too if `needed_units` is above 0. `TURN_UNITS` are enough for any.

        Raises:
            ConnectionBroken: the client broke the protocol; nothing more may be received.
        """
        if self._at < len(self._rest):
            data = self._rest[self._at :] + data
        self._rest, self._at = data, 0
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[: len(data)]:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "invalid connection preface")
            if len(data) < len(PREFACE):
                return units
            self._has_preface, self._at = True, len(PREFACE)
        while cost := self._read_frame(units):
            if cost > units:
                self.needed_units = cost
                return units
            units -= cost
        self.needed_units = 0
        if self._at == len(self._rest):
            self._rest, self._at = b"", 0
        return units

    @property
    def is_inside(self) -> bool:
        """True if a frame or a header block has begun and did not end. The preface counts as a frame."""
        return self._at < len(self._rest) or self._open_block > 0 or self._partial is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame or a header block whose end has not arrived."""
        return len(self._rest) - self._at + self._block_bytes

    @property
    def open_streams(self) -> int:
        """Number of streams that SETTINGS may affect."""
        raise NotImplementedError

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Take a frame that is not DATA."""
        raise NotImplementedError

    def _begin_data(self, flags: int, number: int, length: int, padding: int) -> None:
        """Begin a DATA frame with a payload of `length` bytes; `padding` of them, with their length, are dropped."""
        raise NotImplementedError

    def _on_data(self, number: int, payload: Payload, end: bool) -> None:
        """Take a part of a DATA frame; `end`: it is the last of the stream."""
        raise NotImplementedError

    def _read_frame(self, units: float) -> int:
        """Process a frame, or a part of DATA, if it costs at most `units`; return its cost, or 0 if more has to arrive
        first."""
        at, size = self._at, len(self._rest)
        if self._partial is not None:
            if at < size and units:
                self._read_rest(self._partial)
            return int(at < size)
        if size - at < FRAME_HEAD.size:
            return 0
        high, low, kind, flags, number = FRAME_HEAD.unpack_from(self._rest, at)
        length, number, at = (high << 16) + low, number & MAX_WINDOW, at + FRAME_HEAD.size
        if length > (RECEIVED_FRAME if kind == DATA else DEFAULT_FRAME):
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} of {length} bytes")
        needed = at + length if kind != DATA else at + (flags & PADDED and length > 0)
        if needed > size:
            return 0
        cost = (
            1 + length // _DATA_BYTES_PER_UNIT if kind == DATA else self._cost(kind, length) if kind in _COSTLY else 1
        )
        if cost > units:
            return cost
        if self._open_block or kind == CONTINUATION or not self._has_settings:
            self._check_order(kind, flags, number)
        if kind != DATA:
            payload, self._at = self._rest[at:needed], needed
            if kind in _OF_BLOCKS and (self._open_block or not flags & END_HEADERS):
                self._track_block(flags, number, length)
            self._on_frame(kind, flags, number, payload)
        elif flags & PADDED or at + length > size:
            self._at = at
            self._read_data(flags, number, length)
        else:  # fast path of `_read_data`
            self._at = at + length
            self._begin_data(flags, number, length, 0)
            self._on_data(number, self._slice(at, at + length), bool(flags & END_STREAM))
        self.frames += not self._open_block
        return cost

    def _cost(self, kind: int, length: int) -> int:
        if kind == SETTINGS:
            return 1 + length // _BLOCK_BYTES_PER_UNIT + self.open_streams // _STREAMS_PER_UNIT
        return REQUEST_UNITS + min(self._block_bytes + length, DEFAULT_FRAME) // _BLOCK_BYTES_PER_UNIT

    def _check_order(self, kind: int, flags: int, number: int) -> None:
        if self._open_block and (kind != CONTINUATION or number != self._open_block):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "another frame inside a header block")
        if kind == CONTINUATION and not self._open_block:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if not self._has_settings:
            if kind != SETTINGS or flags & ACK:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            self._has_settings = True

    def _track_block(self, flags: int, number: int, length: int) -> None:
        ends = bool(flags & END_HEADERS)
        self._open_block = 0 if ends else number
        self._block_bytes = 0 if ends else self._block_bytes + length

    def _read_data(self, flags: int, number: int, length: int) -> None:
        """Begin a DATA frame whose payload of `length` bytes is at `_at`."""
        padding = 0
        if flags & PADDED:
            padding = self._rest[self._at] + 1 if length else 1
            if padding > length:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
            self._at += 1
        self._begin_data(flags, number, length, padding)
        end = self._at + length
        if not padding and end <= len(self._rest):
            at, self._at = self._at, end
            self._on_data(number, self._slice(at, end), bool(flags & END_STREAM))
        else:
            self._partial = _PartialData(number, flags, length - padding, max(padding - 1, 0))
            self._read_rest(self._partial)

    def _read_rest(self, partial: _PartialData) -> None:
        """Pass on the received part of a DATA frame."""
        at, size = self._at, len(self._rest)
        end = min(at + partial.left, size)
        partial.left -= end - at
        padding = min(partial.padding, size - end)
        partial.padding -= padding
        self._at = end + padding
        is_whole = not partial.left and not partial.padding
        if is_whole:
            self._partial = None
        if end > at or is_whole:
            self._on_data(partial.number, self._slice(at, end), bool(partial.flags & END_STREAM and is_whole))

    def _slice(self, at: int, end: int) -> Payload:
        return self._rest[at:end] if end - at <= _COPIED_BYTES else memoryview(self._rest)[at:end]
