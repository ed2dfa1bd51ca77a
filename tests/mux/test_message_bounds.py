"""Messages that arrive at the mux: only of authenticated callers, within a time, and not too many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import h2.events
import pytest
from tests.support.h2_peer import connecting, framed, head

from teimgr.auth.policy import Key, Policy, PolicyInForce, digest
from teimgr.mux import handlers
from teimgr.mux.forwarding import CallCounters
from teimgr.mux.handlers import MuxHandlers, MuxHealth, reflection_handlers
from teimgr.routing.links import LinkLimits
from teimgr.routing.router import Router

EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed"
LIMIT_S = 20


class Server:
    """The handlers of a mux on a port of this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = PolicyInForce(policy)

    async def __aenter__(self) -> int:
        self._server = grpc.aio.server()
        options: dict[str, Any] = {"request_timeout_s": 0, "window": 8, "policy": self._policy}
        mux = MuxHandlers(Router(LinkLimits()), CallCounters(()), **options)
        health = MuxHealth(self._policy).generic_handler()
        self._server.add_generic_rpc_handlers((*mux.generic_handlers(), health, *reflection_handlers()))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


async def nothing() -> AsyncIterator[bytes]:
    """A request stream that never has a message."""
    await asyncio.Event().wait()
    yield b""


async def test_a_call_without_the_key_ends_before_its_message_has_come() -> None:
    policy = Policy(keys=(Key("a", digest("teimgr_" + "x" * 20), ("inference",)),))
    async with Server(policy) as port, connecting("127.0.0.1", port) as connect, asyncio.timeout(LIMIT_S):
        peer = await connect()
        stream = peer.open(head(EMBED))
        peer.send(stream, framed(b"x" * 1000, 3_000_000))

        headers = dict((await peer.until(h2.events.ResponseReceived)).headers)

        assert headers["grpc-status"] == "16"


@pytest.mark.parametrize(
    "path", [EMBED, "/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
)
async def test_a_message_that_does_not_come_ends_its_call(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MESSAGE_S", 0.2)
    monkeypatch.setattr(handlers, "_MAX_UNRECEIVED", 0)
    monkeypatch.setattr(handlers, "_STANDARD_MESSAGE_S", 0.2)
    async with (
        Server(Policy()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        first, second = (channel.stream_unary(path)(nothing()) for _ in range(2))

        assert await first.code() is await second.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2" in await first.details()


async def test_too_many_calls_without_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_OPEN_CALLS", 2)
    monkeypatch.setattr(handlers, "_MAX_UNRECEIVED", 1)
    async with (
        Server(Policy()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        calls = [channel.stream_unary(EMBED)(nothing()) for _ in range(4)]
        ended = [asyncio.ensure_future(call.code()) for call in calls]

        [refused], waiting = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)

        assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(waiting) == 3
        for call in calls:
            call.cancel()


async def test_a_call_that_ends_without_a_message_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MAX_UNRECEIVED", 0)
    async with (
        Server(Policy()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        call = channel.stream_unary(EMBED)(iter(()))

        assert (await call.code(), await call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "Missing message")
