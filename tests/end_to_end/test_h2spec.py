"""h2spec's cases on every kind of port that speaks HTTP/2: the API, an instance's own port, the mux.

Each case is what a client sends and what must follow: a broken connection, a reset stream, a response, or a connection
that goes on. The names begin with the section of RFC 9113, for priorities of RFC 7540, for `hpack` of RFC 7541.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from tests.support.daemon_process import DaemonProcess

from teimgr.http.http2.frame_reader import PREFACE, ErrorCode

LIMIT_S = 10.0
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
ENDED = END_STREAM | END_HEADERS
PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION = (
    ErrorCode.PROTOCOL_ERROR,
    ErrorCode.FLOW_CONTROL_ERROR,
    ErrorCode.STREAM_CLOSED,
    ErrorCode.FRAME_SIZE_ERROR,
    ErrorCode.REFUSED_STREAM,
    ErrorCode.COMPRESSION_ERROR,
)
MAX_WINDOW = 2**31 - 1
MAX_FRAME = 2**18
MAX_STREAMS = 1024


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def long(number: int) -> bytes:
    return struct.pack(">I", number)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


def literal(name: bytes, value: bytes) -> bytes:
    """A field that enters no table."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def block(*more: tuple[bytes, bytes], without: bytes = b"", method: bytes = b"GET") -> bytes:
    """The headers of a request whose response has a body on every port; `more` go behind them."""
    fields = [(b":method", method), (b":scheme", b"http"), (b":path", b"/info"), (b":authority", b"localhost")]
    return b"".join(literal(*each) for each in [*(each for each in fields if each[0] != without), *more])


GET = block()
POST = block(method=b"POST")


def get(stream: int, flags: int = ENDED, headers: bytes = GET) -> bytes:
    return frame(HEADERS, flags, stream, headers)


@dataclass(frozen=True)
class Broken:
    """The connection ends with one of these codes."""

    codes: tuple[ErrorCode, ...]


@dataclass(frozen=True)
class Reset:
    """The stream is reset with one of these codes; or the connection ends with it, which a server may choose."""

    codes: tuple[ErrorCode, ...]
    stream: int = 1


@dataclass(frozen=True)
class Answered:
    """There is a response on the stream."""

    stream: int = 1


@dataclass(frozen=True)
class DataOf:
    """The first DATA frame has this length."""

    size: int


@dataclass(frozen=True)
class Has:
    """There is a frame of this kind, with these flags and this payload."""

    kind: int
    flags: int
    payload: bytes


@dataclass(frozen=True)
class Case:
    """What is sent, behind the preface and SETTINGS, and what must follow; `then` is sent once a response has ended."""

    sent: bytes
    expected: Broken | Reset | Answered | DataOf | Has | Callable[[Raw], None]
    then: bytes = b""
    opening: bytes = PREFACE + frame(SETTINGS, 0, 0)


def broken(sent: bytes, *codes: ErrorCode, then: bytes = b"") -> Case:
    return Case(sent, Broken(codes), then)


def reset(sent: bytes, *codes: ErrorCode, then: bytes = b"", stream: int = 1) -> Case:
    return Case(sent, Reset(codes, stream), then)


@dataclass
class Raw:
    """A connection of raw frames."""

    port: int
    opening: bytes
    frames: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        self._received = b""
        self.send(self.opening)

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except ConnectionError:
            self.is_closed = True

    def until(self, found: Callable[[tuple[int, int, int, bytes]], bool]) -> tuple[int, int, int, bytes] | None:
        """The next frame for which `found` is true; None where the connection ends before."""
        while True:
            while len(self._received) >= 9:
                high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self._received)
                end = 9 + (high << 16) + low
                if len(self._received) < end:
                    break
                one = (kind, flags, stream, self._received[9:end])
                self._received = self._received[end:]
                self.frames.append(one)
                if found(one):
                    return one
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                self.is_closed = True
                return None
            self._received += data

    def goes_on(self) -> None:
        self.send(frame(PING, 0, 0, b"go on!!!"))
        assert self.until(lambda one: one == (PING, ACK, 0, b"go on!!!")), self.frames

    def close(self) -> None:
        self._socket.close()


def check(raw: Raw, expected: Broken | Reset | Answered | DataOf | Has | Callable[[Raw], None]) -> None:
    match expected:
        case Broken(codes):
            goaway = raw.until(lambda one: one[0] == GOAWAY)
            assert goaway is not None, raw.frames
            assert int.from_bytes(goaway[3][4:8], "big") in codes, goaway
            assert raw.until(lambda one: False) is None
        case Reset(codes, stream):
            one = raw.until(lambda one: one[0] == GOAWAY or (one[0] == RST_STREAM and one[2] == stream))
            assert one is not None, raw.frames
            code = one[3][4:8] if one[0] == GOAWAY else one[3]
            assert int.from_bytes(code, "big") in codes, one
            if one[0] == RST_STREAM:
                raw.goes_on()
        case Answered(stream):
            assert raw.until(lambda one: one[0] == HEADERS and one[2] == stream), raw.frames
            raw.goes_on()
        case DataOf(size):
            one = raw.until(lambda one: one[0] == DATA)
            assert one is not None, raw.frames
            assert len(one[3]) == size
        case Has(kind, flags, payload):
            assert raw.until(lambda one: one[:2] == (kind, flags) and one[3] == payload), raw.frames
            raw.goes_on()
        case _:
            expected(raw)


def both_are_answered(raw: Raw) -> None:
    seen = {one[2] for _ in range(2) if (one := raw.until(lambda one: one[0] == HEADERS)) is not None}
    assert seen == {1, 3}, raw.frames


def window_of_one_then_two(raw: Raw) -> None:
    one = raw.until(lambda one: one[0] == DATA)
    assert one is not None
    assert len(one[3]) == 1
    raw.send(frame(WINDOW_UPDATE, 0, 1, long(1)))
    one = raw.until(lambda one: one[0] == DATA)
    assert one is not None
    assert len(one[3]) == 1


def opened_window(raw: Raw) -> None:
    raw.goes_on()
    assert not [one for one in raw.frames if one[0] == DATA]
    raw.send(setting(4, 1))
    check(raw, DataOf(1))


def negative_window(raw: Raw) -> None:
    assert raw.until(lambda one: one[0] == DATA)
    raw.send(setting(4, 2) + frame(WINDOW_UPDATE, 0, 1, long(2)))  # 3 sent, 2 allowed, 2 more: one byte
    one = raw.until(lambda one: one[0] == DATA)
    assert one is not None
    assert len(one[3]) == 1


def huffman(text: bytes, padding: bytes = b"") -> bytes:
    raw = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text) + padding
    return b"\x00" + b"\x01x" + bytes((0x80 | len(raw),)) + raw


DEPENDS_ON_ITSELF = long(1) + b"\x10"
DEPENDS = long(0) + b"\x10"
TRAILERS = literal(b"x-trailer", b"1")

CASES: dict[str, Case] = {
    # generic
    "3.4 a client preface": Case(b"", Has(SETTINGS, ACK, b"")),
    "3.4 an invalid client preface": Case(
        b"", lambda raw: check_closed(raw), opening=b"INVALID CONNECTION PREFACE\r\n\r\n"
    ),
    "5.1 PRIORITY of an idle stream": Case(frame(PRIORITY, 0, 1, DEPENDS) + get(1), Answered()),
    "5.1 WINDOW_UPDATE of a half-closed stream": Case(get(1) + frame(WINDOW_UPDATE, 0, 1, long(1)), Answered()),
    "5.1 PRIORITY of a half-closed stream": Case(get(1) + frame(PRIORITY, 0, 1, DEPENDS), Answered()),
    "5.1 RST_STREAM of a half-closed stream": Case(
        get(1) + frame(RST_STREAM, 0, 1, long(8)), lambda raw: raw.goes_on()
    ),
    "5.1 PRIORITY of a closed stream": Case(get(1), lambda raw: raw.goes_on(), then=frame(PRIORITY, 0, 1, DEPENDS)),
    "8.1 a GET": Case(get(1), Answered()),
    "8.1 a HEAD": Case(get(1, headers=block(method=b"HEAD")), Answered()),
    "8.1 a POST": Case(get(1, END_HEADERS, POST) + frame(DATA, END_STREAM, 1, b"test"), Answered()),
    "8.1 a POST with trailers": Case(
        get(1, END_HEADERS, POST) + frame(DATA, 0, 1, b"test") + frame(HEADERS, ENDED, 1, TRAILERS), Answered()
    ),
    "6.1 DATA with padding": Case(
        get(1, END_HEADERS, POST) + frame(DATA, END_STREAM | PADDED, 1, b"\3abc\0\0\0"), Answered()
    ),
    "6.1 several DATA frames": Case(
        get(1, END_HEADERS, POST) + frame(DATA, 0, 1, b"a") + frame(DATA, END_STREAM, 1, b"b"), Answered()
    ),
    "6.2 HEADERS with padding": Case(frame(HEADERS, ENDED | PADDED, 1, b"\2" + GET + b"\0\0"), Answered()),
    "6.2 HEADERS with priority": Case(frame(HEADERS, ENDED | HAS_PRIORITY, 1, DEPENDS + GET), Answered()),
    "6.3 PRIORITY with an exclusive dependency": Case(
        frame(PRIORITY, 0, 1, long(1 << 31) + b"\xff") + get(1), Answered()
    ),
    "6.4 RST_STREAM": Case(get(1) + frame(RST_STREAM, 0, 1, long(8)) + get(3), Answered(3)),
    "6.5 SETTINGS": Case(setting(3, 100), Has(SETTINGS, ACK, b"")),
    "6.7 PING": Case(frame(PING, 0, 0, b"h2spec!!"), Has(PING, ACK, b"h2spec!!")),
    "6.8 GOAWAY": Case(frame(GOAWAY, 0, 0, long(0) + long(0)), lambda raw: check_closed(raw)),
    "6.9 WINDOW_UPDATE": Case(frame(WINDOW_UPDATE, 0, 0, long(1)) + get(1), Answered()),
    "6.10 CONTINUATION": Case(get(1, END_STREAM, GET[:9]) + frame(CONTINUATION, END_HEADERS, 1, GET[9:]), Answered()),
    "6.10 several CONTINUATION frames": Case(
        get(1, END_STREAM, GET[:9])
        + frame(CONTINUATION, 0, 1, GET[9:12])
        + frame(CONTINUATION, 0, 1)
        + frame(CONTINUATION, END_HEADERS, 1, GET[12:]),
        Answered(),
    ),
    # 3.5: starting HTTP/2
    "3.4 the first frame is not SETTINGS": Case(frame(PING, 0, 0, bytes(8)), Broken((PROTOCOL,)), opening=PREFACE),
    # 4: frames
    "4.1 an unknown type": Case(frame(22, 0, 0, b"12345678"), lambda raw: raw.goes_on()),
    "4.1 undefined flags": Case(frame(PING, 0x16, 0, b"flags!!!"), Has(PING, ACK, b"flags!!!")),
    "4.1 the reserved bit": Case(frame(PING, 0, 1 << 31, b"reserved"), Has(PING, ACK, b"reserved")),
    "4.2 DATA of 2^14 bytes": Case(get(1, END_HEADERS, POST) + frame(DATA, END_STREAM, 1, bytes(2**14)), Answered()),
    "4.2 DATA that is too long": reset(
        get(1, END_HEADERS, POST) + frame(DATA, END_STREAM, 1, bytes(MAX_FRAME + 1)), SIZE
    ),
    "4.2 HEADERS that are too long": broken(get(1, ENDED, GET + bytes(MAX_FRAME)), SIZE),
    "4.3 an index that is not in the table": broken(get(1, ENDED, b"\xff\xff\x01"), COMPRESSION),
    "4.3 PRIORITY in a header block": broken(get(1, END_STREAM) + frame(PRIORITY, 0, 1, DEPENDS), PROTOCOL),
    "4.3 HEADERS of another stream in a header block": broken(get(1, END_STREAM) + get(3), PROTOCOL),
    # 5.1: states of streams
    "5.1 idle: DATA": broken(frame(DATA, END_STREAM, 1, b"test"), PROTOCOL),
    "5.1 idle: RST_STREAM": broken(frame(RST_STREAM, 0, 1, long(8)), PROTOCOL),
    "5.1 idle: WINDOW_UPDATE": broken(frame(WINDOW_UPDATE, 0, 1, long(100)), PROTOCOL),
    "5.1 idle: CONTINUATION": broken(frame(CONTINUATION, END_HEADERS, 1, GET), PROTOCOL),
    "5.1 half-closed: DATA": reset(get(1) + frame(DATA, END_STREAM, 1, b"test"), CLOSED),
    "5.1 half-closed: HEADERS": reset(get(1) + get(1), CLOSED),
    "5.1 half-closed: CONTINUATION": broken(get(1) + frame(CONTINUATION, END_HEADERS, 1, GET), PROTOCOL, CLOSED),
    "5.1 closed by RST_STREAM: DATA": reset(
        get(1, END_HEADERS, POST) + frame(RST_STREAM, 0, 1, long(8)) + frame(DATA, END_STREAM, 1, b"test"), CLOSED
    ),
    "5.1 closed by RST_STREAM: HEADERS": reset(
        get(1, END_HEADERS, POST) + frame(RST_STREAM, 0, 1, long(8)) + get(1), CLOSED
    ),
    "5.1 closed by RST_STREAM: CONTINUATION": broken(
        get(1, END_HEADERS, POST) + frame(RST_STREAM, 0, 1, long(8)) + frame(CONTINUATION, END_HEADERS, 1, GET),
        PROTOCOL,
        CLOSED,
    ),
    "5.1 closed: DATA": reset(get(1), CLOSED, then=frame(DATA, END_STREAM, 1, b"test")),
    "5.1 closed: HEADERS": broken(get(1), CLOSED, then=get(1)),
    "5.1 closed: CONTINUATION": broken(get(1), PROTOCOL, CLOSED, then=frame(CONTINUATION, END_HEADERS, 1, GET)),
    "5.1.1 an even number": broken(get(2), PROTOCOL),
    "5.1.1 a smaller number": broken(get(5) + get(3), PROTOCOL),
    "5.1.2 more streams than allowed": reset(
        setting(4, 0) + b"".join(get(2 * each + 1) for each in range(MAX_STREAMS + 1)),
        REFUSED,
        PROTOCOL,
        stream=2 * MAX_STREAMS + 1,
    ),
    # RFC 7540, 5.3.1
    "5.3.1 HEADERS that depend on themselves": reset(
        frame(HEADERS, ENDED | HAS_PRIORITY, 1, DEPENDS_ON_ITSELF + GET), PROTOCOL
    ),
    "5.3.1 PRIORITY that depends on itself": reset(frame(PRIORITY, 0, 1, DEPENDS_ON_ITSELF), PROTOCOL),
    # 5.4, 5.5
    "5.4.1 the connection is closed behind an error": broken(frame(PING, 0, 3, b"12345678"), PROTOCOL),
    "5.4.1 GOAWAY before it": broken(frame(PING, 0, 3, b"12345678"), PROTOCOL),
    "5.5 an unknown frame": Case(frame(0xFF, 1, 0, b"unknown"), lambda raw: raw.goes_on()),
    "5.5 an unknown frame in a header block": broken(get(1, END_STREAM) + frame(0xFF, 1, 0, b"unknown"), PROTOCOL),
    # 6.1: DATA
    "6.1 DATA of no stream": broken(frame(DATA, END_STREAM, 0, b"test"), PROTOCOL),
    "6.1 DATA of a stream that is not open": reset(get(1), CLOSED, then=frame(DATA, END_STREAM, 1, b"test")),
    "6.1 DATA with too much padding": broken(
        get(1, END_HEADERS, POST) + frame(DATA, END_STREAM | PADDED, 1, b"\6Test"), PROTOCOL
    ),
    # 6.2: HEADERS
    "6.2 PRIORITY instead of CONTINUATION": broken(get(1, END_STREAM) + frame(PRIORITY, 0, 1, DEPENDS), PROTOCOL),
    "6.2 HEADERS of another stream instead of CONTINUATION": broken(get(1, END_STREAM) + get(3), PROTOCOL),
    "6.2 HEADERS of no stream": broken(get(0), PROTOCOL),
    "6.2 HEADERS with too much padding": broken(frame(HEADERS, ENDED | PADDED, 1, b"\xff" + GET), PROTOCOL),
    # 6.3: PRIORITY
    "6.3 PRIORITY of no stream": broken(frame(PRIORITY, 0, 0, DEPENDS), PROTOCOL),
    "6.3 PRIORITY of four bytes": reset(get(1, END_HEADERS, POST) + frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    # 6.4: RST_STREAM
    "6.4 RST_STREAM of no stream": broken(frame(RST_STREAM, 0, 0, long(8)), PROTOCOL),
    "6.4 RST_STREAM of an idle stream": broken(frame(RST_STREAM, 0, 1, long(8)), PROTOCOL),
    "6.4 RST_STREAM of three bytes": broken(get(1, END_HEADERS, POST) + frame(RST_STREAM, 0, 1, b"\0\0\0"), SIZE),
    # 6.5: SETTINGS
    "6.5 an acknowledgement with settings": broken(frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    "6.5 SETTINGS of a stream": broken(frame(SETTINGS, 0, 1, struct.pack(">HI", 3, 100)), PROTOCOL),
    "6.5 SETTINGS of three bytes": broken(frame(SETTINGS, 0, 0, b"\0\0\0"), SIZE),
    "6.5.2 ENABLE_PUSH of 2": broken(setting(2, 2), PROTOCOL),
    "6.5.2 INITIAL_WINDOW_SIZE of 2^31": broken(setting(4, 2**31), FLOW),
    "6.5.2 MAX_FRAME_SIZE below 2^14": broken(setting(5, 16_383), PROTOCOL),
    "6.5.2 MAX_FRAME_SIZE above 2^24-1": broken(setting(5, 2**24), PROTOCOL),
    "6.5.2 an unknown setting": Case(setting(0xFF, 1), Has(SETTINGS, ACK, b"")),
    "6.5.2 a wrong value before a right one": broken(
        frame(SETTINGS, 0, 0, struct.pack(">HIHI", 5, 1, 5, 16_384)), PROTOCOL
    ),
    "6.5.3 several values of INITIAL_WINDOW_SIZE": Case(
        frame(SETTINGS, 0, 0, struct.pack(">HIHI", 4, 100, 4, 1)) + get(1), DataOf(1)
    ),
    "6.5.3 SETTINGS are acknowledged": Case(setting(2, 0), Has(SETTINGS, ACK, b"")),
    # 6.7: PING
    "6.7 PING is answered with its payload": Case(frame(PING, 0, 0, b"payload!"), Has(PING, ACK, b"payload!")),
    "6.7 an acknowledgement is not answered": Case(
        frame(PING, ACK, 0, b"unasked!") + frame(PING, 0, 0, b"payload!"),
        lambda raw: not_answered(raw),
    ),
    "6.7 PING of a stream": broken(frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "6.7 PING of six bytes": broken(frame(PING, 0, 0, bytes(6)), SIZE),
    # 6.8: GOAWAY
    "6.8 GOAWAY of a stream": broken(frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    # 6.9: WINDOW_UPDATE
    "6.9 by nothing": broken(frame(WINDOW_UPDATE, 0, 0, long(0)), PROTOCOL),
    "6.9 by nothing on a stream": reset(get(1, END_HEADERS, POST) + frame(WINDOW_UPDATE, 0, 1, long(0)), PROTOCOL),
    "6.9 of three bytes": broken(frame(WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "6.9.1 DATA fits into the window": Case(setting(4, 1) + get(1), DataOf(1)),
    "6.9.1 the connection's window above 2^31-1": broken(2 * frame(WINDOW_UPDATE, 0, 0, long(MAX_WINDOW)), FLOW),
    "6.9.1 a stream's window above 2^31-1": reset(
        get(1, END_HEADERS, POST) + 2 * frame(WINDOW_UPDATE, 0, 1, long(MAX_WINDOW)), FLOW
    ),
    "6.9.2 a window that is opened by SETTINGS": Case(setting(4, 0) + get(1), opened_window),
    "6.9.2 a window that becomes negative": Case(setting(4, 3) + get(1), negative_window),
    "6.9.2 INITIAL_WINDOW_SIZE above 2^31-1": broken(setting(4, 2**31), FLOW),
    "6.9.2 a window of one, then of two": Case(setting(4, 1) + get(1), window_of_one_then_two),
    # 6.10: CONTINUATION
    "6.10 several CONTINUATION frames behind each other": Case(
        get(1, END_STREAM, GET[:3]) + 2 * frame(CONTINUATION, 0, 1) + frame(CONTINUATION, END_HEADERS, 1, GET[3:]),
        Answered(),
    ),
    "6.10 DATA instead of CONTINUATION": broken(get(1, END_STREAM) + frame(DATA, END_STREAM, 1, b"test"), PROTOCOL),
    "6.10 CONTINUATION of no stream": broken(get(1, END_STREAM) + frame(CONTINUATION, END_HEADERS, 0), PROTOCOL),
    "6.10 CONTINUATION behind the end of HEADERS": broken(get(1) + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL),
    "6.10 CONTINUATION behind the end of CONTINUATION": broken(
        get(1, END_STREAM) + 2 * frame(CONTINUATION, END_HEADERS, 1), PROTOCOL
    ),
    "6.10 CONTINUATION behind DATA": broken(
        get(1, END_HEADERS, POST) + frame(DATA, END_STREAM, 1, b"test") + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL
    ),
    # 7: error codes
    "7 GOAWAY with an unknown code": Case(frame(GOAWAY, 0, 0, long(0) + long(0xFF)), lambda raw: check_closed(raw)),
    "7 RST_STREAM with an unknown code": Case(
        get(1, END_HEADERS, POST) + frame(RST_STREAM, 0, 1, long(0xFF)), lambda raw: raw.goes_on()
    ),
    # 8: HTTP
    "8.1 a second HEADERS that is not the end": reset(
        get(1, END_HEADERS, POST) + get(1, END_HEADERS, TRAILERS), PROTOCOL
    ),
    "8.1.1 content that is shorter than content-length": reset(
        get(1, END_HEADERS, block((b"content-length", b"5"), method=b"POST")) + frame(DATA, END_STREAM, 1, b"test"),
        PROTOCOL,
    ),
    "8.1.1 content that is longer, in parts": reset(
        get(1, END_HEADERS, block((b"content-length", b"1"), method=b"POST"))
        + frame(DATA, 0, 1, b"test")
        + frame(DATA, END_STREAM, 1, b"test"),
        PROTOCOL,
    ),
    "8.2 a name in upper case": reset(get(1, ENDED, block((b"X-TEST", b"ok"))), PROTOCOL),
    "8.2 a name with a space": reset(get(1, ENDED, block((b"x test", b"ok"))), PROTOCOL),
    "8.2 a value with a line break": reset(get(1, ENDED, block((b"x-test", b"a\r\nb"))), PROTOCOL),
    "8.2.2 connection": reset(get(1, ENDED, block((b"connection", b"keep-alive"))), PROTOCOL),
    "8.2.2 transfer-encoding": reset(get(1, ENDED, block((b"transfer-encoding", b"chunked"))), PROTOCOL),
    "8.2.2 te other than trailers": reset(
        get(1, ENDED, block((b"trailers", b"test"), (b"te", b"trailers, deflate"))), PROTOCOL
    ),
    "8.3 an unknown pseudo-header": reset(get(1, ENDED, literal(b":test", b"ok") + GET), PROTOCOL),
    "8.3 a pseudo-header of responses": reset(get(1, ENDED, literal(b":status", b"200") + GET), PROTOCOL),
    "8.3 a pseudo-header in the trailers": reset(
        get(1, END_HEADERS, POST) + frame(HEADERS, ENDED, 1, literal(b":method", b"200")), PROTOCOL
    ),
    "8.3 a pseudo-header behind other headers": reset(
        get(1, ENDED, block((b"x-test", b"ok"), (b":path", b"/info"), without=b":path")), PROTOCOL
    ),
    "8.3.1 an empty :path": reset(get(1, ENDED, literal(b":path", b"") + block(without=b":path")), PROTOCOL),
    "8.3.1 no :method": reset(get(1, ENDED, block(without=b":method")), PROTOCOL),
    "8.3.1 no :scheme": reset(get(1, ENDED, block(without=b":scheme")), PROTOCOL),
    "8.3.1 no :path": reset(get(1, ENDED, block(without=b":path")), PROTOCOL),
    "8.3.1 two of :method": reset(get(1, ENDED, literal(b":method", b"GET") + GET), PROTOCOL),
    "8.3.1 two of :scheme": reset(get(1, ENDED, literal(b":scheme", b"http") + GET), PROTOCOL),
    "8.3.1 two of :path": reset(get(1, ENDED, literal(b":path", b"/info") + GET), PROTOCOL),
    "8.3.1 two of :authority": reset(get(1, ENDED, literal(b":authority", b"localhost") + GET), PROTOCOL),
    "8.4 PUSH_PROMISE of a client": broken(
        get(1, END_HEADERS, POST) + frame(PUSH_PROMISE, END_HEADERS, 1, long(2) + GET), PROTOCOL
    ),
    # RFC 7541
    "hpack 2.3.3 an index that is not in the table": broken(get(1, ENDED, GET + b"\xc6"), COMPRESSION),
    "hpack 4.2 a size of the table behind a field": broken(get(1, ENDED, GET + b"\x21"), COMPRESSION),
    "hpack 5.2 padding of more than seven bits": broken(get(1, ENDED, GET + huffman(b"x-test", b"\xff")), COMPRESSION),
    "hpack 5.2 padding of zeros": broken(get(1, ENDED, GET + b"\0\1x\x81\x1a"), COMPRESSION),
    "hpack 5.2 EOS": broken(get(1, ENDED, GET + b"\0\1x\x84\xff\xff\xff\xff"), COMPRESSION),
    "hpack 6.1 index 0": broken(get(1, ENDED, GET + b"\x80"), COMPRESSION),
    "hpack 6.2 an index of a name that is not in the table": broken(get(1, ENDED, GET + b"\x7f\x07\1a"), COMPRESSION),
    "hpack 6.3 a size above SETTINGS_HEADER_TABLE_SIZE": broken(get(1, ENDED, b"\x3f\xe2\x1f" + GET), COMPRESSION),
}


def check_closed(raw: Raw) -> None:
    assert raw.until(lambda one: False) is None


def not_answered(raw: Raw) -> None:
    assert raw.until(lambda one: one[0] == PING) == (PING, ACK, 0, b"payload!")


@pytest.mark.parametrize("port", ["REST", "instance", "mux"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_of_h2spec(case: Case, port: str, daemon: DaemonProcess, instance_port: int) -> None:
    number = {"REST": daemon.api_port, "instance": instance_port, "mux": daemon.grpc_port}[port]
    raw = Raw(number, case.opening)
    try:
        raw.send(case.sent)
        if case.then:
            assert raw.until(lambda one: one[0] in (DATA, HEADERS) and bool(one[1] & END_STREAM)), raw.frames
            raw.send(case.then)
        check(raw, case.expected)
    finally:
        raw.close()


@pytest.fixture(scope="module")
def instance_port(daemon: DaemonProcess) -> int:
    with daemon.client() as client:
        return int(client.get("exact").port)
