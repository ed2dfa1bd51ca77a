"""REST calls of the client over HTTP: timeouts, replies of other servers, TLS."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.small_servers import Certificates, Daemon, serve

from teimgr.client import AsyncClient, Tls, http_replies
from teimgr.client.rest_client import RestClient
from teimgr.errors import (
    DeadlineExceeded,
    Internal,
    InvalidConfig,
    Refused,
    Unavailable,
    Unreachable,
)


async def test_an_error_that_is_not_the_daemons_keeps_its_status_and_text(client: AsyncClient) -> None:
    with pytest.raises(Refused, match="HTTP 405"):
        await client._http.call("PUT", "/instances", timeout_s=5)


async def test_a_reply_that_never_comes_ends_at_the_timeout(api_url: str) -> None:
    async with AsyncClient(api_url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match="no reply within"):
            await client.get("slow")


async def test_nobody_listening_is_unavailable(unused_port: int) -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port}") as client:
        with pytest.raises(Unavailable):
            await client.health()


async def test_a_reply_that_is_no_json_is_an_internal_error(client: AsyncClient, daemon: Daemon) -> None:
    async def text(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    daemon.health = text  # type: ignore[method-assign]
    async with serve(daemon) as url, AsyncClient(url) as other:
        with pytest.raises(Internal, match="no JSON"):
            await other.health()


async def test_a_reply_without_an_end_is_given_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=200 if request.method == "GET" else 503)
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(bytes(2**16))
        return response

    monkeypatch.setattr(http_replies, "MAX_REPLY_BYTES", 2**20)
    daemon.health = daemon.download = endless  # type: ignore[method-assign]
    async with serve(daemon) as url, AsyncClient(url, timeout_s=20) as client:
        with pytest.raises(Internal, match="/health: the reply has more than 1048576 bytes"):
            await client.health()
        with pytest.raises(Internal, match="/health: the reply has more than 1048576 bytes"):
            await asyncio.to_thread(RestClient(url, timeout_s=20).health)
        with pytest.raises(Internal, match="/download: the reply has more than 1048576 bytes"):
            async for _ in client.download_model("org/any"):
                pass


async def test_rest_over_mtls(daemon: Daemon, certificates: Certificates) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    context.verify_mode = ssl.CERT_REQUIRED
    proof = Tls(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key, server_name="localhost")
    async with serve(daemon, context) as url:
        async with AsyncClient(url, tls=proof) as client:
            assert (await client.health()).status == "healthy"
        async with AsyncClient(url, tls=Tls(ca=certificates.ca, server_name="localhost")) as client:
            with pytest.raises(Unavailable):
                await client.health()
        async with AsyncClient(url) as client:
            with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
                await client.health()


async def test_rest_over_a_unix_socket(daemon: Daemon, certificates: Certificates, tmp_path: Path) -> None:
    path = tmp_path / "api #1.sock"
    async with serve(daemon, path=path) as url, AsyncClient(url) as client:
        assert (await client.health()).status == "healthy"
    async with AsyncClient(f"unix:{path}") as client:
        with pytest.raises(Unreachable, match="Connection refused") as caught:
            await client.health()
        assert caught.value.address == f"unix:{path}"

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    async with serve(daemon, context, path) as url:
        async with AsyncClient(url, tls=Tls(ca=certificates.ca)) as client:
            assert (await client.health()).status == "healthy"
        for tls in (Tls(), Tls(ca=certificates.ca, server_name="elsewhere")):
            async with AsyncClient(url, tls=tls) as client:
                with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
                    await client.health()


async def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.pem: No such file"):
        async with AsyncClient("https://localhost:1", tls=Tls(ca="nowhere.pem")):
            pass
