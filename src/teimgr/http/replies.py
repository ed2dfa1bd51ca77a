"""The limit on replies of HTTP that clients have not read: one rule for every route, over HTTP/1 and HTTP/2.

What a reply takes is charged to its connection, which is a part of its client's address, which is a part of the port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from weakref import WeakValueDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import Overloaded
from teimgr.http.byte_budget import ByteBudget, Charge, UnreadReplies
from teimgr.http.connection_gate import network_of
from teimgr.http.direct import PART_BYTES

UNREAD = "teimgr.unread_replies"
"""The key of a scope with the `UnreadReplies` of its connection."""

UNREAD_BYTES = 64 * 2**20
# The part of one address in those of all, and of one connection in those of its address.
_SHARE = 2
# So small replies, such as those of health, are never refused: all streams that a process serves hold 32 MiB of them.
_SMALL_BYTES = 4096
_WAIT_S = 10.0
_READS = ("GET", "HEAD", "OPTIONS")

Refuse = Callable[[Scope, Overloaded], ASGIApp]
"""Makes the answer to a request that is refused."""


class UnreadOfPort(ByteBudget):
    """The replies of one port that clients have not read."""

    def __init__(self) -> None:
        super().__init__(UNREAD_BYTES)
        self._of_address: WeakValueDictionary[str, ByteBudget] = WeakValueDictionary()  # connections hold theirs

    def of_connection(self, client: str) -> UnreadReplies:
        """The part of a new connection of the client at this address, empty for a Unix socket."""
        network = network_of(client)
        own = self._of_address.get(network)
        if own is None:
            own = self._of_address[network] = ByteBudget(self.limit_bytes // _SHARE, self)
        return UnreadReplies(own, _SHARE)


def has_room(scope: Scope) -> bool:
    """Whether the connection of a request has room for its reply."""
    unread: UnreadReplies | None = scope.get(UNREAD)
    return unread is None or unread.has_room


async def room_for_reply(scope: Scope) -> None:
    """Wait until the connection of a request, one of these servers, has room for its reply.

    Raises:
        Overloaded: the client did not read earlier replies.
    """
    unread: UnreadReplies = scope[UNREAD]
    await unread.room(_WAIT_S)


class _Refused(BaseException):
    """Ends the application of a request that was refused as its reply began; no handler of errors answers it."""


class BoundedReplies:
    """Middleware that charges replies to the scope's `UnreadReplies`, and holds back those that are beyond the limit.

    A request waits, before it begins, until its connection has room, and is refused when that takes too long. A read
    is refused too where its reply would go beyond the limits; the reply to a request that changed something never is.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = cast(UnreadReplies | None, scope.get(UNREAD))
        if unread is None:
            await self._app(scope, receive, send)
            return
        refused: Overloaded | None = None
        charge, part = Charge(unread), Charge(unread)

        async def charged(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                length = _length(message)
                size = min(length or 0, PART_BYTES)
                is_small = length is not None and length <= _SMALL_BYTES
                if scope["method"] in _READS and not is_small and not unread.fits(size):
                    refused = Overloaded("Too many bytes of replies are not read; read them and try again later")
                    raise _Refused
                charge.add(size)
            part.add(max(0, len(message.get("body", b"")) - charge.bytes))
            try:
                await send(message)
            finally:
                part.release()

        try:
            await room_for_reply(scope)
            await self._app(scope, receive, charged)
        except Overloaded as error:  # of `room_for_reply`: the application answers its own
            refused = error
        except _Refused:
            pass
        finally:
            charge.release()
        if refused is not None:
            await self._refuse(scope, refused)(scope, receive, send)


def _length(message: Message) -> int | None:
    """The length of a reply that begins; None if it is not known yet."""
    found = next((value for name, value in message.get("headers", ()) if name.lower() == b"content-length"), None)
    return None if found is None else int(found)
