"""Frames that come in parts: what is held of them, what they cost."""

from __future__ import annotations

import struct

import pytest
from tests.http.http2.test_framing import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GET,
    HEADERS,
    OPENING,
    PADDED,
    PING,
    SETTINGS,
    Recorder,
    frame,
    sent,
    setting,
)

from teimgr.http.http2.framing import Framing
from teimgr.http.turns import TURN_UNITS

WINDOW = 1 << 20


@pytest.fixture
def got() -> Recorder:
    return Recorder()


@pytest.fixture
def opened(got: Recorder) -> Framing:
    """With stream 1 open, and windows for any DATA frame."""
    made = Framing(got, max_streams=1024, stream_window=WINDOW, connection_window=WINDOW)
    made.receive(OPENING + frame(HEADERS, END_HEADERS, 1, GET))
    made.take()
    return made


def test_nothing_is_held_of_data_whose_end_has_not_come(opened: Framing, got: Recorder) -> None:
    opened.receive(struct.pack(">BHBBI", 3, 0xFFFF, DATA, END_STREAM, 1) + b"x" * 100_000)
    assert got.data == {1: b"x" * 100_000}
    assert opened._rest == b""
    assert opened.is_inside
    assert not got.ended

    opened.receive(b"y" * (0x3FFFF - 100_000))
    assert len(got.data[1]) == 0x3FFFF
    assert not opened.is_inside
    assert got.ended == [1]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_padding_is_dropped_however_it_comes_and_its_window_opened(size: int, opened: Framing, got: Recorder) -> None:
    whole = frame(DATA, PADDED, 1, b"\xff" + b"data" + bytes(255)) * 2000 + frame(DATA, PADDED | END_STREAM, 1, b"\0!")
    for at in range(0, len(whole), 300 * size + size):
        opened.receive(whole[at : at + 300 * size + size])

    assert got.data[1] == b"data" * 2000 + b"!"
    assert got.ended == [1]
    updates = [int.from_bytes(payload, "big") for kind, _, stream, payload in sent(opened) if (kind, stream) == (8, 1)]
    assert sum(updates) > 2000 * 256 - WINDOW // 4, "what the receiver does not see is acknowledged at once"


def test_data_of_a_stream_that_is_reset_in_its_midst_is_dropped(opened: Framing, got: Recorder) -> None:
    opened.receive(struct.pack(">BHBBI", 1, 0, DATA, END_STREAM, 1) + b"x" * 10)
    opened.reset(1, 8)  # type: ignore[arg-type]
    before = got.controls
    opened.receive(b"x" * (0x10000 - 10) + frame(PING, 0, 0, b"go on!!!"))

    assert got.data == {1: b"x" * 10}
    assert (PING, 1, 0, b"go on!!!") in sent(opened)
    assert got.controls == before + 1, "the PING"


def test_what_is_left_after_the_units_comes_with_the_next_call(opened: Framing, got: Recorder) -> None:
    requests = b"".join(frame(HEADERS, END_HEADERS, number, GET) for number in range(3, 203, 2))

    assert opened.receive(requests, 100) < opened.needed_units
    some = len(got.requests)
    assert 1 < some < 20
    assert opened.is_inside
    opened.receive(b"", 0)
    assert len(got.requests) == some
    while opened.needed_units:
        opened.receive(b"", 100)
    assert len(got.requests) == 101


@pytest.mark.parametrize(
    "heavy",
    [
        frame(HEADERS, END_HEADERS, 4001, GET + b"\0\1x\xff\x81\x7e" + b"\x18" * 16_384)[: 9 + 16_384],
        frame(SETTINGS, 0, 0, setting(99, 1) * 2730),
        frame(HEADERS, 0, 4001, GET + bytes(16_378)) + frame(CONTINUATION, END_HEADERS, 4001, bytes(16_384)),
        frame(DATA, 0, 1, bytes(2**18)),
    ],
    ids=["HEADERS", "SETTINGS", "CONTINUATION", "DATA"],
)
def test_a_turn_is_enough_for_any_frame(heavy: bytes, opened: Framing) -> None:
    for number in range(3, 2049, 2):
        opened.receive(frame(HEADERS, END_HEADERS, number, GET))
    at = 0
    while at < len(heavy):
        high, low, kind = struct.unpack_from(">BHB", heavy, at)
        end = at + 9 + (high << 16) + low
        assert opened._cost(kind, end - at - 9) <= TURN_UNITS
        opened._block_bytes = end - at - 9
        at = end
