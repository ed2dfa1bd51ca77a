"""Requests that the gateway refuses before a worker gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.support.memory_fleet import Fleet

from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.gateway.gateway import Gateway
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
