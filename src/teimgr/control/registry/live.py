"""A value that changes and can be watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Live(Generic[ValueT]):
    """The latest value, and every later one until `close`. A slow watcher misses values in between, never the last."""

    def __init__(self, value: ValueT) -> None:
        self.value = value
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, value: ValueT) -> None:
        """From now on it is `value`."""
        if value != self.value:
            self.value = value
            self._wake()

    def close(self) -> None:
        """It changes no more."""
        self._closed = True
        self._wake()

    async def follow(self) -> AsyncIterator[ValueT]:
        """The value now, and again whenever it changed."""
        while True:
            changed, closed = self._changed, self._closed
            yield self.value
            if closed:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
