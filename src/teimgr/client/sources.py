"""Any iterable as an asynchronous one, without letting a slow source hold up the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# One hop to a thread fetches this many items, or what the source gives in this time.
_ITEMS = 256
_PATIENCE_S = 0.002


async def items(source: Iterable[T] | AsyncIterable[T], at_once: int = _ITEMS) -> AsyncIterator[T]:
    """The items of `source` in order; a plain iterable is advanced on a thread, so it may block.

    At most `at_once` items are read ahead: 1 for those that are large.
    """
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
        return
    iterator = iter(source)
    failure: Exception | None = None
    while failure is None:
        taken, failure = await asyncio.to_thread(_take, iterator, at_once)
        for item in taken:
            yield item
        if not taken:
            break
    if failure is not None:
        raise failure


def _take(iterator: Iterator[T], at_once: int) -> tuple[list[T], Exception | None]:
    """Some items, none at the end, and what the source raised after them."""
    taken: list[T] = []
    late = time.monotonic() + _PATIENCE_S
    try:
        for item in iterator:
            taken.append(item)
            if len(taken) == at_once or time.monotonic() > late:
                break
    except Exception as failure:
        return taken, failure
    return taken, None
