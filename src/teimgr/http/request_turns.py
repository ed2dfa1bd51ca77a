"""Begins a few requests in each turn of the event loop, those of all callers by turns.

A request through ASGI costs the loop a millisecond or more, and one connection of HTTP/2 may open a thousand at once:
begun together they would hold the loop for seconds, and other callers would wait for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable

from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr.errors import Overloaded
from teimgr.http.bodies import Refuse
from teimgr.http.turns import Turns

_PER_TURN = 2
# Requests of a caller that wait: each holds some kilobytes.
_MAX_WAITING = 512
_KEY_HEADERS = (b"authorization", b"x-api-key", b"cookie")


class RequestTurns:
    """Middleware that has a request wait if `_PER_TURN` have begun in this turn of the loop.

    Those that wait begin in the turns that follow, one of each caller after the other: of each key, or without one of
    each address. Where too many of one wait, `refuse` makes the answer to a further one.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse
        self._turns = Turns(_PER_TURN, _MAX_WAITING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                await self._turns.begin(caller_of(scope))
            except Overloaded as error:
                app = self._refuse(scope, error)
        await app(scope, receive, send)


def caller_of(scope: Scope) -> Hashable:
    """The caller, whose key is not checked yet: by the credentials in the headers, else by the client's address."""
    given: bytes | None = next((value for name, value in scope["headers"] if name in _KEY_HEADERS), None)
    client: tuple[str, int] | None = scope.get("client")
    return given or (client[0] if client else None)
