"""Whether a process has worked since a moment: processor time that its threads had or waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

LOADED_PART = 0.25
"""The part of a time in which a process without an answer ran or waited for a processor, from which it is at work."""


class Process(Protocol):
    """A worker or mux, on this host or another."""

    def activity_s(self) -> Awaitable[float | None]:
        """Like `WorkerHandle.activity_s`."""


class WorkMeter:
    """Within its block `has_worked` tells whether `process` worked since the last call, at first since the beginning.

    A reading of a process of another host takes a message there and back, which nothing waits for but `has_worked`.
    """

    def __init__(self, process: Process | None) -> None:
        self._process = process
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._last = asyncio.ensure_future(self._reading())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last.cancel()
        await asyncio.wait({self._last})

    async def has_worked(self) -> bool:
        """False also where one of the two readings is not to be had."""
        before_at, before_s = await self._last
        self._last = asyncio.ensure_future(self._reading())
        now_at, now_s = await self._last
        if before_s is None or now_s is None:
            return False
        return now_s - before_s >= (now_at - before_at) * LOADED_PART

    async def _reading(self) -> tuple[float, float | None]:
        at = self._clock()
        return at, None if self._process is None else await self._process.activity_s()
