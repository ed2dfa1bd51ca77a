"""Begins a few requests in each turn of the event loop, those of all callers by turns.

A request through ASGI costs the loop a millisecond or more, and one connection of HTTP/2 may open a thousand at once:
begun together they would hold the loop for seconds, and other callers would wait for all of them. So would those whose
bodies come together, long after their heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import Overloaded
from teimgr.http.bodies import Refuse
from teimgr.http.connection_gate import sender_of
from teimgr.http.turns import TURNS_OF, Turns

_PER_TURN = 2
# Requests of a caller that wait: each holds some kilobytes.
_MAX_WAITING = 512


class RequestTurns:
    """Middleware that has a request wait if `_PER_TURN` have begun in this turn of the loop.

    Those that wait begin in the turns that follow, one of each caller after the other; so do those whose body has come
    to its end. `whose` names the caller: without it, the network of its address. Where too many of one wait, `refuse`
    makes the answer to a further one.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse, whose: Callable[[Scope], Hashable] | None = None) -> None:
        self._app = app
        self._refuse = refuse
        self._whose = whose or sender_of
        self._turns = Turns(_PER_TURN, _MAX_WAITING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        caller = self._whose(scope)
        TURNS_OF.set(caller)
        try:
            await self._turns.begin(caller)
        except Overloaded as error:
            app = self._refuse(scope, error)

        async def receive_in_turn() -> Message:
            message = await receive()
            if message.get("body") and not message.get("more_body"):
                await self._turns.go_on(caller)
            return message

        await app(scope, receive_in_turn, send)
