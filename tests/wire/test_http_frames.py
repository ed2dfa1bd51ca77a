"""HTTP requests and replies as payloads of frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
