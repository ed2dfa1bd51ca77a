"""Framing of one HTTP/2 connection, server side: frames, header blocks, settings, flow control, states of streams.

Protocol: RFC 9113; header blocks: RFC 7541, received ones in `header_decoder.py`. Response headers are literals that
enter no dynamic table, so they cost no state and no search.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

from teimgr.http2.header_decoder import MAX_HEADER_BYTES, BlockTooLarge, HeaderDecoder, Headers, InvalidBlock

Payload = bytes | memoryview

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")  # length (24 bits), type, flags, stream
_LONG = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">II")

(
    _DATA,
    _HEADERS,
    _PRIORITY,
    _RST_STREAM,
    _SETTINGS,
    _PUSH_PROMISE,
    _PING,
    _GOAWAY_TYPE,
    _WINDOW_UPDATE,
    _CONTINUATION,
) = range(10)
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _HAS_PRIORITY = 0x4, 0x8, 0x20
_TABLE_SIZE, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST, _ENABLE_PUSH = 1, 3, 4, 5, 6, 2

_DEFAULT_WINDOW = 65_535
_DEFAULT_TABLE = 4096
_MAX_WINDOW = 2**31 - 1
_DEFAULT_FRAME = 16_384
_MAX_FRAME_LIMIT = 2**24 - 1
# Longest DATA frame that a client may send.
_RECEIVED_FRAME = 2**18
# Payloads of DATA beyond this are not copied before the stream takes them.
_COPIED_BYTES = 4096
# A window is opened again once this part of it is used up.
_UPDATE_SHARE = 4
# Streams that were reset here and whose clients may not have received that yet.
_RESET_STREAMS = 1024


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
    """The client broke the protocol, which ends the connection with GOAWAY and `code`."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(f"{code.name}: {why}")
        self.code = code


class Receiver(Protocol):
    """What a connection does with received frames; numbers are those of streams."""

    def on_request(self, number: int, headers: Headers) -> bool:
        """A stream is opened; False refuses it unprocessed."""

    def on_data(self, number: int, data: Payload, size: int) -> None:
        """`size` is the part of the windows that the frame took, padding included."""

    def on_end(self, number: int) -> None:
        """The client sends no more on the stream."""

    def on_reset(self, number: int) -> None:
        """The client, or an error of the client on this stream, has reset it."""

    def on_window(self, number: int) -> None:
        """More may be sent on a stream, or, where `number` is 0, on all."""

    def on_settings(self, changes_windows: bool) -> None:
        """The client's settings are in force and acknowledged."""

    def on_goaway(self, code: int) -> None:
        """The client opens no more streams."""

    def on_control(self) -> None:
        """A frame that carries nothing for a call."""


class _Flow:
    """State of an open stream: its windows, and which side has ended it."""

    __slots__ = ("ended_here", "ended_there", "receive_window", "send_window", "unacknowledged")

    def __init__(self, send_window: int, receive_window: int) -> None:
        self.send_window = send_window
        self.receive_window = receive_window
        self.unacknowledged = 0
        self.ended_here = self.ended_there = False


@lru_cache(256)
def _name(name: bytes) -> bytes:
    """A literal field without indexing, up to its value (RFC 7541, section 6.2.2)."""
    return b"\0" + _integer(len(name)) + name


def _integer(value: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if value < 0x7F:
        return bytes((value,))
    encoded = bytearray((0x7F,))
    value -= 0x7F
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block; names are in lower case."""
    parts = []
    for name, value in headers:
        if name == b":status" and value == b"200":
            parts.append(b"\x88")  # of the static table
        else:
            parts += (_name(name), _integer(len(value)), value)
    return b"".join(parts)


class Framing:
    """Parses what a client sends and makes the frames of what it is sent.

    `receive` calls `receiver` and raises ConnectionBroken; the other methods append frames, which `take` returns.
    Frames of a closed stream are ignored and counted. The data of one that was reset here is not counted as far as its
    window goes: the client may have sent it before it received RST_STREAM (RFC 9113, section 5.1).
    """

    def __init__(self, receiver: Receiver, *, max_streams: int, stream_window: int, connection_window: int) -> None:
        self._receiver = receiver
        self._max_streams = max_streams
        self._stream_window = stream_window
        self._connection_window = connection_window
        self._unacknowledged = 0
        self._decoder = HeaderDecoder()
        self._flows: dict[int, _Flow] = {}
        self._reset_windows: dict[int, int] = {}  # what clients may still have sent on streams that were reset here
        self._rest = b""
        self._has_preface = self._has_settings = False
        self._reduces_table = False  # the client's HPACK table became smaller; the next block has to say so
        self._has_sent = False  # HEADERS or DATA since the last PING
        self._block: bytearray | None = None  # of headers whose end has not come
        self._block_stream = self._block_flags = 0
        self._initial_window = _DEFAULT_WINDOW
        self._out: list[Payload] = []
        self.waiting_bytes = 0
        """Bytes that `take` will return."""
        self._last_stream: int | None = None  # that the first GOAWAY named
        self.highest_stream = 0
        """The highest number of a stream that the client opened."""
        self.receive_window = connection_window
        """Bytes of DATA that the client may send on the connection."""
        self.send_window = _DEFAULT_WINDOW
        """Bytes of DATA that may be sent on the connection."""
        self.max_frame = _DEFAULT_FRAME
        """The longest frame that the client reads."""
        settings = {
            _MAX_STREAMS: max_streams,
            _INITIAL_WINDOW: stream_window,
            _MAX_FRAME: _RECEIVED_FRAME,
            _MAX_HEADER_LIST: MAX_HEADER_BYTES,
        }
        self._put(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings.items()))
        self._put(_WINDOW_UPDATE, 0, 0, _LONG.pack(connection_window - _DEFAULT_WINDOW))

    # Receiving

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Raises:
            ConnectionBroken: they break the protocol; nothing more may be received.
        """
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[:size]:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "the connection preface is wrong")
            if size < len(PREFACE):
                self._rest = data
                return
            self._has_preface, at = True, len(PREFACE)
        while size - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            length = (high << 16) + low
            if length > _RECEIVED_FRAME:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            payload = data[at + 9 : end] if length <= _COPIED_BYTES or kind != _DATA else memoryview(data)[at + 9 : end]
            self._process(kind, flags, number & _MAX_WINDOW, payload)
            at = end
        self._rest = data[at:]

    def _process(self, kind: int, flags: int, number: int, payload: Payload) -> None:
        if self._block is not None and (kind != _CONTINUATION or number != self._block_stream):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a frame inside a header block")
        if not self._has_settings:
            if kind != _SETTINGS or flags & _ACK:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
            self._has_settings = True
        if kind == _DATA:
            self._on_data(flags, number, payload)
            return
        assert isinstance(payload, bytes)
        if kind == _HEADERS:
            self._on_headers(flags, number, payload)
        elif (process := _PROCESS.get(kind)) is not None:
            process(self, flags, number, payload)
        else:
            self._receiver.on_control()  # of an extension

    def _on_data(self, flags: int, number: int, payload: Payload) -> None:
        flow, size = self._flows.get(number), len(payload)
        self._check_opened(number, "DATA")
        self.receive_window -= size
        if self.receive_window < 0:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flow is None or flow.ended_there:
            self.open_window(size)
            if flow is not None:
                self.break_stream(number, ErrorCode.STREAM_CLOSED)
            elif not self._may_have_been_sent(number, flags, size):
                self._receiver.on_control()
            return
        flow.receive_window -= size
        if flow.receive_window < 0:
            self.open_window(size)
            self.break_stream(number, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if not payload and not flags & _END_STREAM:
            self._receiver.on_control()
        self._receiver.on_data(number, payload, size)
        if flags & _END_STREAM:
            self._end_there(number, flow)

    def _may_have_been_sent(self, number: int, flags: int, size: int) -> bool:
        """Whether the client may have sent DATA of a closed stream before it received RST_STREAM."""
        window = self._reset_windows.pop(number, 0)
        if not window or size > window:
            return False
        if not flags & _END_STREAM and size < window:
            self._reset_windows[number] = window - size
        return size > 0 or bool(flags & _END_STREAM)

    def _on_headers(self, flags: int, number: int, payload: Payload) -> None:
        if not number % 2:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "HEADERS of a stream that clients cannot open")
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without their priority")
            payload = payload[5:]
        _check_block(payload)
        if flags & _END_HEADERS:
            self._on_block(flags, number, bytes(payload))
        else:
            self._block, self._block_stream, self._block_flags = bytearray(payload), number, flags

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._receiver.on_control()
        self._block += payload
        _check_block(self._block)
        if flags & _END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(self._block_flags, number, block)

    def _on_block(self, flags: int, number: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block)  # of refused streams too: the table has to follow the client's
        except BlockTooLarge as error:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error
        except InvalidBlock as error:
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        flow = self._flows.get(number)
        if flow is not None:
            self._on_trailers(flags, number, flow)
        elif number <= self.highest_stream:
            self._receiver.on_control()  # closed
        else:
            self.highest_stream = number
            if len(self._flows) >= self._max_streams or not self._receiver.on_request(number, headers):
                self._put(_RST_STREAM, 0, number, _LONG.pack(ErrorCode.REFUSED_STREAM))
                self._receiver.on_control()
                if not flags & _END_STREAM:
                    self._expect_rest(number, self._stream_window)
                return
            self._flows[number] = flow = _Flow(self._initial_window, self._stream_window)
            if flags & _END_STREAM:
                self._end_there(number, flow)

    def _on_trailers(self, flags: int, number: int, flow: _Flow) -> None:
        if flow.ended_there:
            self.break_stream(number, ErrorCode.STREAM_CLOSED)
        elif flags & _END_STREAM:
            self._receiver.on_control()
            self._end_there(number, flow)
        else:
            self.break_stream(number, ErrorCode.PROTOCOL_ERROR)

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        if not number or len(payload) != 5:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of five bytes on a stream")
        self._receiver.on_control()

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        self._check_opened(number, "RST_STREAM")
        if len(payload) != 4:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        self._receiver.on_control()
        if self._flows.pop(number, None) is not None:
            self._receiver.on_reset(number)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % 6 or (flags & _ACK and payload):
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of six bytes each")
        if flags & _ACK:
            self._receiver.on_control()
            return
        settings = dict(_SETTING.iter_unpack(payload))  # the last of each, which is what remains in force
        if settings.get(_ENABLE_PUSH, 0) > 1:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is 0 or 1")
        if not _DEFAULT_FRAME <= settings.get(_MAX_FRAME, _DEFAULT_FRAME) <= _MAX_FRAME_LIMIT:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
        self.max_frame = settings.get(_MAX_FRAME, self.max_frame)
        self._reduces_table |= settings.get(_TABLE_SIZE, _DEFAULT_TABLE) < _DEFAULT_TABLE
        window = settings.get(_INITIAL_WINDOW, self._initial_window)
        change, self._initial_window = window - self._initial_window, window
        for flow in self._flows.values() if change else ():
            flow.send_window += change
        if window > _MAX_WINDOW or any(flow.send_window > _MAX_WINDOW for flow in self._flows.values()):
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is out of range")
        self._put(_SETTINGS, _ACK, 0, b"")
        self._receiver.on_settings(bool(change))

    def _on_push(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "PING has eight bytes")
        if not flags & _ACK:
            self._put(_PING, _ACK, 0, payload)
        # grpc-go measures the bandwidth by a PING after each DATA frame that it reads: one after each answer is free.
        if self._has_sent:
            self._has_sent = False
        else:
            self._receiver.on_control()

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) < _GOAWAY.size:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "GOAWAY of eight bytes on the connection")
        self._receiver.on_goaway(_GOAWAY.unpack_from(payload)[1])

    def _on_window(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        size = _LONG.unpack(payload)[0] & _MAX_WINDOW
        if not number:
            self.send_window += size
            if not size or self.send_window > _MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
                raise ConnectionBroken(code, f"WINDOW_UPDATE by {size}")
            self._receiver.on_window(0)
            return
        self._check_opened(number, "WINDOW_UPDATE")
        flow = self._flows.get(number)
        if flow is None:
            return
        flow.send_window += size
        if not size or flow.send_window > _MAX_WINDOW:
            self.break_stream(number, ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR)
        else:
            self._receiver.on_window(number)

    def _check_opened(self, number: int, what: str) -> None:
        if not 0 < number <= self.highest_stream or not number % 2:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"{what} of stream {number}, which is not open")

    def break_stream(self, number: int, code: ErrorCode) -> None:
        """Reset a stream because of an error of its client; counted, else it would be a way to cancel without limit."""
        self._receiver.on_control()
        self.reset(number, code)
        self._receiver.on_reset(number)

    def _end_there(self, number: int, flow: _Flow) -> None:
        flow.ended_there = True
        if flow.ended_here:
            self._flows.pop(number, None)  # the receiver may have reset it at its last data
        self._receiver.on_end(number)

    # Sending

    def take(self) -> list[Payload]:
        """The bytes to send, in parts, each once."""
        out, self._out, self.waiting_bytes = self._out, [], 0
        return out

    def headers(self, number: int, headers: Headers, end: bool) -> None:
        """Raises KeyError: the stream is not open for sending."""
        flow = self._flow(number)
        self._has_sent = True
        block, flags = encode_headers(headers), _END_STREAM if end else 0
        if self._reduces_table:
            self._reduces_table = False
            block = b"\x20" + block  # a table of size 0, which is all that is used (RFC 7541, section 4.2)
        if len(block) <= self.max_frame:
            self._put(_HEADERS, flags | _END_HEADERS, number, block)
        else:
            parts = [block[at : at + self.max_frame] for at in range(0, len(block), self.max_frame)]
            self._put(_HEADERS, flags, number, parts[0])
            for part in parts[1:-1]:
                self._put(_CONTINUATION, 0, number, part)
            self._put(_CONTINUATION, _END_HEADERS, number, parts[-1])
        if end:
            self._end_here(number, flow)

    def data(self, number: int, data: memoryview, end: bool) -> None:
        """A DATA frame, which fits into the windows and may not change until it is written.

        Raises:
            KeyError: the stream is not open for sending.
        """
        flow = self._flow(number)
        size = len(data)
        self._has_sent = True
        flow.send_window -= size
        self.send_window -= size
        self._out.append(_HEAD.pack(size >> 16, size & 0xFFFF, _DATA, _END_STREAM if end else 0, number))
        if size:
            self._out.append(data)
        self.waiting_bytes += _HEAD.size + size
        if end:
            self._end_here(number, flow)

    def window_of(self, number: int) -> int:
        """Bytes of DATA that the window of a stream allows; raises KeyError: it is closed."""
        return self._flows[number].send_window

    def reset(self, number: int, code: ErrorCode) -> None:
        """Close a stream at once, where it is open."""
        if (flow := self._flows.pop(number, None)) is None:
            return
        self._put(_RST_STREAM, 0, number, _LONG.pack(code))
        if not flow.ended_there and flow.receive_window > 0:
            self._expect_rest(number, flow.receive_window)

    def _expect_rest(self, number: int, window: int) -> None:
        """Do not count the data that a client may have sent on a stream before it knew that it was reset."""
        self._reset_windows[number] = window
        if len(self._reset_windows) > _RESET_STREAMS:
            del self._reset_windows[next(iter(self._reset_windows))]

    def goaway(self, code: ErrorCode) -> None:
        """The client is to open no more streams; those above the highest so far are not processed."""
        if self._last_stream is None:  # a later one may not name a higher stream (RFC 9113, section 6.8)
            self._last_stream = self.highest_stream
        self._put(_GOAWAY_TYPE, 0, 0, _GOAWAY.pack(self._last_stream, code))

    def acknowledge(self, number: int, size: int) -> None:
        """Let the client send `size` bytes more on a stream, which may be closed."""
        flow = self._flows.get(number)
        if flow is not None and not flow.ended_there:
            flow.unacknowledged += size
            if flow.unacknowledged >= self._stream_window // _UPDATE_SHARE:
                self._put(_WINDOW_UPDATE, 0, number, _LONG.pack(flow.unacknowledged))
                flow.receive_window += flow.unacknowledged
                flow.unacknowledged = 0

    def open_window(self, size: int) -> None:
        """Let the client send `size` bytes more on the connection."""
        self._unacknowledged += size
        if self._unacknowledged >= self._connection_window // _UPDATE_SHARE:
            self._put(_WINDOW_UPDATE, 0, 0, _LONG.pack(self._unacknowledged))
            self.receive_window += self._unacknowledged
            self._unacknowledged = 0

    def _flow(self, number: int) -> _Flow:
        flow = self._flows[number]
        if flow.ended_here:
            raise KeyError(number)
        return flow

    def _end_here(self, number: int, flow: _Flow) -> None:
        flow.ended_here = True
        if flow.ended_there:
            del self._flows[number]

    def _put(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(_HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload)
        self.waiting_bytes += _HEAD.size + size


def _check_block(block: Payload | bytearray) -> None:
    if len(block) > MAX_HEADER_BYTES:
        raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")


def _unpadded(payload: Payload) -> Payload:
    """The payload of a padded frame (RFC 9113, section 6.1)."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


_PROCESS = {
    _PRIORITY: Framing._on_priority,
    _RST_STREAM: Framing._on_reset,
    _SETTINGS: Framing._on_settings,
    _PUSH_PROMISE: Framing._on_push,
    _PING: Framing._on_ping,
    _GOAWAY_TYPE: Framing._on_goaway,
    _WINDOW_UPDATE: Framing._on_window,
    _CONTINUATION: Framing._on_continuation,
}
