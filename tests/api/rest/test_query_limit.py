from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from teimgr.api.rest.query_limit import MAX_PARAMETERS, LimitQuery


async def _served(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _answer(query: bytes) -> tuple[int, bytes]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": query}
    await LimitQuery(_served)(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("parameter", [b"a", b"", b"%41=%42"])
async def test_a_query_of_too_many_parameters_is_refused_before_it_is_parsed(parameter: bytes) -> None:
    assert await _answer(b"&".join([parameter] * MAX_PARAMETERS)) == (200, b"")
    status, body = await _answer(b"&".join([parameter] * (MAX_PARAMETERS + 1)))
    assert status == 400
    assert b"Validation error: Invalid URL: its query has more than 1000 parameters" in body
