"""Work in the background of a block: a task that ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def in_background(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> AsyncIterator[None]:
    """Run `work` as a task while the block runs; at the end cancel it, and wait until it has ended."""
    task = asyncio.create_task(work(), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
