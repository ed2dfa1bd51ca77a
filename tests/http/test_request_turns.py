from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import TeimgrError
from teimgr.http import request_turns
from teimgr.http.request_turns import RequestTurns

_MANY = 200


class _App:
    """Notes the caller of each request, and the turn of the loop in which it began."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[str, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append((scope["client"][0], self.turn))

    def count_turns(self) -> None:
        self.turn += 1
        if len(self.begun) < _MANY:
            asyncio.get_running_loop().call_soon(self.count_turns)


class _Refusals:
    """Counts what is refused."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, scope: Scope, error: TeimgrError) -> ASGIApp:
        self.count += 1

        async def answer(scope: Scope, receive: Receive, send: Send) -> None: ...

        return answer


def _request(app: RequestTurns, address: str, key: str | None = None) -> asyncio.Task[None]:
    async def receive() -> Message:
        raise AssertionError("nothing is received")

    async def send(message: Message) -> None: ...

    headers = [(b"authorization", key.encode())] if key else []
    scope: dict[str, Any] = {"type": "http", "headers": headers, "client": (address, 1)}
    return asyncio.create_task(app(scope, receive, send))


async def test_a_few_requests_begin_in_each_turn_of_the_loop() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    inner.count_turns()
    await asyncio.gather(*(_request(app, "many") for _ in range(_MANY)))
    assert len(inner.begun) == _MANY
    assert max(Counter(turn for _, turn in inner.begun).values()) <= 8  # a turn's four beside four that had waited


async def test_who_asks_little_does_not_wait_for_who_asks_much() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    many = [_request(app, "many", f"Bearer {number}") for number in range(_MANY)]  # that nobody has checked
    await asyncio.sleep(0)  # all of them have come
    few = [_request(app, "few")]
    await asyncio.gather(*few)
    assert len(inner.begun) < 20
    await asyncio.gather(*many)
    assert len(inner.begun) == _MANY + 1


async def test_clients_that_have_gone_leave_their_turn() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    gone = [_request(app, "gone") for _ in range(_MANY)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    await _request(app, "few")
    assert ("few", 0) in inner.begun
    assert len(inner.begun) <= 5


async def test_what_a_caller_has_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_turns, "_MAX_WAITING", 10)
    inner, refusals = _App(), _Refusals()
    app = RequestTurns(inner, refusals)
    many = [_request(app, "many", f"Bearer {number}") for number in range(_MANY)]
    few = [_request(app, "few") for _ in range(10)]
    await asyncio.gather(*many, *few)
    assert refusals.count >= _MANY - 2 * 10
    assert Counter(caller for caller, _ in inner.begun)["few"] == 10
