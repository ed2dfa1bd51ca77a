"""Frames of HTTP, and the one text that is looked for in a body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.gateway.bodies import text_of
from teimgr.wire.http_frames import (
    MAX_HEAD_BYTES,
    HttpReply,
    HttpRequest,
    pack_reply,
    read_reply,
    read_request,
    request_head,
)

TEXT = st.text(max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


@given(TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=3), st.binary(max_size=50))
def test_what_is_packed_is_read_again(path: str, query: str, headers: dict[str, str], body: bytes) -> None:
    request = HttpRequest("openai", "POST", path, query, headers, body)
    read = read_request(request_head(request) + body)
    assert read._replace(body=bytes(read.body)) == request
    reply = HttpReply(200, headers, body)
    told = read_reply(pack_reply(reply))
    assert told._replace(body=bytes(told.body)) == reply


@given(st.binary(max_size=80))
def test_nonsense_is_a_value_error(payload: bytes) -> None:
    for read in (read_request, read_reply):
        with pytest.raises(ValueError):  # noqa: PT011  which sentence depends on the bytes
            read(payload)


def test_a_head_is_bounded() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        request_head(HttpRequest("openai", "POST", "/" * MAX_HEAD_BYTES))
    with pytest.raises(ValueError, match="in a payload of"):
        read_request((MAX_HEAD_BYTES + 1).to_bytes(4, "little") + b" " * 2 * MAX_HEAD_BYTES)


@given(st.dictionaries(TEXT | st.sampled_from(["model", "input"]), VALUES, max_size=6), st.booleans(), TEXT)
def test_the_text_found_is_the_one_that_a_reader_finds(body: dict[str, Any], ascii_only: bool, before: str) -> None:
    raw = before.encode()
    text = json.dumps(body, ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()

    expected = body.get("model")
    assert text_of("model", raw + text, len(raw)) == (expected if isinstance(expected, str) else None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"m\\u006fdel": "a\\"b"}', 'a"b'),
        (b'{"input": {"model": "no"}, "model" :\n"yes"}', "yes"),
        (b'{"input": "model", "x": ["model", "a"]}', None),
        (b'[{"model": "no"}]', None),
        (b'{"a": 1} {"model": "no"}', None),
        (b"", None),
        (b'"model": "no"', None),
        (b'{"model": "half', None),
    ],
)
def test_only_a_key_of_the_outer_object_counts(body: bytes, expected: str | None) -> None:
    assert text_of("model", body) == expected


def test_a_body_without_end_is_given_up() -> None:
    assert text_of("model", b'{"a": [' + b"[]," * 2_000_000 + b'0], "model": "far"}') is None
