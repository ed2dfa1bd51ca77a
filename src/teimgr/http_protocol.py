"""HTTP connections of our servers: the protocol and its bounds; request bodies and responses; foreign web pages."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httptools
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import Cancelled
from teimgr.http_direct import HOLD_S, MAX_BODY_BYTES, PART_BYTES, Direct, DirectExchange, DirectRequest
from teimgr.observability.memory import max_connections

# A kept connection without requests is closed after this time. Longer than clients keep theirs (aiohttp 15 s, Java
# 30 s, AWS's load balancer 60 s, Go 90 s): a server that closes first may do so in the moment in which the client sends
# a request, and few clients repeat a POST.
KEEP_ALIVE_S = 120.0
_FLUSH_POLL_S = 0.01

# The beginning of HTTP/2's connection preface (prior knowledge), as far as no HTTP/1 request can have it.
_H2_PREFACE = b"PRI * HTTP/2.0"
_FIRST_BYTES_S = 20.0
# From the connection, or the first byte of a further request, to the end of its head. No client needs a second.
HEAD_LIMIT_S = 20.0
_MAX_HEAD_BYTES = 256 * 2**10
# A client that reads less than this in this time, while its connection's write buffer is full, is cut off.
STALL_S = 30.0
LEAST_READ_BYTES = 16 * 1024
_UNREAD_REPLIES_BYTES = 64 * 2**20
_FRAMING = (b"content-length", b"transfer-encoding")

# Limits on the wait of a body for its budget, of one without a length for the rest of it (others may wait for what it
# holds), and on the time in which its client sends it.
_BUDGET_WAIT_S = 30.0
_GROWTH_WAIT_S = 5.0
BODY_TIMEOUT_S = 120.0
_MAX_DISCARDED_BYTES = 64 * 2**20

AnswerT = TypeVar("AnswerT")


class H2Connection(Protocol):
    """The methods of an HTTP/2 connection that the server calls, beside asyncio's."""

    def leave(self) -> None:
        """Send GOAWAY, so that the client opens another connection for its next call."""

    def shutdown(self) -> None:
        """Close, as the server ends."""


# Gets a connection between two requests, which another process is to serve.
PassOn = Callable[[socket.socket], None]
# Makes the protocol of a new connection.
H2Factory = Callable[["ServerConnections"], asyncio.Protocol]


class StallGuard:
    """Aborts a connection whose client does not read: `paused` and `resumed` follow the transport's write buffer.

    While the buffer is full, nothing more is written to it, so that it shrinks as fast as the client reads.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def paused(self) -> None:
        self.resumed()
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(STALL_S, self._check)

    def resumed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._left - self._transport.get_write_buffer_size() < LEAST_READ_BYTES:
            self._transport.abort()
        else:
            self.paused()


class ListenerState(ServerState):
    """Uvicorn's lists of connections and tasks, and for connections that are made during its end, how far that is.

    Attributes:
        is_leaving: Whether clients are to make their calls on connections to other processes.
        has_ended: Whether connections are refused.
    """

    is_leaving = False
    has_ended = False


class ServerConnections(ListenerState):
    """The state of an HTTP server, and what protocols need of it.

    Attributes:
        config: With the application.
        pass_on: Where a server that leaves passes connections on to.
        direct: What answers requests without ASGI.
        unread_replies: The bytes of such answers that clients have not read. Beyond the limit ASGI serves all requests,
            within its budgets.
    """

    pass_on: PassOn | None = None
    direct: Direct | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.unread_replies = ByteBudget(_UNREAD_REPLIES_BYTES)


def _detach(transport: asyncio.Transport) -> socket.socket:
    """The connection as a socket; the transport is closed, the connection is not."""
    transport.pause_reading()
    connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    transport.abort()
    return connection


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 that ignores every offer of an upgrade; Java's client offers h2c with each request.

    httptools ends a request with such an offer behind its head: the bytes of its body would be parsed as the next
    request, which behind a proxy is request smuggling. So a new parser continues there, after a head with the same
    framing. Only parsers look at the bytes, so no body is searched or edited.

    Connections beyond `max_connections` are aborted; one whose request head is late or endless is closed.
    """

    silence_s: float | None = None  # limit on the wait for the first byte, where it is not that of new connections
    server_state: ServerConnections
    _held: list[bytes] | None = None  # the body so far of a request that may be answered without ASGI
    _hold_timer: asyncio.TimerHandle | None = None
    _exchange: DirectExchange | None = None
    _is_resuming = False
    _is_in_message = False
    _is_in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall_guard = StallGuard(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._await_head(self.silence_s or HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stall_guard.resumed()
        self._end_hold()
        if self._exchange is not None:
            self._exchange.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called by uvicorn as the server ends."""
        if self._held is not None:
            self._to_asgi()
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_guard.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_guard.resumed()

    def data_received(self, data: bytes) -> None:
        self._feed(data)
        if self._held is not None and self._hold_timer is None and not self.transport.is_closing():
            self._await_rest()
        if not self._is_in_head:
            self._head_bytes = 0
            self._stop_head_timer()
        elif (size := self._head_bytes + len(data)) > _MAX_HEAD_BYTES:
            self.send_400_response(f"The head of the request is over {_MAX_HEAD_BYTES} bytes.")
        else:
            self._head_bytes = size
            if self._head_timer is None:
                self._await_head(HEAD_LIMIT_S)
        self.pass_on()  # where the response was complete before the request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.pass_on()

    def pass_on(self) -> None:
        """Pass the connection on, where the server leaves and no request of it is being received or answered."""
        pass_on, is_answered = self.server_state.pass_on, self.cycle is None or self.cycle.response_complete
        if pass_on is None or self._is_in_message or not is_answered or self.pipeline or self.transport.is_closing():
            return
        self.flow.pause_reading()
        if self.transport.get_write_buffer_size():  # the end of the last response
            self.loop.call_later(_FLUSH_POLL_S, self.pass_on)
        else:
            pass_on(_detach(self.transport))

    def _await_head(self, limit_s: float) -> None:
        self._head_timer = self.loop.call_later(limit_s, self._on_head_late)

    def _on_head_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head(HEAD_LIMIT_S)  # pipelined: nothing is read while another request is being answered
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        self._is_in_message = self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_resuming:
            return
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT is not served")  # the parser makes it an HttpParserError
        if self._may_be_direct():
            self._held = []
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._held is None:
            super().on_body(body)
        else:
            self._held.append(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else `_ignore_upgrade` follows
            self._is_in_message = False
            if self._held is None or not self._answer_directly(self._held):
                super().on_message_complete()

    def _may_be_direct(self) -> bool:
        if self.server_state.direct is None or self.pipeline:
            return False
        is_idle, parser = self.cycle is None or self.cycle.response_complete, self.parser
        is_plain = parser.get_method() == b"POST" and parser.get_http_version() == "1.1" and not parser.should_upgrade()
        return is_idle and is_plain

    def _answer_directly(self, held: list[bytes]) -> bool:
        """Answer a request that came whole without ASGI; False where ASGI is to serve it."""
        body = held[0] if len(held) == 1 else b"".join(held)
        direct, unread = self.server_state.direct, self.server_state.unread_replies
        answer = None
        if direct is not None and len(body) <= MAX_BODY_BYTES and unread.taken_bytes <= unread.limit_bytes:
            scope = cast(dict[str, Any], self.scope)
            answer = direct(DirectRequest(self.url, dict(reversed(self.headers)), body, scope))
        if answer is None:
            self._to_asgi()
            return False
        self._end_hold()
        self._exchange = exchange = DirectExchange(
            self, answer, self.parser.should_keep_alive(), self.server_state.unread_replies
        )
        self.cycle = cast(Any, exchange)
        self.tasks.add(exchange.task)
        exchange.task.add_done_callback(self.tasks.discard)
        return True

    def _await_rest(self) -> None:
        """Wait for the rest of a body; many clients send it after the head, but at once."""
        length = dict(self.headers).get(b"content-length", b"")
        if self.expect_100_continue or not length or int(length) > MAX_BODY_BYTES:
            self._to_asgi()
        else:
            self._hold_timer = self.loop.call_later(HOLD_S, self._to_asgi)

    def _end_hold(self) -> list[bytes]:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        held, self._held = self._held, None
        return held or []

    def _to_asgi(self) -> None:
        """Have the application serve a request that is held."""
        held = self._end_hold()
        super().on_headers_complete()
        for body in held:
            super().on_body(body)

    def _ignore_upgrade(self) -> None:
        framing = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
        self._is_resuming = False


class ProtocolSniffer(asyncio.Protocol):
    """Detects HTTP/2 or HTTP/1 from the first bytes of a connection, and hands it to that protocol.

    Connections beyond `max_connections` are aborted, silent ones closed after a timeout. The keyword arguments are
    those with which uvicorn makes a protocol.
    """

    silence_s: float | None = None

    def __init__(
        self, h2: H2Factory, http1: type[HttpProtocol] = HttpProtocol, *, server_state: ServerConnections, **rest: Any
    ) -> None:
        self._h2 = h2
        self._http1 = http1
        self._state = server_state
        self._rest = rest
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timeout = asyncio.get_running_loop().call_later(self.silence_s or _FIRST_BYTES_S, transport.close)
        if len(self._state.connections) >= max_connections():
            self._transport.abort()
        else:
            self._state.connections.add(cast(Any, self))
            self.pass_on()  # accepted in the moment in which the server left

    def pass_on(self) -> None:
        """Pass the connection on, where the server leaves and nothing was received."""
        if self._state.pass_on is not None and not self._seen and not self._transport.is_closing():
            self._state.pass_on(_detach(self._transport))

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if len(self._seen) < len(_H2_PREFACE) and _H2_PREFACE.startswith(self._seen):
            return
        self._finish()
        protocol: Any
        if self._seen.startswith(_H2_PREFACE):
            protocol = self._h2(self._state)
        else:
            protocol = self._http1(server_state=self._state, **self._rest)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._state.pass_on is not None and not isinstance(protocol, HttpProtocol):
            protocol.leave()
        protocol.data_received(self._seen)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def shutdown(self) -> None:
        """Called by uvicorn as the server ends."""
        self._transport.close()

    def _finish(self) -> None:
        self._timeout.cancel()
        self._state.connections.discard(cast(Any, self))


def media_type(content_type: str) -> str:
    """The type that a Content-Type header names, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header names JSON, or a form of it such as application/problem+json."""
    kind = media_type(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def foreign_page(headers: Mapping[str, str], allowed: Collection[str], host_names: Collection[str] = ()) -> str | None:
    """The origin of the web page that sent a request, unless it is one of `allowed` or this server's own; else None.

    Browsers send `Origin` with everything that is no read, other clients send none and are not concerned. A page is
    this server's own if its origin is the request's Host, and that is an address, localhost or one of `host_names`: any
    other name may be the page's own domain, which its DNS has pointed here (DNS rebinding).
    """
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    if origin is None:
        return "of another site" if headers.get("sec-fetch-site") in ("cross-site", "same-site") else None
    origin = origin.lower()
    if "*" in allowed or origin in map(str.lower, allowed):
        return None
    return None if origin.partition("://")[2] == host and _is_own(host, host_names) else origin


def _is_own(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is an address, localhost or one of `names`: what DNS rebinding cannot produce."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name in map(str.lower, names)
    return True


class SlowClient(Exception):
    """The body was not received in time."""


class HeldResponse(Response):
    """A response whose body is charged to a budget until the client has read all but its last part."""

    def __init__(self, content: Any, status_code: int, headers: Mapping[str, str], budget: ByteBudget) -> None:
        super().__init__(content, status_code, dict(headers))
        self._charge = Charge(budget)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._charge.add(len(self.body))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            body = memoryview(self.body)
            for start in range(0, len(body) or 1, PART_BYTES):
                end = start + PART_BYTES
                await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})
        finally:
            self._charge.release()


async def charge_body(charge: Charge, size: int) -> None:
    """Charge a body of known size; raises Overloaded where the budget stays exhausted."""
    await charge.take(size, _BUDGET_WAIT_S)


async def read_body(request: Request, limit_bytes: int, charge: Charge, start: bytes = b"") -> bytearray | None:
    """`start` and the whole body, charged; None when the body is larger than `limit_bytes`.

    A body of known length is charged before it is read, so that it is read to its end; any other as it comes.

    Raises:
        Overloaded: the budget stayed exhausted.
        SlowClient, ClientDisconnect: the client stopped sending, or disconnected.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        await charge_body(charge, min(int(length), limit_bytes))
    buffer = bytearray(start)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return buffer if await _read_into(buffer, request.stream(), limit_bytes, charge) else None
    except TimeoutError:
        raise SlowClient from None


async def read_limited(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """A request's whole body; None when it is larger than `limit_bytes`.

    Raises:
        SlowClient: it did not come within `BODY_TIMEOUT_S`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return bytes(body) if await _read_into(body, chunks, limit_bytes) else None
    except TimeoutError:
        raise SlowClient from None


async def _read_into(
    buffer: bytearray, chunks: AsyncIterator[bytes], limit_bytes: int, charge: Charge | None = None
) -> bool:
    """Append the whole body; False, and an empty buffer, when it is larger than `limit_bytes`.

    The rest of a body that is too large is read and discarded, to a bound: a client that is cut off while it still
    sends never reads the response with the reason.
    """
    room, discarded = limit_bytes, 0
    async for chunk in chunks:
        room -= len(chunk)
        if room >= 0:
            if charge is not None and (missing := limit_bytes - room - charge.bytes) > 0:
                await charge.take(missing, _BUDGET_WAIT_S if not buffer else _GROWTH_WAIT_S)
            buffer += chunk
            continue
        buffer.clear()
        discarded += len(chunk)
        if discarded > _MAX_DISCARDED_BYTES:
            break
    return room >= 0


async def unless_hung_up(answering: Coroutine[Any, Any, AnswerT], receive: Callable[[], Awaitable[Any]]) -> AnswerT:
    """The result of `answering`, which is cancelled if the client disconnects first.

    `receive` is ASGI's, of a request whose body was read.

    Raises:
        Cancelled: the client disconnected.
        TeimgrError: as `answering` does.
    """
    answered = asyncio.ensure_future(answering)
    hung_up = asyncio.ensure_future(_hung_up(receive))
    either: set[asyncio.Future[Any]] = {answered, hung_up}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise Cancelled("the client hung up")
    finally:
        for one in either:
            one.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
