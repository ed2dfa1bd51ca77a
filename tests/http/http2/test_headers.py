"""Header blocks: the same headers, table and refusals as by the hpack library; the cache of blocks that repeat."""

from __future__ import annotations

import random
from typing import Any

import hpack
import pytest
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given, settings
from hypothesis import strategies as st

from teimgr.http.http2.headers import (
    _CACHED_BLOCKS,
    MAX_HEADER_BYTES,
    BlockTooLarge,
    HeaderDecoder,
    InvalidBlock,
    InvalidHead,
    read_head,
)

NAMES = st.sampled_from([b":path", b":method", b"authorization", b"traceparent", b"x-key", b"x" * 150, b""])
VALUES = st.one_of(st.sampled_from([b"", b"/", b"GET", b"k" * 40, b"v" * 4070, b"v" * 5000]), st.binary(max_size=40))


def encoded(number: int, bits: int, first: int) -> bytes:
    """An integer behind the bits `first`, as hpack encodes it."""
    raw = encode_integer(number, bits)
    raw[0] |= first
    return bytes(raw)


@st.composite
def strings(draw: Any) -> bytes:
    """A string, mostly a valid one."""
    raw = draw(VALUES)
    if draw(st.integers(0, 3)) == 0:
        raw = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(raw)
        return encoded(len(raw), 7, 0x80) + raw
    length = len(raw) + draw(st.sampled_from([0] * 30 + [1, 1000]))
    return encoded(length, 7, draw(st.sampled_from([0] * 30 + [0x80]))) + raw


@st.composite
def fields(draw: Any) -> bytes:
    """The representation of one field, or a size of the table (RFC 7541, section 6)."""
    index = draw(
        st.one_of(st.integers(1, 62), st.integers(1, 63), st.sampled_from([1, 2, 62, 62, 0, 65, 127, 200, 2**31]))
    )
    match draw(st.sampled_from(["indexed", *["entered"] * 4, "not entered", "never", "size", "bytes"])):
        case "indexed":
            return encoded(index, 7, 0x80)
        case "size":
            return encoded(draw(st.sampled_from([0, 50, 100, 4000, 4095, 4096, 4097, 2**40])), 5, 0x20)
        case "bytes":
            return bytes(draw(st.binary(max_size=6)))
        case kind:
            bits, first = {"entered": (6, 0x40), "not entered": (4, 0), "never": (4, 0x10)}[kind]
    has_name = draw(st.booleans())
    name = encoded(0, bits, first) + draw(strings()) if has_name else encoded(index, bits, first)
    return bytes(name + draw(strings()))


BLOCKS = st.one_of(st.lists(fields(), max_size=6).map(b"".join), st.binary(max_size=30))


def outcome(decode: Any, block: bytes) -> Any:
    try:
        return [tuple(field) for field in decode(block)]
    except (BlockTooLarge, hpack.OversizedHeaderListError):
        return "too large"
    except (InvalidBlock, hpack.HPACKError, IndexError):
        return "invalid"


@settings(max_examples=500, deadline=None)
@given(st.lists(BLOCKS, max_size=8))
def test_any_blocks_give_what_the_library_gives(blocks: list[bytes]) -> None:
    ours, library = HeaderDecoder(), hpack.Decoder(MAX_HEADER_BYTES)
    for block in blocks:
        expected = outcome(lambda block: library.decode(block, raw=True), block)

        assert outcome(ours.decode, block) == expected
        if isinstance(expected, str):
            return
        assert outcome(ours.decode, block) == outcome(lambda block: library.decode(block, raw=True), block), "again"
        assert list(ours._table) == list(map(tuple, library.header_table.dynamic_entries))
        assert ours._table_bytes == library.header_table._current_size


def test_headers_that_are_too_large_together_are_refused() -> None:
    decoder = HeaderDecoder()
    entered = decoder.decode(b"\x40\x01a" + encoded(4000, 7, 0) + b"v" * 4000)
    assert entered == ((b"a", b"v" * 4000),)

    assert len(decoder.decode(b"\xbe" * 4)) == 4
    with pytest.raises(BlockTooLarge):
        decoder.decode(b"\xbe" * 5)


@pytest.mark.parametrize(
    "block", [b"\x80", b"\xbe", b"\x40", b"\x00\x05abc", b"\x82\x20", b"\x3f\xe2\x1f", b"\x82" + b"\xff" * 7]
)
def test_malformed_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(InvalidBlock):
        HeaderDecoder().decode(block)


def test_the_cache_is_bounded_and_keeps_no_long_lists() -> None:
    decoder = HeaderDecoder()
    for number in range(1000):
        decoder.decode(b"\0\1a" + bytes((3,)) + b"%03d" % number)
    newest = b"\0\1a" + bytes((3,)) + b"999"

    assert len(decoder._known) == _CACHED_BLOCKS
    assert newest in decoder._known, "the oldest make room"
    decoder.decode(b"\x82" * 300)
    assert b"\x82" * 300 not in decoder._known


def test_a_block_that_changes_the_table_is_not_cached() -> None:
    decoder, encoder = HeaderDecoder(), hpack.Encoder()
    first, second = (encoder.encode([(b":path", b"/a"), (b"x-key", b"1")]) for _ in range(2))
    decoder.decode(first)
    assert not decoder._known

    assert decoder.decode(second) is decoder.decode(second)
    decoder.decode(b"\x40\1b\1c")
    assert not decoder._known, "names other fields now"


def test_header_blocks_from_the_cache_are_what_a_decoder_without_one_gives() -> None:
    """Clients' encoders with tables that grow, shrink and are full."""
    chance = random.Random(7)
    for _ in range(50):
        encoder, plain, cached = hpack.Encoder(), hpack.Decoder(), HeaderDecoder()
        for _ in range(200):
            if chance.random() < 0.02:
                encoder.header_table_size = chance.choice((0, 60, 200, 4096))
            headers = [
                (b":path", chance.choice((b"/a", b"/b"))),
                (b"grpc-timeout", b"%dm" % chance.choice((1, 2, chance.randrange(100)))),
                (b"x-key", chance.choice((b"k" * 30, b"l" * 30))),
            ]
            block = encoder.encode(headers, huffman=chance.random() < 0.5)
            expected = list(map(tuple, plain.decode(block, raw=True)))
            assert expected == headers
            assert list(map(tuple, cached.decode(block))) == expected


GOOD = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/v1/a%20b?x=1"), (b":authority", b"host:9000")]


def changed(name: bytes, value: bytes | None) -> list[tuple[bytes, bytes]]:
    """The good head with another value of one pseudo-header, or without it."""
    return [(key, old if key != name else value) for key, old in GOOD if key != name or value is not None]  # type: ignore[misc]


def test_a_head_is_read_with_its_host_first() -> None:
    head = read_head([*GOOD, (b"content-length", b"5"), (b"x-a", b"1"), (b"te", b"trailers")])

    assert (head.method, head.length) == (b"POST", 5)
    assert head.fields == ((b"host", b"host:9000"), (b"content-length", b"5"), (b"x-a", b"1"), (b"te", b"trailers"))
    assert head.location() == {"path": "/v1/a b", "raw_path": b"/v1/a%20b", "query_string": b"x=1"}


def test_crumbs_of_cookies_are_one_header() -> None:
    head = read_head([*GOOD, (b"cookie", b"a=1"), (b"x", b""), (b"cookie", b"b=2")])

    assert [field for field in head.fields if field[0] == b"cookie"] == [(b"cookie", b"a=1; b=2")]


def test_host_stands_for_authority_and_both_may_agree() -> None:
    assert read_head([*changed(b":authority", None), (b"host", b"there")]).fields == ((b"host", b"there"),)
    assert read_head([*GOOD, (b"host", b"HOST:9000")]).fields == ((b"host", b"HOST:9000"),)


@pytest.mark.parametrize(
    "headers",
    [
        *(changed(name, None) for name, _ in GOOD),
        changed(b":method", b""),
        changed(b":method", b"get"),
        changed(b":method", b"CONNECT"),
        changed(b":method", b"GET /x HTTP/1.1"),
        changed(b":scheme", b"ftp"),
        changed(b":path", b""),
        changed(b":path", b"v1"),
        changed(b":path", b"http://host/"),
        changed(b":path", b"/a b"),
        changed(b":path", b"/\xc3\xbc"),
        changed(b":path", b"/a\r\nx: y"),
        *(changed(b":authority", host) for host in (b"user@host", b"[", b"[::1", b"host:port", b"host:65536", b"a b")),
        [*changed(b":authority", None), (b"host", b"[")],
        [*GOOD, (b":path", b"/twice")],
        [*GOOD, (b":status", b"200")],
        [*GOOD, (b":protocol", b"websocket")],
        [GOOD[0], (b"x", b"y"), *GOOD[1:]],
        [*GOOD, (b"host", b"another")],
        [*GOOD, (b"host", b"host:9000"), (b"host", b"host:9000")],
        [*GOOD, (b"content-length", b"5"), (b"content-length", b"5")],
        [*GOOD, (b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
        [*GOOD, (b"authorization", b"Bearer a"), (b"x-a", b"1"), (b"authorization", b"Bearer a")],
        [*GOOD, (b"x-api-key", b"a"), (b"x-api-key", b"b")],
        [*GOOD, (b"content-length", b"+5")],
        [*GOOD, (b"content-length", b"9" * 19)],
        [*GOOD, (b"connection", b"keep-alive")],
        [*GOOD, (b"upgrade", b"h2c")],
        [*GOOD, (b"keep-alive", b"5")],
        [*GOOD, (b"proxy-connection", b"x")],
        [*GOOD, (b"transfer-encoding", b"chunked")],
        [*GOOD, (b"te", b"gzip")],
        [*GOOD, (b"X-Upper", b"1")],
        [*GOOD, (b"", b"1")],
        [*GOOD, (b"a b", b"1")],
        [*GOOD, (b"a:b", b"1")],
        [*GOOD, (b"x", b"a\r\nb: c")],
        [*GOOD, (b"x", b"a\0")],
        [*GOOD, (b"x", b" a")],
        [*GOOD, (b"x", b"a\t")],
    ],
)
def test_malformed_heads_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidHead) as refused:
        read_head(headers)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isascii()


@pytest.mark.parametrize("value", [b"", b"a", b"a b\tc", b"\xc3\xbc", b"x" * 10_000])
def test_values_that_http1_takes_are_taken(value: bytes) -> None:
    assert read_head([*GOOD, (b"x", value)]).fields[-1] == (b"x", value)
