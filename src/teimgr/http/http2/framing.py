"""Framing of one HTTP/2 connection, server side: header blocks, settings, flow control, states of streams.

Protocol: RFC 9113. `frame_reader.py` parses frames, `headers.py` header blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from teimgr.http.http2.frame_reader import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    ENABLE_PUSH_SETTING,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    GOAWAY,
    GOAWAY_BODY,
    HAS_PRIORITY,
    HEADERS,
    INITIAL_WINDOW_SETTING,
    LONG,
    MAX_FRAME_SETTING,
    MAX_HEADER_LIST_SETTING,
    MAX_STREAMS_SETTING,
    MAX_WINDOW,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RECEIVED_FRAME,
    RST_STREAM,
    SETTING,
    SETTINGS,
    TABLE_SIZE_SETTING,
    WINDOW_UPDATE,
    ConnectionBroken,
    ErrorCode,
    FrameReader,
    Payload,
)
from teimgr.http.http2.headers import (
    MAX_HEADER_BYTES,
    BlockTooLarge,
    HeaderDecoder,
    Headers,
    InvalidBlock,
    InvalidHead,
    check_trailers,
    encode_headers,
)

_DEFAULT_WINDOW = 65_535
_DEFAULT_TABLE = 4096
_MAX_FRAME_LIMIT = 2**24 - 1
_UPDATE_SHARE = 4  # send WINDOW_UPDATE after a quarter of the window is used
# Remembered streams that were reset here, for clients that have not received RST_STREAM yet.
_RESET_STREAMS = 1024
# Remembered ranges of stream numbers that a client skipped.
_SKIPPED_RANGES = 64
# WINDOW_UPDATE frames that do not count as control frames: two for each HEADERS or DATA frame sent (stream and
# connection), and one per 2 KiB sent, since some clients read in small pieces. Unused ones accumulate up to a limit.
_UPDATES_PER_FRAME = 2
_BYTES_PER_UPDATE = 2048
_MAX_FREE_UPDATES = 4096
# Settings of one frame that count as a control frame.
_SETTINGS_PER_CONTROL = 16


class Receiver(Protocol):
    """A connection's handlers of received frames; `number` is a stream's."""

    def on_request(self, number: int, headers: Headers) -> bool:
        """Open a stream; False refuses it unprocessed."""

    def on_data(self, number: int, data: Payload) -> None:
        """Take a DATA frame, or the received part of it. The windows that it took are to be opened again."""

    def on_end(self, number: int) -> None:
        """The client sends no more on the stream."""

    def on_reset(self, number: int) -> None:
        """The stream was reset by the client, or because of an error of the client."""

    def on_window(self, number: int) -> None:
        """More may be sent on a stream, or on all if `number` is 0."""

    def on_settings(self, changes_windows: bool) -> None:
        """The client's settings are in force and acknowledged."""

    def on_goaway(self, code: int) -> None:
        """The client opens no more streams."""

    def on_control(self, count: int = 1) -> None:
        """Count a frame that carries nothing for a call, or one that costs as much as `count` of them."""


class _Flow:
    """State of an open stream: windows, and which sides have ended it."""

    __slots__ = ("ended_here", "ended_there", "receive_window", "send_window", "unacknowledged")

    def __init__(self, send_window: int, receive_window: int) -> None:
        self.send_window = send_window
        self.receive_window = receive_window
        self.unacknowledged = 0
        self.ended_here = self.ended_there = False


class Framing(FrameReader):
    """Parses received frames and makes the frames to send.

    `receive` calls `receiver` and raises ConnectionBroken; the other methods append frames, which `take` returns.

    A client that sends on a stream that it has ended gets STREAM_CLOSED. Frames on a stream that was reset here are
    ignored, up to its window, since the client may have sent them before it received RST_STREAM (RFC 9113, 5.1).
    """

    def __init__(self, receiver: Receiver, *, max_streams: int, stream_window: int, connection_window: int) -> None:
        super().__init__()
        self._receiver = receiver
        self._max_streams = max_streams
        self._stream_window = stream_window
        self._connection_window = connection_window
        self._unacknowledged = 0
        self._decoder = HeaderDecoder()
        self._flows: dict[int, _Flow] = {}
        self._reset_windows: dict[int, int] = {}  # bytes possibly in flight on streams that were reset here
        self._skipped: list[range] = []
        self._free_updates = 0
        self._reduces_table = False  # the client's HPACK table shrank: announce it in the next block
        self._has_sent = False  # HEADERS or DATA since the last PING
        self._block = bytearray()  # an incomplete header block
        self._block_flags = 0
        self._initial_window = _DEFAULT_WINDOW
        self._out: list[Payload] = []
        self.waiting_bytes = 0
        """Bytes that `take` will return."""
        self._last_stream: int | None = None  # in the first GOAWAY
        self.highest_stream = 0
        """The highest stream number opened by the client."""
        self.receive_window = connection_window
        """Bytes of DATA that the client may send on the connection."""
        self.send_window = _DEFAULT_WINDOW
        """Bytes of DATA that may be sent on the connection."""
        self.max_frame = DEFAULT_FRAME
        """The longest frame that the client accepts."""
        settings = {
            MAX_STREAMS_SETTING: max_streams,
            INITIAL_WINDOW_SETTING: stream_window,
            MAX_FRAME_SETTING: RECEIVED_FRAME,
            MAX_HEADER_LIST_SETTING: MAX_HEADER_BYTES,
        }
        self._put(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in settings.items()))
        self._put(WINDOW_UPDATE, 0, 0, LONG.pack(connection_window - _DEFAULT_WINDOW))

    def forget_receiver(self) -> None:
        """Break the reference cycle with the receiver, which is freed at once; nothing may be received afterwards."""
        self._receiver = cast(Receiver, None)

    # Receiving

    @property
    def open_streams(self) -> int:
        return len(self._flows)

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        process = _PROCESS.get(kind)
        if process is None:
            self._receiver.on_control()  # unknown frame type
        else:
            process(self, flags, number, payload)

    def _begin_data(self, flags: int, number: int, length: int, padding: int) -> None:
        flow = self._flows.get(number)
        if flow is None:
            self._check_opened(number, "DATA")
        self.receive_window -= length
        if self.receive_window < 0:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        if flow is None:
            if not self._may_have_been_sent(number, flags, length):
                self._refuse_closed(number)
        elif flow.ended_there:
            self.break_stream(number, ErrorCode.STREAM_CLOSED)
        else:
            flow.receive_window -= length
            if flow.receive_window < 0:
                self.break_stream(number, ErrorCode.FLOW_CONTROL_ERROR)
            elif length == padding and not flags & END_STREAM:
                self._receiver.on_control()
        if padding:  # padding is not kept
            self.acknowledge(number, padding)
            self.open_window(padding)

    def _on_data(self, number: int, payload: Payload, end: bool) -> None:
        flow = self._flows.get(number)
        if flow is None or flow.ended_there:
            self.open_window(len(payload))
            return
        self._receiver.on_data(number, payload)
        if end:
            self._end_there(number, flow)

    def _may_have_been_sent(self, number: int, flags: int, size: int) -> bool:
        """True if the client may have sent DATA or trailers of a closed stream before it received RST_STREAM."""
        window = self._reset_windows.pop(number, None)
        if window is None or size > window:
            return False
        if not flags & END_STREAM:
            self._reset_windows[number] = window - size
        return size > 0 or bool(flags & END_STREAM)

    def _refuse_closed(self, number: int) -> None:
        """Answer DATA of a stream that its client has closed, or that was closed long ago."""
        self._receiver.on_control()
        self._put(RST_STREAM, 0, number, LONG.pack(ErrorCode.STREAM_CLOSED))

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number % 2:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream with an even number or number 0")
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "HEADERS frame too short for its priority")
            _check_priority(number, payload)
            payload = payload[5:]
        if flags & END_HEADERS:
            self._on_block(flags, number, payload)
        else:
            self._block, self._block_flags = bytearray(payload), flags

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._receiver.on_control()
        self._block += payload
        if len(self._block) > MAX_HEADER_BYTES:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "header block too long")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self._on_block(self._block_flags, number, block)

    def _on_block(self, flags: int, number: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block)  # also of refused streams, to keep the table in sync
        except BlockTooLarge as error:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from error
        except InvalidBlock as error:
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        flow = self._flows.get(number)
        if flow is not None:
            self._on_trailers(flags, number, flow, headers)
        elif number <= self.highest_stream:
            self._on_late_headers(flags, number)
        else:
            self._skip_to(number)
            if len(self._flows) >= self._max_streams or not self._receiver.on_request(number, headers):
                self._put(RST_STREAM, 0, number, LONG.pack(ErrorCode.REFUSED_STREAM))
                self._receiver.on_control()
                if not flags & END_STREAM:
                    self._expect_rest(number, self._stream_window)
                return
            self._flows[number] = flow = _Flow(self._initial_window, self._stream_window)
            if flags & END_STREAM:
                self._end_there(number, flow)

    def _on_trailers(self, flags: int, number: int, flow: _Flow, headers: Headers) -> None:
        if flow.ended_there:
            self.break_stream(number, ErrorCode.STREAM_CLOSED)
            return
        try:
            check_trailers(headers)
        except InvalidHead:
            flags = 0
        if flags & END_STREAM:
            self._receiver.on_control()
            self._end_there(number, flow)
        else:
            self.break_stream(number, ErrorCode.PROTOCOL_ERROR)

    def _on_late_headers(self, flags: int, number: int) -> None:
        """Handle HEADERS for a number that is not above the highest and has no open stream."""
        self._receiver.on_control()
        if any(number in skipped for skipped in self._skipped):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {number} was skipped, which closed it")
        if not self._may_have_been_sent(number, flags, 0):
            raise ConnectionBroken(ErrorCode.STREAM_CLOSED, f"HEADERS of stream {number}, which has ended")

    def _skip_to(self, number: int) -> None:
        if number > self.highest_stream + 2:
            self._skipped.append(range(self.highest_stream + 1, number))
            del self._skipped[:-_SKIPPED_RANGES]
        self.highest_stream = number

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY must have five bytes")
        _check_priority(number, payload)
        self._receiver.on_control()

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        self._check_opened(number, "RST_STREAM")
        if len(payload) != 4:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM must have four bytes")
        self._receiver.on_control()
        if self._flows.pop(number, None) is not None:
            self._receiver.on_reset(number)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream other than 0")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS must have six bytes per setting")
        if flags & ACK:
            self._receiver.on_control()
            return
        self._receiver.on_control(len(payload) // (SETTING.size * _SETTINGS_PER_CONTROL))
        settings: dict[int, int] = {}  # the last value of each takes effect
        for name, value in SETTING.iter_unpack(payload):
            if name == ENABLE_PUSH_SETTING and value > 1:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH must be 0 or 1")
            if name == MAX_FRAME_SETTING and not DEFAULT_FRAME <= value <= _MAX_FRAME_LIMIT:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
            if name == INITIAL_WINDOW_SETTING and value > MAX_WINDOW:
                raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is out of range")
            settings[name] = value
        self.max_frame = settings.get(MAX_FRAME_SETTING, self.max_frame)
        self._reduces_table |= settings.get(TABLE_SIZE_SETTING, _DEFAULT_TABLE) < _DEFAULT_TABLE
        window = settings.get(INITIAL_WINDOW_SETTING, self._initial_window)
        change, self._initial_window = window - self._initial_window, window
        for flow in self._flows.values() if change else ():
            flow.send_window += change
        if change > 0 and any(flow.send_window > MAX_WINDOW for flow in self._flows.values()):
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is out of range")
        self._put(SETTINGS, ACK, 0, b"")
        self._receiver.on_settings(bool(change))

    def _on_push(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "PING must have eight bytes")
        if not flags & ACK:
            self._put(PING, ACK, 0, payload)
        # grpc-go measures bandwidth with a PING after DATA frames, so one PING per answer is free.
        if self._has_sent:
            self._has_sent = False
        else:
            self._receiver.on_control()

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) < GOAWAY_BODY.size:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "GOAWAY must be on stream 0 with at least eight bytes")
        self._receiver.on_goaway(GOAWAY_BODY.unpack_from(payload)[1])

    def _on_window(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have four bytes")
        size = LONG.unpack(payload)[0] & MAX_WINDOW
        if self._free_updates > 0:
            self._free_updates -= 1
        else:
            self._receiver.on_control()
        if not number:
            self.send_window += size
            if not size or self.send_window > MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR
                raise ConnectionBroken(code, f"WINDOW_UPDATE by {size}")
            self._receiver.on_window(0)
            return
        self._check_opened(number, "WINDOW_UPDATE")
        flow = self._flows.get(number)
        if flow is None:
            return
        flow.send_window += size
        if not size or flow.send_window > MAX_WINDOW:
            self.break_stream(number, ErrorCode.FLOW_CONTROL_ERROR if size else ErrorCode.PROTOCOL_ERROR)
        else:
            self._receiver.on_window(number)

    def _check_opened(self, number: int, what: str) -> None:
        if not 0 < number <= self.highest_stream or not number % 2:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"{what} of stream {number}, which is not open")

    def break_stream(self, number: int, code: ErrorCode) -> None:
        """Reset a stream because of an error of its client. It is counted, else it would be a way to cancel without
        limit."""
        self._receiver.on_control()
        self.reset(number, code)
        self._receiver.on_reset(number)

    def _end_there(self, number: int, flow: _Flow) -> None:
        flow.ended_there = True
        if flow.ended_here:
            self._flows.pop(number, None)  # the receiver may have reset it already
        self._receiver.on_end(number)

    # Sending

    def take(self) -> list[Payload]:
        """Return the bytes to send, in parts, each once."""
        out, self._out, self.waiting_bytes = self._out, [], 0
        return out

    def headers(self, number: int, headers: Headers, end: bool) -> None:
        """Append a header block; raises KeyError if the stream is not open for sending."""
        flow = self._flow(number)
        self._sent(0)
        block, flags = encode_headers(headers), END_STREAM if end else 0
        if self._reduces_table:
            self._reduces_table = False
            block = b"\x20" + block  # announces a table of size 0, since none is used (RFC 7541, 4.2)
        if len(block) <= self.max_frame:
            self._put(HEADERS, flags | END_HEADERS, number, block)
        else:
            parts = [block[at : at + self.max_frame] for at in range(0, len(block), self.max_frame)]
            self._put(HEADERS, flags, number, parts[0])
            for part in parts[1:-1]:
                self._put(CONTINUATION, 0, number, part)
            self._put(CONTINUATION, END_HEADERS, number, parts[-1])
        if end:
            self._end_here(number, flow)

    def data(self, number: int, data: memoryview, end: bool) -> None:
        """Append a DATA frame, which fits into the windows and may not change until it is written.

        Raises:
            KeyError: the stream is not open for sending.
        """
        flow = self._flow(number)
        size = len(data)
        self._sent(size)
        flow.send_window -= size
        self.send_window -= size
        self._out.append(FRAME_HEAD.pack(size >> 16, size & 0xFFFF, DATA, END_STREAM if end else 0, number))
        if size:
            self._out.append(data)
        self.waiting_bytes += FRAME_HEAD.size + size
        if end:
            self._end_here(number, flow)

    def _sent(self, size: int) -> None:
        self._has_sent = True
        free = self._free_updates + _UPDATES_PER_FRAME + size // _BYTES_PER_UPDATE
        self._free_updates = min(free, _MAX_FREE_UPDATES)

    def window_of(self, number: int) -> int:
        """Return the bytes of DATA that the window of a stream allows; raises KeyError if it is closed."""
        return self._flows[number].send_window

    def reset(self, number: int, code: ErrorCode) -> None:
        """Close a stream at once, if it is open."""
        if (flow := self._flows.pop(number, None)) is None:
            return
        self._put(RST_STREAM, 0, number, LONG.pack(code))
        if not flow.ended_there:
            self._expect_rest(number, max(flow.receive_window, 0))

    def refuse(self, number: int, code: ErrorCode) -> None:
        """Report that the request of a stream was wrong, even if both sides have ended the stream."""
        self._flows.pop(number, None)
        self._put(RST_STREAM, 0, number, LONG.pack(code))
        self._expect_rest(number, self._stream_window)

    def _expect_rest(self, number: int, window: int) -> None:
        """Do not count the data that a client may have sent on a stream before it received its reset."""
        self._reset_windows[number] = window
        if len(self._reset_windows) > _RESET_STREAMS:
            del self._reset_windows[next(iter(self._reset_windows))]

    def goaway(self, code: ErrorCode) -> None:
        """Stop the client from opening streams; those above the highest so far are not processed."""
        if self._last_stream is None:  # later ones must not name a higher stream (RFC 9113, 6.8)
            self._last_stream = self.highest_stream
        self._put(GOAWAY, 0, 0, GOAWAY_BODY.pack(self._last_stream, code))

    def acknowledge(self, number: int, size: int) -> None:
        """Let the client send `size` more bytes on a stream, which may be closed."""
        flow = self._flows.get(number)
        if flow is not None and not flow.ended_there:
            flow.unacknowledged += size
            if flow.unacknowledged >= self._stream_window // _UPDATE_SHARE:
                self._put(WINDOW_UPDATE, 0, number, LONG.pack(flow.unacknowledged))
                flow.receive_window += flow.unacknowledged
                flow.unacknowledged = 0

    def open_window(self, size: int) -> None:
        """Let the client send `size` more bytes on the connection."""
        self._unacknowledged += size
        if self._unacknowledged >= self._connection_window // _UPDATE_SHARE:
            self._put(WINDOW_UPDATE, 0, 0, LONG.pack(self._unacknowledged))
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
        self._out.append(FRAME_HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload)
        self.waiting_bytes += FRAME_HEAD.size + size


def _check_priority(number: int, payload: bytes) -> None:
    """Raise ConnectionBroken if the stream depends on itself (RFC 7540, section 5.3.1; RFC 9113 has no priorities)."""
    if LONG.unpack_from(payload)[0] & MAX_WINDOW == number:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {number} depends on itself")


def _unpadded(payload: bytes) -> bytes:
    """Return the payload of a padded frame of HEADERS (RFC 9113, section 6.1)."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


_PROCESS: dict[int, Callable[[Framing, int, int, bytes], None]] = {
    HEADERS: Framing._on_headers,
    PRIORITY: Framing._on_priority,
    RST_STREAM: Framing._on_reset,
    SETTINGS: Framing._on_settings,
    PUSH_PROMISE: Framing._on_push,
    PING: Framing._on_ping,
    GOAWAY: Framing._on_goaway,
    WINDOW_UPDATE: Framing._on_window,
    CONTINUATION: Framing._on_continuation,
}
