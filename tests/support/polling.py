"""Waiting for a condition in another process or thread that announces nothing; tests on the loop of our processes.

A condition that takes long to ask, as one that starts a process, is asked less often: at most a fifth of the time goes
into asking.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

ResultT = TypeVar("ResultT")

LIMIT_S = 60.0
_PAUSES = 4.0  # a pause is so many times as long as the condition took
_MAX_PAUSE_S = 0.25


def until(holds: Callable[[], ResultT], what: str = "the condition", limit_s: float = LIMIT_S) -> ResultT:
    """Call `holds` until it returns something true, which is the result.

    Raises:
        AssertionError: `limit_s` passed.
    """
    asked = time.monotonic()
    end = asked + limit_s
    while not (found := holds()):
        assert time.monotonic() < end, f"{what} did not hold within {limit_s:g} s"
        time.sleep(_pause_s(asked, 0.005))
        asked = time.monotonic()
    return found


async def eventually(holds: Callable[[], object | Awaitable[object]], limit_s: float = LIMIT_S) -> None:
    """As `until`, without blocking the event loop; `holds` may be a coroutine function.

    Raises:
        TimeoutError: `limit_s` passed.
    """
    async with asyncio.timeout(limit_s):
        while True:
            asked = time.monotonic()
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(_pause_s(asked, 0.002))


def _pause_s(asked: float, least_s: float) -> float:
    """How long to wait before the condition is asked again, which was asked at `asked` and has just been answered."""
    return min(max(least_s, _PAUSES * (time.monotonic() - asked)), _MAX_PAUSE_S)


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop of our processes, whose transports differ from asyncio's."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        uvloop.run(test(*arguments, **named))

    return run
