"""The way in for inference: which requests are answered there, for whom, and what a page gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.support.credentials import AUTH, SECRETS
from tests.support.rest_listener import Fleet

from teimgr.api.gateway import Gateway
from teimgr.api.rest.app import create_app
from teimgr.config.settings import Settings
from teimgr.http.server import bind, serving
from teimgr.observability.metrics import DaemonMetrics
from teimgr.wire.routing.directory import Directory


@asynccontextmanager
async def asked(settings: Settings) -> AsyncIterator[tuple[aiohttp.ClientSession, Any, tuple[str, int]]]:
    """A client of an application that serves no instance, what answers inference, and the address."""
    gateway, sock = Gateway(settings, Directory(), DaemonMetrics()), bind("127.0.0.1", 0)
    app = create_app(Fleet(settings), settings, DaemonMetrics(), gateway=gateway)
    address = sock.getsockname()
    async with (
        serving(app, sock, direct=app.state.direct),
        aiohttp.ClientSession(f"http://127.0.0.1:{address[1]}") as client,
        asyncio.timeout(30),
    ):
        yield client, app.state.direct, address
    await gateway.close()


@pytest.mark.parametrize(
    ("target", "is_inference"),
    [
        ("/v1/embeddings", True),
        ("/v1/embeddings?api-version=1", True),
        ("http://host/v1/embeddings", True),
        ("/instances/a/embed", True),
        ("/instances/a%20b", True),
        ("/v1/encode/org/model", True),
        ("/weaviate/a/vectors", True),
        ("/v1/embeddings?" + "a&" * 1000, False),  # refused by the application
        ("/instances/a%2Fembed", False),
        ("/instances/%ff/embed", False),
        ("/instances/actions", False),
        ("/instances/a/start", False),
        ("/instances", False),
        ("/v1/files", False),
        ("/v1/nowhere", False),
        ("*", False),
    ],
)
async def test_the_target_says_what_is_inference(settings: Settings, target: str, is_inference: bool) -> None:
    async with asked(settings) as (_, direct, _):
        assert (direct(b"POST", target.encode()) is not None) is is_inference
        assert direct(b"GET", target.encode()) is None


async def test_an_allowed_page_may_read_the_answer_and_a_foreign_one_gets_none(settings: Settings) -> None:
    allowed = replace(settings, allowed_origins=("https://app.example",))
    async with asked(allowed) as (client, _, _):
        for origin, status in (("https://app.example", 404), ("https://evil.example", 403), (None, 404)):
            headers = {} if origin is None else {"Origin": origin}
            async with client.post("/v1/embeddings", json={"model": "a", "input": "x"}, headers=headers) as reply:
                assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
                assert reply.headers.get("access-control-allow-origin") == (None if origin is None else "*")
                assert "x-request-id" in reply.headers


async def test_a_caller_without_the_right_is_refused_before_its_body_comes(settings: Settings) -> None:
    async with asked(replace(settings, auth=AUTH)) as (_, _, address):
        for path, status in ((b"/v1/embeddings", b"401"), (b"/instances/theirs/embed", b"403")):
            reader, writer = await asyncio.open_connection(*address)
            key = b"" if status == b"401" else b"authorization: Bearer %s\r\n" % SECRETS["team"].encode()
            writer.write(b"POST %s HTTP/1.1\r\nhost: a\r\n%scontent-length: 1000000\r\n\r\n" % (path, key))
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == status
            writer.close()


async def test_other_methods_are_refused_by_the_application(settings: Settings) -> None:
    async with asked(settings) as (client, _, _):
        for path in ("/v1/embeddings", "/instances/a/embed"):
            async with client.get(path) as reply:
                assert (reply.status, reply.headers["allow"]) == (405, "POST")
        async with client.get("/instances/a/info") as reply:
            assert reply.status == 404
