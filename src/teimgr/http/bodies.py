"""Limits of HTTP bodies and replies, checks of hosts and web origins, and the turns in which requests begin.

Unread reply bytes, over HTTP/1 and HTTP/2, count against the limits of the connection, its address and the port.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import Overloaded
from teimgr.http.byte_budget import ByteBudget, Charge, UnreadReplies
from teimgr.http.connection_gate import LIMITS, Phase, network_of, sender_of
from teimgr.http.direct import PART_BYTES, DirectRequest
from teimgr.http.turns import TURNS_OF, Turns

# Waits of a body for its budget: at its start, and for more if it has no length. The second is shorter, since others
# may wait for the bytes it holds.
_BUDGET_WAIT_S = 30.0
_GROWTH_WAIT_S = 5.0
# After this many bytes of a body, the rest of its announced length is reserved.
_UNRESERVED_BYTES = 64 * 1024
_LENGTH_DIGITS = 19
_EXPIRED = Turns(8)  # bodies that began together also expire together
BODY_TIMEOUT_S = LIMITS[Phase.BODY].seconds
_MAX_DISCARDED_BYTES = LIMITS[Phase.DISCARD].bytes or 0

# Requests that repeat one of these are refused, since a proxy could read a different value.
SINGLE_HEADERS = frozenset((b"host", b"content-length", b"authorization", b"x-api-key"))
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)(?:%[\w.~-]+)?\]|[\w.~%!$&'()*+,;=-]*)(?::([0-9]{0,5}))?")

PATH_PREFIX = "teimgr.path_prefix"
"""Key of a scope: the path prefix stripped by a proxy; empty or absent without one."""


_SHOWN_ENCODING_CHARS = 256


def compression_fault(content_encoding: str) -> str | None:
    """Return why a body with this Content-Encoding cannot be read; None if it is not compressed."""
    encoding = content_encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    return f"The body is compressed (Content-Encoding: {encoding[:_SHOWN_ENCODING_CHARS]}); send it uncompressed"


@lru_cache(256)
def is_host(value: bytes) -> bool:
    """True if the value of a Host header (HTTP/2: `:authority`) is a host with or without a port (RFC 9110, 7.2)."""
    if (found := _HOST.fullmatch(value)) is None:
        return False
    address, port = found.groups()
    if address is not None:
        try:
            socket.inet_pton(socket.AF_INET6, address.decode())
        except OSError:
            return False
    return not port or int(port) < 2**16


def media_type(content_type: str) -> str:
    """Return the type in a Content-Type header, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    """True if a Content-Type header names JSON, or a form of it such as application/problem+json."""
    if content_type == "application/json":  # fast path
        return True
    kind = media_type(content_type)
    return kind == "application/json" or re.fullmatch(r"application/[^/+]+\+json", kind) is not None


def foreign_page(
    headers: Mapping[str, str], allowed: Collection[str], host_names: Collection[str] = (), *, reads: bool = False
) -> str | None:
    """Return the web page that sent a request; None if its origin is one of `allowed` or this server's own.

    Browsers send `Origin` with every request but reads; other clients do not send it and pass. A page is this server's
    own if its origin is the request's Host, and the Host is an address, localhost or one of `host_names`: any other
    name may be the page's own domain, which its DNS has pointed here (DNS rebinding).

    With `reads` the request changes nothing. Browsers send no `Origin` with reads of the same origin, so the Host of
    every request that a browser may have sent is checked. Links on other sites may lead here: no page sees the reply.
    """
    if "*" in allowed:
        return None
    host = headers.get("host", "").lower()
    if (origin := headers.get("origin")) is not None:
        origin = origin.lower()
        is_own = origin.partition("://")[2] == host and _is_own(host, host_names)
        return None if is_own or origin in map(str.lower, allowed) else origin
    is_link = reads and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_link:
        return "of another site"
    if reads and _is_of_browser(headers) and not _is_own(host, host_names):
        return f"under the host name {host!r}, which is not in allowed_hosts"
    return None


def _is_of_browser(headers: Mapping[str, str]) -> bool:
    """True if a browser may have sent a request. Scripts can replace values, but cannot remove any of these headers.

    Node's fetch sends `Sec-Fetch-Mode` without the other headers. No browser does that, and no script in one can.
    """
    if "sec-fetch-mode" in headers and "sec-fetch-site" not in headers:
        return False
    known = ("accept-language", "sec-fetch-site", "referer", "cookie")
    shown = headers.get("user-agent", "").startswith("Mozilla/") or "text/html" in headers.get("accept", "")
    return shown or any(name in headers for name in known)


def _is_own(host: str, names: Collection[str]) -> bool:
    """True if a Host header is an address, localhost or one of `names`, which DNS rebinding cannot produce."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in map(str.lower, names)
    return True


def path_prefix_of(scope: Mapping[str, Any]) -> str:
    """Return the path prefix under which the client reaches this server, such as `/teimgr`; empty for none."""
    return str(scope.get(PATH_PREFIX, ""))


class SlowClient(Exception):
    """The client did not send the body in time."""


async def charge_body(charge: Charge, size: int) -> None:
    """Charge a body of known size; raises Overloaded if the budget stays exhausted."""
    await charge.take(size, _BUDGET_WAIT_S)


async def read_body(request: DirectRequest, limit_bytes: int, charge: Charge, start: bytes = b"") -> bytearray | None:
    """Read the whole body, and return `start` followed by it, charged as it arrives; None if it exceeds `limit_bytes`.

    An announced length reserves nothing until the first 64 KiB of the body have arrived. Then the rest is reserved, so
    that bodies do not wait for each other half read; while it arrives slowly, others may use the reservation.

    Raises:
        Overloaded: the budget stayed exhausted.
        SlowClient: the body did not arrive within `BODY_TIMEOUT_S`.
    """
    length = request.headers.get(b"content-length", b"")
    announced = min(int(length), limit_bytes) if length.isdigit() and len(length) < _LENGTH_DIGITS else 0
    buffer = bytearray(start)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return buffer if await _read_into(buffer, _chunks(request), limit_bytes, charge, announced) else None
    except TimeoutError:
        await _EXPIRED.begin(None)
        raise SlowClient from None


async def read_whole(request: DirectRequest, limit_bytes: int, charge: Charge) -> bytes | bytearray | None:
    """Like `read_body`; a body that has arrived is charged at once."""
    size = request.body.whole_bytes
    if size is None or size > limit_bytes:
        return await read_body(request, limit_bytes, charge)
    if not charge.try_take(size):
        await charge_body(charge, size)
    return request.body.take()


async def _chunks(request: DirectRequest) -> AsyncIterator[bytes | bytearray]:
    while chunk := await request.body.read_some():
        yield chunk


async def read_limited(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """Read a request's whole body; None if it exceeds `limit_bytes`.

    Raises:
        SlowClient: the body did not arrive within `BODY_TIMEOUT_S`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return bytes(body) if await _read_into(body, chunks, limit_bytes) else None
    except TimeoutError:
        await _EXPIRED.begin(None)
        raise SlowClient from None


async def _read_into(
    buffer: bytearray,
    chunks: AsyncIterator[bytes | bytearray],
    limit_bytes: int,
    charge: Charge | None = None,
    announced: int = 0,
) -> bool:
    """Append the whole body, of `announced` bytes or 0; False, and an empty buffer, if it exceeds `limit_bytes`.

    Up to a limit, the rest of a body that is too large is read and discarded: a client that is cut off while it still
    sends never reads the response with the reason.
    """
    room, discarded = limit_bytes, 0
    async for chunk in chunks:
        came, room = limit_bytes - room, room - len(chunk)
        if room >= 0:
            if charge is not None:
                if came >= _UNRESERVED_BYTES and charge.reserved_bytes < len(chunk) <= announced - came:
                    await charge.reserve(announced - came, _BUDGET_WAIT_S)
                await charge.arrived(len(chunk), _BUDGET_WAIT_S if announced or not came else _GROWTH_WAIT_S)
            buffer += chunk
            continue
        buffer.clear()
        discarded += len(chunk)
        if discarded > _MAX_DISCARDED_BYTES:
            break
    return room >= 0


UNREAD = "teimgr.unread_replies"
"""The key of a scope with the `UnreadReplies` of its connection."""

UNREAD_BYTES = 64 * 2**20
# One address may have half of the port's limit, one connection half of its address's.
_SHARE = 2
# Smaller replies, such as those of health checks, are never refused; all streams of a process hold at most 32 MiB.
_SMALL_BYTES = 4096
_WAIT_S = 10.0
_READS = ("GET", "HEAD", "OPTIONS")

Refuse = Callable[[Scope, Overloaded], ASGIApp]
"""Makes the reply to a refused request."""


class UnreadOfPort(ByteBudget):
    """The unread replies of one port."""

    def __init__(self) -> None:
        super().__init__(UNREAD_BYTES)
        self._of_address: WeakValueDictionary[str, ByteBudget] = WeakValueDictionary()  # kept alive by connections

    def of_connection(self, client: str) -> UnreadReplies:
        """Return the share of a new connection of the client at this address, empty for a Unix socket."""
        network = network_of(client)
        own = self._of_address.get(network)
        if own is None:
            own = self._of_address[network] = ByteBudget(self.limit_bytes // _SHARE, self)
        return UnreadReplies(own, _SHARE)


def has_room(scope: Scope) -> bool:
    """True if the reply to a request fits the limit of its connection."""
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
    """Ends the application of a request refused at the start of its reply; no error handler catches it."""


class BoundedReplies:
    """Middleware that charges replies to the scope's `UnreadReplies` and delays those that exceed the limit.

    A request waits until its connection has room and is refused if that takes too long. A read is also refused if its
    reply would exceed the limits. Replies to writes are never refused.
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
                    refused = Overloaded("Too many unread reply bytes; read them and try again later")
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
        except Overloaded as error:  # from `room_for_reply`; the application handles its own errors
            refused = error
        except _Refused:
            pass
        finally:
            charge.release()
        if refused is not None:
            await self._refuse(scope, refused)(scope, receive, send)


def _length(message: Message) -> int | None:
    """Return the length of a reply that begins; None if it is not known yet."""
    found = next((value for name, value in message.get("headers", ()) if name.lower() == b"content-length"), None)
    return None if found is None else int(found)


_REQUESTS_PER_TURN = 2
_MAX_WAITING = 512  # requests of a caller, a few kilobytes each


class RequestTurns:
    """Middleware that starts at most `_REQUESTS_PER_TURN` requests per turn of the loop, callers alternating.

    The same applies to requests whose body has arrived. `whose` returns the caller, by default the network of the
    client's address. If too many requests of one caller wait, `refuse` answers further ones.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse, whose: Callable[[Scope], Hashable] | None = None) -> None:
        self._app = app
        self._refuse = refuse
        self._whose = whose or sender_of
        self._turns = Turns(_REQUESTS_PER_TURN, _MAX_WAITING)

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
