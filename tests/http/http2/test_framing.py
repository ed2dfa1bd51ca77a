"""Frames of HTTP/2: what breaks a connection or a stream, windows, long headers."""

from __future__ import annotations

import random
import struct

import h2.config
import h2.connection
import h2.events
import hpack
import pytest

from teimgr.http.http2.frame_reader import PREFACE, ConnectionBroken, ErrorCode, Payload
from teimgr.http.http2.framing import Framing
from teimgr.http.http2.headers import Headers

STREAM_WINDOW, CONNECTION_WINDOW = 100_000, 150_000
MAX_STREAMS = 3
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, HAS_PRIORITY = 1, 4, 8, 32
GET = bytes.fromhex("828684410178")  # GET http, path /, :authority x, which enters the table
TRAILERS = b"\0\1a\1b"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def long(number: int) -> bytes:
    return struct.pack(">I", number)


def setting(name: int, value: int) -> bytes:
    return struct.pack(">HI", name, value)


OPENING = PREFACE + frame(SETTINGS, 0, 0)


class Recorder:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: dict[int, Headers] = {}
        self.data: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.resets: list[int] = []
        self.windows: list[int] = []
        self.controls = 0
        self.goaways: list[int] = []

    def on_request(self, number: int, headers: Headers) -> bool:
        self.requests[number] = headers
        return (b":path", b"/refuse") not in headers

    def on_data(self, number: int, data: Payload) -> None:
        self.data[number] = self.data.get(number, b"") + bytes(data)

    def on_end(self, number: int) -> None:
        self.ended.append(number)

    def on_reset(self, number: int) -> None:
        self.resets.append(number)

    def on_window(self, number: int) -> None:
        self.windows.append(number)

    def on_settings(self, changes_windows: bool) -> None:
        self.controls += 1

    def on_goaway(self, code: int) -> None:
        self.goaways.append(code)

    def on_control(self, count: int = 1) -> None:
        self.controls += count


@pytest.fixture
def got() -> Recorder:
    return Recorder()


@pytest.fixture
def framing(got: Recorder) -> Framing:
    made = Framing(got, max_streams=MAX_STREAMS, stream_window=STREAM_WINDOW, connection_window=CONNECTION_WINDOW)
    made.take()
    return made


@pytest.fixture
def opened(framing: Framing) -> Framing:
    """With stream 1 open."""
    framing.receive(OPENING + frame(HEADERS, END_HEADERS, 1, GET))
    framing.take()
    return framing


def sent(framing: Framing) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of the frames that are to be sent."""
    raw, frames = b"".join(framing.take()), []
    while raw:
        high, low, kind, flags, stream = struct.unpack_from(">BHBBI", raw)
        end = 9 + (high << 16) + low
        frames.append((kind, flags, stream, raw[9:end]))
        raw = raw[end:]
    return frames


BROKEN: dict[str, tuple[bytes, ErrorCode]] = {
    "DATA of no stream": (frame(DATA, 0, 0, b"a"), ErrorCode.PROTOCOL_ERROR),
    "DATA of a stream that is not open yet": (frame(DATA, 0, 3, b"a"), ErrorCode.PROTOCOL_ERROR),
    "padding longer than its frame": (frame(DATA, PADDED, 1, b"\4abc"), ErrorCode.PROTOCOL_ERROR),
    "padding without its length": (frame(DATA, PADDED, 1), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of an even stream": (frame(HEADERS, END_HEADERS, 2, GET), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of no stream": (frame(HEADERS, END_HEADERS, 0, GET), ErrorCode.PROTOCOL_ERROR),
    "HEADERS without their priority": (
        frame(HEADERS, END_HEADERS | HAS_PRIORITY, 3, b"abc"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "an index behind the table": (frame(HEADERS, END_HEADERS, 3, b"\xff\x7f"), ErrorCode.COMPRESSION_ERROR),
    "a header block that is cut off": (frame(HEADERS, END_HEADERS, 3, b"\x40\x0aab"), ErrorCode.COMPRESSION_ERROR),
    "CONTINUATION of nothing": (frame(CONTINUATION, END_HEADERS, 1, GET), ErrorCode.PROTOCOL_ERROR),
    "another frame in a header block": (
        frame(HEADERS, 0, 3, GET) + frame(PING, 0, 0, b"8" * 8),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frame(HEADERS, 0, 3, GET) + frame(CONTINUATION, END_HEADERS, 1, GET),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block without an end": (
        frame(HEADERS, 0, 3, GET) + frame(CONTINUATION, 0, 3, b"\0" * 16_384) * 5,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "PRIORITY of four bytes": (frame(PRIORITY, 0, 1, b"abcd"), ErrorCode.FRAME_SIZE_ERROR),
    "RST_STREAM of no stream": (frame(RST_STREAM, 0, 0, long(0)), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of a stream that is not open yet": (frame(RST_STREAM, 0, 3, long(0)), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of three bytes": (frame(RST_STREAM, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of five bytes": (frame(SETTINGS, 0, 0, b"abcde"), ErrorCode.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (frame(SETTINGS, 1, 0, setting(1, 0)), ErrorCode.FRAME_SIZE_ERROR),
    "a window that is too large": (frame(SETTINGS, 0, 0, setting(4, 2**31)), ErrorCode.FLOW_CONTROL_ERROR),
    "frames that are too short": (frame(SETTINGS, 0, 0, setting(5, 16_383)), ErrorCode.PROTOCOL_ERROR),
    "push that is neither on nor off": (frame(SETTINGS, 0, 0, setting(2, 2)), ErrorCode.PROTOCOL_ERROR),
    "PUSH_PROMISE": (frame(PUSH_PROMISE, END_HEADERS, 1, long(2) + GET), ErrorCode.PROTOCOL_ERROR),
    "PING of a stream": (frame(PING, 0, 1, b"8" * 8), ErrorCode.PROTOCOL_ERROR),
    "PING of seven bytes": (frame(PING, 0, 0, b"7" * 7), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY of four bytes": (frame(GOAWAY, 0, 0, long(0)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE by nothing": (frame(WINDOW_UPDATE, 0, 0, long(0)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE beyond the largest window": (
        frame(WINDOW_UPDATE, 0, 0, long(2**31 - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "WINDOW_UPDATE of a stream that is not open yet": (frame(WINDOW_UPDATE, 0, 3, long(1)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of three bytes": (frame(WINDOW_UPDATE, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a frame that is too long": (struct.pack(">BHBBI", 4, 1, DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "more than the connection's window": (
        frame(HEADERS, END_HEADERS, 3, GET)
        + frame(DATA, 0, 1, b"a" * STREAM_WINDOW)
        + frame(DATA, 0, 3, b"a" * (CONNECTION_WINDOW - STREAM_WINDOW + 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize(("received", "code"), BROKEN.values(), ids=BROKEN)
def test_what_breaks_the_connection(received: bytes, code: ErrorCode, opened: Framing) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        opened.receive(received)

    assert caught.value.code is code


@pytest.mark.parametrize("received", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 20, PREFACE + frame(PING, 0, 0, b"8" * 8)])
def test_a_connection_begins_with_preface_and_settings(received: bytes, framing: Framing) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        framing.receive(received)

    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "more than its window": (frame(DATA, 0, 1, b"a" * (STREAM_WINDOW + 1)), ErrorCode.FLOW_CONTROL_ERROR),
    "DATA behind its end": (frame(DATA, END_STREAM, 1) + frame(DATA, 0, 1, b"a"), ErrorCode.STREAM_CLOSED),
    "trailers behind its end": (
        frame(DATA, END_STREAM, 1) + frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS),
        ErrorCode.STREAM_CLOSED,
    ),
    "headers that are no trailers": (frame(HEADERS, END_HEADERS, 1, GET), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE by nothing": (frame(WINDOW_UPDATE, 0, 1, long(0)), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE beyond the largest window": (
        frame(WINDOW_UPDATE, 0, 1, long(2**31 - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize(("received", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
def test_what_resets_a_stream_alone(received: bytes, code: ErrorCode, opened: Framing, got: Recorder) -> None:
    opened.receive(received + frame(HEADERS, END_HEADERS, 3, GET))

    assert (RST_STREAM, 0, 1, long(code)) in sent(opened)
    assert got.resets == [1]
    assert 3 in got.requests


def test_frames_arrive_however_they_are_cut(framing: Framing, got: Recorder) -> None:
    whole = (
        OPENING
        + frame(HEADERS, HAS_PRIORITY, 1, bytes(5) + GET[:3])
        + frame(CONTINUATION, END_HEADERS, 1, GET[3:])
        + frame(DATA, PADDED, 1, b"\2hello" + bytes(2))
        + frame(DATA, 0, 1, b"x" * 20_000)
        + frame(99, 7, 1, b"an extension")
        + frame(DATA, END_STREAM, 1, b"!")
    )
    chance, at = random.Random(5), 0
    while at < len(whole):
        size = chance.choice((1, 2, 9, 30, 7000))
        framing.receive(whole[at : at + size])
        at += size

    expected = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x"))
    assert tuple(map(tuple, got.requests[1])) == expected
    assert got.data[1] == b"hello" + b"x" * 20_000 + b"!"
    assert got.ended == [1]


def test_frames_of_a_closed_stream_are_counted_and_open_the_window_again(opened: Framing, got: Recorder) -> None:
    opened.receive(frame(RST_STREAM, 0, 1, long(ErrorCode.CANCEL)))
    opened.take()
    before = got.controls
    for _ in range(20):
        opened.receive(frame(DATA, 0, 1, b"x" * 20_000))
    opened.receive(frame(WINDOW_UPDATE, 0, 1, long(1)))

    assert got.controls == before + 21
    assert got.data == {}
    answers = sent(opened)
    opened_by = [
        int.from_bytes(data, "big") for kind, _, stream, data in answers if (kind, stream) == (WINDOW_UPDATE, 0)
    ]
    assert sum(opened_by) == 400_000
    assert answers.count((RST_STREAM, 0, 1, long(ErrorCode.STREAM_CLOSED))) == 20


@pytest.mark.parametrize("end", [0, END_STREAM])
def test_data_on_its_way_to_a_stream_that_was_reset_is_not_counted(end: int, opened: Framing, got: Recorder) -> None:
    opened.receive(frame(DATA, 0, 1, b"x" * 1000))
    opened.reset(1, ErrorCode.CANCEL)
    before = got.controls
    for _ in range(980):
        opened.receive(frame(DATA, 0, 1, b"x" * 100))
    opened.receive(frame(DATA, end, 1, b"x" * (0 if end else 1000)))
    assert got.controls == before

    opened.receive(frame(DATA, 0, 1))
    opened.receive(frame(DATA, 0, 1, b"x" * 1000))
    assert got.controls == before + 2, "beyond the window, or after the end"
    assert got.data == {1: b"x" * 1000}


def test_data_on_its_way_to_a_stream_that_was_refused_is_not_counted(framing: Framing, got: Recorder) -> None:
    refuse = b"\x82\x86\x04\x07/refuse\x01\x01x"
    framing.receive(OPENING)
    before = got.controls
    framing.receive(frame(HEADERS, END_HEADERS, 1, refuse))
    assert got.controls == before + 1

    for _ in range(40):
        framing.receive(frame(DATA, 0, 1, b"x" * 200))
    framing.receive(frame(DATA, END_STREAM, 1, b"x"))
    assert got.controls == before + 1
    framing.receive(frame(DATA, 0, 1, b"x"))
    assert got.controls == before + 2, "after the end"
    framing.receive(frame(HEADERS, END_HEADERS | END_STREAM, 3, refuse) + frame(DATA, 0, 3, b"x"))
    assert got.controls == before + 4, "a stream without data"
    assert got.data == {}


def test_streams_beyond_the_limit_and_refused_ones_are_not_opened(framing: Framing, got: Recorder) -> None:
    refuse = b"\x82\x86\x04\x07/refuse\x01\x01x"
    framing.receive(OPENING + frame(HEADERS, END_HEADERS, 1, refuse))
    for stream in (3, 5, 7, 9):
        framing.receive(frame(HEADERS, END_HEADERS, stream, GET))

    refused = [stream for kind, _, stream, data in sent(framing) if kind == RST_STREAM]
    assert refused == [1, 9]
    assert framing.highest_stream == 9
    framing.receive(frame(RST_STREAM, 0, 3, long(8)) + frame(HEADERS, END_HEADERS, 11, GET))
    assert 11 in got.requests


def test_a_clients_window_holds_back_what_is_sent_and_may_become_negative(opened: Framing) -> None:
    opened.data(1, memoryview(b"x" * 1000), False)
    assert (opened.window_of(1), opened.send_window) == (64_535, 64_535)

    opened.receive(frame(SETTINGS, 0, 0, setting(4, 9) + setting(4, 500)))
    assert opened.window_of(1) == -500
    opened.receive(frame(WINDOW_UPDATE, 0, 1, long(600)))
    assert opened.window_of(1) == 100
    assert (SETTINGS, 1, 0, b"") in sent(opened)


def test_response_headers_longer_than_a_frame_are_continued(opened: Framing) -> None:
    value = bytes(random.Random(6).choices(range(33, 127), k=40_000))
    given = [(b":status", b"200"), (b"x-long", value), (b":status", b"404"), (b"x" * 200, b"")]
    opened.headers(1, given, True)

    frames = sent(opened)
    assert [(kind, flags) for kind, flags, _, _ in frames] == [
        (HEADERS, END_STREAM),
        (CONTINUATION, 0),
        (CONTINUATION, END_HEADERS),
    ]
    decoded = hpack.Decoder(2**20).decode(b"".join(data for *_, data in frames), raw=True)
    assert list(map(tuple, decoded)) == given
    with pytest.raises(KeyError):
        opened.headers(1, given, True)


def test_a_client_of_h2_is_understood_and_understands(framing: Framing, got: Recorder) -> None:
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    client.initiate_connection()
    framing.receive(client.data_to_send())
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"x"), (b"x-a", b"1")]
    for number in (1, 3, 5):
        client.send_headers(number, headers)
        client.send_data(number, b"body", end_stream=True)
        framing.receive(client.data_to_send())
        framing.headers(number, [(b":status", b"200"), (b"x-b", b"2")], False)
        framing.data(number, memoryview(b"reply"), False)
        framing.headers(number, [(b"grpc-status", b"0")], True)
        events = client.receive_data(b"".join(framing.take()))

        kinds = [type(event) for event in events]
        assert h2.events.ResponseReceived in kinds
        assert h2.events.TrailersReceived in kinds
        assert b"".join(event.data for event in events if isinstance(event, h2.events.DataReceived)) == b"reply"
    assert got.data == {1: b"body", 3: b"body", 5: b"body"}


def test_a_ping_after_each_answer_is_free_and_others_are_counted(opened: Framing, got: Recorder) -> None:
    opened.receive(frame(HEADERS, END_STREAM | END_HEADERS, 1, TRAILERS))
    before = got.controls
    ping = frame(PING, 0, 0, bytes(8))

    for _ in range(5):
        opened.data(1, memoryview(b"x"), end=False)
        opened.receive(ping)
    assert got.controls == before
    opened.receive(ping * 3)

    assert got.controls == before + 3


def test_a_stream_that_its_client_breaks_is_counted(opened: Framing, got: Recorder) -> None:
    opened.receive(frame(HEADERS, END_STREAM | END_HEADERS, 1, TRAILERS))
    before = got.controls

    opened.receive(frame(WINDOW_UPDATE, 0, 1, long(0)))

    assert got.resets == [1]
    assert got.controls == before + 2, "the frame, and the stream"


def test_a_smaller_header_table_is_acknowledged_once(opened: Framing) -> None:
    opened.receive(frame(HEADERS, END_STREAM | END_HEADERS, 1, TRAILERS))
    opened.receive(frame(SETTINGS, 0, 0, setting(1, 0)))
    opened.take()

    opened.headers(1, [(b":status", b"200")], end=False)
    opened.headers(1, [(b"grpc-status", b"0")], end=True)

    first, second = (bytes(part)[9:] for part in opened.take())
    assert first == b"\x20\x88"
    assert second[:1] != b"\x20"


@pytest.mark.parametrize("kind", [kind for kind in range(12) if kind != DATA])
def test_frames_other_than_data_have_16_kib(kind: int, opened: Framing) -> None:
    with pytest.raises(ConnectionBroken) as caught:
        opened.receive(struct.pack(">BHBBI", 0, 16_385, kind, 0, 0))  # its payload is not awaited

    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_a_header_block_in_frames_is_bounded(opened: Framing) -> None:
    opened.receive(frame(HEADERS, 0, 3, b"\x20" * 16_384))
    with pytest.raises(ConnectionBroken, match="too long"):
        opened.receive(frame(CONTINUATION, 0, 3, b"\x20"))


def test_a_later_goaway_names_no_higher_stream(opened: Framing) -> None:
    opened.receive(frame(HEADERS, END_STREAM | END_HEADERS, 1, TRAILERS))
    opened.goaway(ErrorCode.NO_ERROR)
    opened.receive(frame(HEADERS, END_STREAM | END_HEADERS, 3, GET))
    opened.take()

    opened.goaway(ErrorCode.PROTOCOL_ERROR)

    assert b"".join(opened.take())[9:] == struct.pack(">II", 1, ErrorCode.PROTOCOL_ERROR)
