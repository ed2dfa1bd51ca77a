"""Begins a few requests in each turn of the event loop, those of all callers by turns.

A request of REST costs the loop some milliseconds, and one connection of HTTP/2 may open a thousand at once: begun
together they would hold the loop for seconds, and anyone who asks then would wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from starlette.types import ASGIApp, Receive, Scope, Send

_PER_TURN = 4
_KEY_HEADERS = (b"authorization", b"x-api-key", b"cookie")


class RequestTurns:
    """Middleware that has a request wait where `_PER_TURN` have begun in this turn of the loop.

    Those that wait begin in the turns that follow, one of each caller after the other: of each key, or without one of
    each address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = _PER_TURN
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # by caller, the next one first
        self._is_scheduled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._left and not self._waiting:
                self._left -= 1
                self._schedule()
            else:
                await self._turn(_caller(scope))
        await self._app(scope, receive, send)

    async def _turn(self, caller: Hashable) -> None:
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(begins)
        self._schedule()
        await begins

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled, self._left = False, _PER_TURN
        while self._left and self._waiting:
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            begins = own.popleft()
            if own:
                self._waiting[caller] = own  # behind the others
            if not begins.done():  # else its client has gone
                begins.set_result(None)
                self._left -= 1
        if self._waiting:
            self._schedule()


def _caller(scope: Scope) -> Hashable:
    """The caller, whose key is not checked yet: by the credentials in the headers, else by the client's address."""
    given: bytes | None = next((value for name, value in scope["headers"] if name in _KEY_HEADERS), None)
    client: tuple[str, int] | None = scope.get("client")
    return given or (client[0] if client else None)
