"""What only a garbage collection frees."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

_SERVERS = ("teimgr.", "uvicorn.", "uvloop.", "httptools.", "starlette.")


async def left_in_cycles(act: Callable[[], Awaitable[None]], is_over: Callable[[], Awaitable[None]]) -> Counter[str]:
    """Objects of servers that reference cycles keep after `act` has run and `is_over` has returned, by class."""
    await _whole(act, is_over)  # what is made once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await _whole(act, is_over)
        gc.collect()
        return _classes(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _whole(act: Callable[[], Awaitable[None]], is_over: Callable[[], Awaitable[None]]) -> None:
    await act()
    await is_over()
    for _ in range(5):  # the turns of the loop in which cancelled tasks and callbacks of closed connections end
        await asyncio.sleep(0)


def _classes(objects: Iterable[object]) -> Counter[str]:
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    return Counter(name for name in names if name.startswith(_SERVERS))
