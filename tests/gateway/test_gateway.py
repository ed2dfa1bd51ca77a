"""Requests that the gateway refuses before a worker gets them, and the model that a body names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_fleet import Fleet

from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.gateway.gateway import SCANNED_BYTES, Gateway, model_of
from teimgr.http_server import bind, serving
from teimgr.observability.metrics import DaemonMetrics
from teimgr.rest.app import create_app
from teimgr.wire.http_frames import MAX_HEAD_BYTES


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[aiohttp.ClientSession]:
    inference = Gateway(settings, Directory(), DaemonMetrics())
    sock = bind("127.0.0.1", 0)
    async with (
        serving(create_app(Fleet(settings), settings, DaemonMetrics(), gateway=inference), sock),
        aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session,
    ):
        yield session
    await inference.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/rerank", "/instances/a/embed"])
async def test_too_long_a_header_is_refused_and_no_defect(client: aiohttp.ClientSession, path: str) -> None:
    async with client.post(path, json={"model": "a"}, headers={"Accept": "x" * MAX_HEAD_BYTES}) as reply:
        assert (reply.status, "too long" in await reply.text()) == (431, True)


TEXT = st.text(max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


@given(st.dictionaries(TEXT | st.sampled_from(["model", "input"]), VALUES, max_size=6), st.booleans(), TEXT)
def test_the_text_found_is_the_one_that_a_reader_finds(body: dict[str, Any], ascii_only: bool, before: str) -> None:
    raw = before.encode()
    text = json.dumps(body, ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()

    model = body.get("model")
    expected = model if isinstance(model, str) else None
    assert model_of(raw + text, len(raw)) == expected
    padded = text + b" " * SCANNED_BYTES  # as long as what is scanned
    assert model_of(raw + padded, len(raw)) == expected


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
        (b'{"model": "first", "model": "last"}', "first"),
        (b'{"m\\u006fdel": "first", "model": "last"}', "first"),
        (b'{"model": "whole", "input": broken', "whole"),
        (b'{"input": "a \\"model\\": \\"no\\"", "model": "yes"}', "yes"),
        (b'{"model": 5}', None),
    ],
)
def test_only_a_key_of_the_outer_object_counts(body: bytes, expected: str | None) -> None:
    assert model_of(body) == expected
    assert model_of(body + b" " * SCANNED_BYTES) == expected


def test_a_body_without_end_is_given_up() -> None:
    assert model_of(b'{"a": [' + b"[]," * 2_000_000 + b'0], "model": "far"}') is None
