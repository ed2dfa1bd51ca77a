"""Frames, settings and error codes of HTTP/2, and their layout (RFC 9113, sections 4 to 7)."""

from __future__ import annotations

import struct
from enum import IntEnum

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
    """The client broke the protocol, which ends the connection with GOAWAY and `code`."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(f"{code.name}: {why}")
        self.code = code
