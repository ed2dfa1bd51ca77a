"""Lets calls wait, within limits, for the successor of an instance's only worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from teimgr.errors import DeadlineExceeded, Returning, Unavailable
from teimgr.wire.routing.on_demand import ModelLoads, WaitingCalls
from teimgr.wire.routing.router import Router

_LOOK_S = 0.25  # poll: a worker whose connection broke returns without a route change


class ReturningWorkers:
    """Lets calls of `router` wait for at most `limit_s` (0: not at all); `others` loads models on demand.

    `processes` share the limits on the number and the bytes of calls that wait.
    """

    def __init__(self, router: Router, others: ModelLoads, limit_s: float, processes: int = 1) -> None:
        self._router = router
        self._others = others
        self._limit_s = limit_s
        self._waiting = WaitingCalls("workers that are started again", processes)

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        """Context that is entered once a worker is back, or is no longer expected to come back.

        Raises:
            Unavailable: it was not back within the limit.
            DeadlineExceeded: `timeout_s` has passed.
            Overloaded: too many calls wait.
            TeimgrError: the load of an instance on demand is refused.
        """
        entry, clock = self._router.find(instance), asyncio.get_running_loop().time
        began = clock()
        async with AsyncExitStack() as stack:
            if entry is None or entry.on_demand:
                await stack.enter_async_context(self._others.loaded(instance, timeout_s, size_bytes))
            if isinstance(self._router.problem(instance), Returning):  # also a worker of a model loaded on demand
                with self._waiting.one(instance, size_bytes):
                    await self._back(instance, None if timeout_s is None else timeout_s - (clock() - began))
            yield

    async def _back(self, instance: str, timeout_s: float | None) -> None:
        clock = asyncio.get_running_loop().time
        has_deadline = timeout_s is not None and timeout_s <= self._limit_s
        ends = clock() + (timeout_s if timeout_s is not None and has_deadline else self._limit_s)
        while isinstance(error := self._router.problem(instance), Returning):
            if (left_s := ends - clock()) <= 0:
                raise DeadlineExceeded if has_deadline else Unavailable(error.message)
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._router.changed(instance)
            except TimeoutError:
                continue
