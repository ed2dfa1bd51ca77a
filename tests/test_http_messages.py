"""Bounded and charged request bodies over a real listener."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from teimgr import http_messages
from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import Overloaded
from teimgr.http_messages import SlowClient, read_body
from teimgr.http_server import bind, serving
from tests.support.polling import eventually


def upload(budget: ByteBudget, limit: int) -> Any:
    """An application that reads a body and answers with its length, or with what went wrong."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        charge = Charge(budget)
        try:
            body = await read_body(Request(scope, receive), limit, charge)
            text = "too large" if body is None else str(len(body))
        except (SlowClient, Overloaded) as error:
            text = type(error).__name__
        finally:
            charge.release()
        await Response(text)(scope, receive, send)

    return app


UPLOAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_body_without_a_length_is_charged_as_it_comes() -> None:
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(upload(budget, 900), sock), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(UPLOAD + b"64\r\n" + b"x" * 100 + b"\r\n")
        await eventually(lambda: budget.taken_bytes == 100)
        writer.write(b"0\r\n\r\n")

        assert (await reader.read()).endswith(b"100")
        assert budget.taken_bytes == 0
        writer.close()


async def test_a_body_that_finds_no_room_is_refused_and_one_that_does_not_come_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_messages, "_BUDGET_WAIT_S", 0.1)
    monkeypatch.setattr(http_messages, "BODY_TIMEOUT_S", 0.3)
    budget = ByteBudget(1000)
    sock = bind("127.0.0.1", 0)
    async with serving(upload(budget, 900), sock), asyncio.timeout(20):
        slow, slow_writer = await asyncio.open_connection(*sock.getsockname())
        slow_writer.write(UPLOAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 800") + b"x")
        await eventually(lambda: budget.taken_bytes == 800)
        other, other_writer = await asyncio.open_connection(*sock.getsockname())
        other_writer.write(UPLOAD + b"190\r\n" + b"x" * 400 + b"\r\n0\r\n\r\n")

        assert (await other.read()).endswith(b"Overloaded")
        assert (await slow.read()).endswith(b"SlowClient")
        assert budget.taken_bytes == 0
        slow_writer.close()
        other_writer.close()
