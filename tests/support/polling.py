"""Waiting for a condition in another process or thread that announces nothing."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

LIMIT_S = 60.0


def until(holds: Callable[[], ResultT], what: str = "the condition", limit_s: float = LIMIT_S) -> ResultT:
    """Call `holds` until it returns something true, which is the result.

    Raises:
        AssertionError: `limit_s` passed.
    """
    end = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < end, f"{what} did not hold within {limit_s:g} s"
        time.sleep(0.005)
    return found


async def eventually(holds: Callable[[], object | Awaitable[object]], limit_s: float = LIMIT_S) -> None:
    """As `until`, without blocking the event loop; `holds` may be a coroutine function.

    Raises:
        TimeoutError: `limit_s` passed.
    """
    async with asyncio.timeout(limit_s):
        while True:
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.002)
