from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from teimgr.http import bodies

_MANY = 400


async def test_bodies_that_expire_together_are_answered_a_few_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.01)
    loop, turn, answered = asyncio.get_running_loop(), 0, Counter[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if answered.total() < _MANY:
            loop.call_soon(count_turns)

    async def nothing_comes() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def read() -> None:
        with pytest.raises(bodies.SlowClient):
            await bodies.read_limited(nothing_comes(), 100)
        answered[turn] += 1

    count_turns()
    await asyncio.gather(*(read() for _ in range(_MANY)))
    assert answered.total() == _MANY
    assert max(answered.values()) <= 16  # a turn's eight beside eight that had waited
