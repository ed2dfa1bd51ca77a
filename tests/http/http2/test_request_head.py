"""Validation of the heads of HTTP/2 requests, and what becomes of them in ASGI."""

from __future__ import annotations

import pytest

from teimgr.http.http2.request_head import InvalidHead, read_head

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
