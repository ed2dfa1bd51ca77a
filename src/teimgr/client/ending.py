"""How a call ended, as the server said it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import grpc

T = TypeVar("T")

# What grpc.aio puts in place of the server's status when a write comes too late (grpc issue 36066).
_MADE_UP = "Internal error from Core"
_LATE_S = 1.0
_LOOK_S = 0.002


class Status(NamedTuple):
    """The three things a status is made of."""

    code: grpc.StatusCode
    details: str | None
    trailing: Any


class Ending:
    """The status of one streaming call.

    The made-up status may come after the true one, which is therefore noted at once, or before it, and is then
    replaced a moment later without notice.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._status: Status | None = None
        call.add_done_callback(self._note)

    async def status(self) -> Status:
        """The status of a call that is over."""
        if self._status is None:
            self._status = Status(await self._call.code(), await self._call.details(), None)
        end = time.monotonic() + _LATE_S
        while self._status.details == _MADE_UP and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            self._note(self._call)
        return self._status

    def _note(self, call: Any) -> None:
        details = _at_once(call.details())
        self._status = Status(_at_once(call.code()), details, _at_once(call.trailing_metadata()))


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    raise RuntimeError("the call is not over")
