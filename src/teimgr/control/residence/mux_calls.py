"""Calls at a mux that wait for on-demand models: each keeps its model loaded until the mux reports its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from teimgr.errors import TeimgrError
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.wire.json_messages import MessageLink
from teimgr.wire.routing.on_demand import ModelLoads


class LoadsForMux:
    """The calls of one control link. `confirmed` returns when the mux has the current routes; `close` ends all."""

    def __init__(self, link: MessageLink, loads: ModelLoads, confirmed: Callable[[], Awaitable[None]]) -> None:
        self._link = link
        self._loads = loads
        self._confirmed = confirmed
        self._over: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: dict[str, Any]) -> None:
        """Take `load` or `left` of `mux/control.py`."""
        if "left" in message and (over := self._over.get(message["left"])) is not None:
            over.set()
        if "load" in message:
            call, instance, timeout_s, *_ = message["load"]
            over = self._over[call] = asyncio.Event()
            context = RequestContext("")
            context.belongs_to(int(message.get("tenant", 0)))
            with use_context(context):
                holding = self._hold(call, instance, timeout_s, over)
                task = asyncio.create_task(holding, name=f"load of {instance} for a mux")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _hold(self, call: int, instance: str, timeout_s: float | None, over: asyncio.Event) -> None:
        """Hold the model for a call until it is over; one that is over before is not waited for."""
        serving = asyncio.create_task(self._serve(call, instance, timeout_s, over))
        ending = asyncio.create_task(over.wait())
        try:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            ending.cancel()
            self._over.pop(call, None)
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, call: int, instance: str, timeout_s: float | None, over: asyncio.Event) -> None:
        try:
            async with self._loads.loaded(instance, timeout_s):
                await self._confirmed()
                self._link.send(ready=json.dumps(call))
                await over.wait()
        except TeimgrError as error:
            refused = [call, int(error.code), error.message, error.retry_after_s]
            self._link.send(refused=json.dumps(refused))
