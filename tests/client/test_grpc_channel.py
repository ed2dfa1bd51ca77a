"""Connections of the client to a multiplexer: ports and Unix sockets, with mutual TLS and without."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.small_servers import INSTANCE, Certificates, vector_of

from teimgr.client import AsyncClient, Tls, grpc_channel
from teimgr.client.grpc_channel import GrpcChannel, error_from_status
from teimgr.client.server_address import ServerAddress
from teimgr.errors import Code, DeadlineExceeded, Unavailable, Unreachable


@pytest.mark.parametrize("place", [0, 1], ids=["port", "Unix socket"])
async def test_a_server_is_verified_and_asks_for_a_certificate(
    mtls_urls: tuple[str, str], certificates: Certificates, place: int
) -> None:
    url = mtls_urls[place]
    proof = Tls(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key)
    async with AsyncClient(grpc=url, tls=proof) as client:
        np.testing.assert_array_equal(await client.embed("a", instance=INSTANCE), [vector_of("a")])
    elsewhere = Tls(proof.ca, proof.cert, proof.key, server_name="elsewhere")
    for tls in (Tls(ca=certificates.ca), elsewhere, Tls()):
        async with AsyncClient(grpc=url, tls=tls) as client:
            with pytest.raises(Unavailable):
                await client.embed("a", instance=INSTANCE)


def test_a_refusal_has_the_time_to_wait_of_its_trailer() -> None:
    for wait, seconds in (("2500", 2.5), ("-1", None), ("", None), ("9" * 5000, math.inf)):
        trailers = (("x-teimgr-code", "TOKEN_RATE_EXCEEDED"), ("grpc-retry-pushback-ms", wait))
        error = error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the key's rate", trailers)
        assert (error.code, error.retry_after_s) == (Code.TOKEN_RATE_EXCEEDED, seconds)


async def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    address = ServerAddress.parse(f"unix:{tmp_path}/grpc.sock")
    channel = GrpcChannel(address, Tls(), 1 << 20)
    await channel.open()
    with pytest.raises(Unreachable, match="No such file") as caught:
        await channel.connect(10)
    assert caught.value.address == address.url
    await channel.close()


@pytest.fixture
def silent_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of `http_proxy`, a server that takes connections and never says anything."""
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://user:secret@127.0.0.1:{server.getsockname()[1]}"
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", url)
    yield url
    server.close()


async def test_loopback_is_reached_without_the_proxy(mux_url: str, silent_proxy: str) -> None:
    async with AsyncClient(grpc=mux_url, timeout_s=10) as client:
        await client.connect(10)
        np.testing.assert_array_equal(await client.embed("a", instance=INSTANCE), [vector_of("a")])


async def test_a_proxy_is_named_in_the_error(silent_proxy: str) -> None:
    named = re.escape(f"through the proxy {silent_proxy.replace('user:secret@', '')} of the variable http_proxy")
    async with AsyncClient(grpc="http://192.0.2.1:9001", timeout_s=1) as client:
        with pytest.raises(Unreachable, match=named):
            await client.connect(1)
        with pytest.raises(DeadlineExceeded, match=named):
            await client.embed("a", instance=INSTANCE)
        with pytest.raises(DeadlineExceeded, match=named):
            await anext(client.embed_stream(["a"], instance=INSTANCE))


class Held(grpc.GenericRpcHandler):
    """Answers calls once `may_answer` is set, and counts those that wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self.changed = asyncio.Condition()
        self.may_answer = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, _: Any) -> bytes:
        async with self.changed:
            self.waiting += 1
            self.changed.notify_all()
        await self.may_answer.wait()
        return request


@pytest.fixture
async def held() -> AsyncIterator[tuple[Held, str]]:
    server, handler = grpc.aio.server(), Held()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield handler, f"http://127.0.0.1:{port}"
    handler.may_answer.set()
    await server.stop(None)


async def test_so_many_calls_are_sent_and_the_others_wait_within_their_time(
    held: tuple[Held, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_channel, "MAX_CALLS", 2)
    handler, url = held
    channel = GrpcChannel(ServerAddress.parse(url), Tls(), 1 << 20)
    await channel.open()
    first = [asyncio.ensure_future(channel.unary("Any", bytes([i]), 60.0)) for i in range(2)]
    async with handler.changed:
        await handler.changed.wait_for(lambda: handler.waiting == 2)
    with pytest.raises(DeadlineExceeded, match="before its turn"):
        await channel.unary("Any", b"late", 0.05)
    others = [asyncio.ensure_future(channel.unary("Any", bytes([i]), 60.0)) for i in range(2, 6)]
    handler.may_answer.set()

    assert await asyncio.gather(*first, *others) == [bytes([i]) for i in range(6)]
    assert handler.waiting == 6
    await channel.close()
