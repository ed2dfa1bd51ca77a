"""HTTP requests on HTTP/2 streams, answered by the ASGI application or directly, as over HTTP/1.1."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from teimgr.http.byte_budget import Charge, UnreadReplies
from teimgr.http.connection_gate import Ticket
from teimgr.http.direct import FAILED, HOLD_S, MAX_BODY_BYTES, DirectReply, DirectRequest
from teimgr.http.http1 import ServerConnections
from teimgr.http.http2.connection import Connection
from teimgr.http.http2.frame_types import ErrorCode
from teimgr.http.http2.request_head import InvalidHead, RequestHead
from teimgr.http.http2.stream import Stalled, Stream, StreamLost
from teimgr.http.replies import UNREAD

log = logging.getLogger(__name__)

# Connection headers of HTTP/1.1, which HTTP/2 does not have.
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_WITHOUT_BODY = (204, 304)
_TEXT = {"content-type": "text/plain; charset=utf-8"}

PeerScope = Callable[[asyncio.Transport], dict[str, Any]]
"""What a connection's peer adds to the scope of its requests."""


def protocol(state: ServerConnections, ticket: Ticket, peer_scope: PeerScope | None = None) -> Connection:
    """The protocol of a connection with HTTP requests alone."""
    return Connection(HttpStreams(state, peer_scope).serve, state, ticket)


class HttpStreams:
    """Serves the HTTP requests of one connection."""

    def __init__(self, state: ServerConnections, peer_scope: PeerScope | None = None) -> None:
        self._state = state
        self._peer_scope = peer_scope
        self._of_connection: dict[str, Any] = {}
        self._unread: UnreadReplies

    async def serve(self, stream: Stream) -> None:
        """Answer the request of one stream."""
        stream.discard_rest()
        try:
            head = stream.head
            scope = self._scope(stream, head)
            if not await self._answer_directly(stream, head, scope):
                await self._run_app(stream, head, scope | head.location())
        except InvalidHead as error:
            text = f"Invalid HTTP request received: {error}"
            await self._reply(stream, DirectReply(400, _TEXT, text.encode()))

    def _scope(self, stream: Stream, head: RequestHead) -> dict[str, Any]:
        config = self._state.config
        if not self._of_connection:
            transport = stream.connection.transport
            client = get_remote_addr(transport)
            self._unread = self._state.unread_replies.of_connection(client[0] if client else "")
            self._of_connection = {
                "type": "http",
                UNREAD: self._unread,
                "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
                "http_version": "2",
                "server": get_local_addr(transport),
                "client": client,
                "scheme": "https" if is_ssl(transport) else "http",
                "root_path": "",
            } | (self._peer_scope(transport) if self._peer_scope else {})
        method = head.method.decode("ascii")
        return self._of_connection | {"method": method, "headers": [*head.fields], "state": {}}

    async def _answer_directly(self, stream: Stream, head: RequestHead, scope: dict[str, Any]) -> bool:
        """Answer a small request that comes at once without ASGI; False where ASGI is to serve it."""
        direct, received = self._state.direct, stream.received
        if direct is None or head.method != b"POST" or self._unread.is_over:
            return False
        if not received.has_ended:
            if head.expects_continue or (head.length or 0) > MAX_BODY_BYTES:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    await received.whole(MAX_BODY_BYTES)
        if not received.has_ended or len(received) > MAX_BODY_BYTES:
            return False
        body = bytes(received.take())
        answer = direct(DirectRequest(head.target, dict(reversed(head.fields)), body, scope))
        if answer is None:
            received.put_back(body)
            return False
        try:
            reply = await answer()
        except Exception:
            log.exception("a request failed")
            reply = FAILED
        await self._reply(stream, reply)
        return True

    async def _reply(self, stream: Stream, reply: DirectReply) -> None:
        given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
        fields = [*self.head(reply.status, given), (b"content-length", b"%d" % len(reply.body))]
        charge = Charge(self._unread)
        charge.add(len(reply.body))
        try:
            await stream.send_headers(fields, end=not reply.body)
            if reply.body:
                await stream.send_data(reply.body, end=True)
        except Stalled:
            stream.reset(ErrorCode.CANCEL)
        finally:
            charge.release()

    async def _run_app(self, stream: Stream, head: RequestHead, scope: dict[str, Any]) -> None:
        exchange = AsgiExchange(stream, partial(self.head), head)
        stream.call_when(lost=exchange.finished.set)  # the application goes on to its end, as over HTTP/1.1
        try:
            await self._state.config.loaded_app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("a request failed")
        if not exchange.has_started and not stream.is_lost:
            await self._reply(stream, FAILED)

    def head(self, status: int, fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers of a response: the server's own and those given, without what HTTP/2 does not have.

        Raises:
            ValueError: a name or a value has a character that it may not have.
        """
        sent = [(b":status", b"%d" % status)]
        for name, value in (*self._state.default_headers, *fields):
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise ValueError(f"a header cannot be sent: {name!r}")
            if (lower := name.lower()) not in _OF_CONNECTIONS:
                sent.append((lower, value))
        return sent


class AsgiExchange:
    """One request and its response in ASGI's messages; `finished` is set when it is answered or the stream is lost."""

    def __init__(
        self, stream: Stream, head: Callable[[int, Iterable[tuple[bytes, bytes]]], Any], request: RequestHead
    ) -> None:
        self._stream = stream
        self._head = head
        self._is_head_request = request.method == b"HEAD"
        self._awaits_continue = request.expects_continue
        self._has_body = True
        self._may_have_more = True
        self.has_started = False
        self.finished = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._awaits_continue and not self.has_started:
            self._awaits_continue = False
            with suppress(StreamLost):
                await self._stream.send_headers([(b":status", b"100")])
        if self._may_have_more and not self.finished.is_set():
            received = self._stream.received
            try:
                body = await received.read_some()
            except StreamLost:
                return {"type": "http.disconnect"}
            self._may_have_more = not received.has_ended
            return {"type": "http.request", "body": body, "more_body": self._may_have_more}
        await self.finished.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._stream.is_lost:
            return
        try:
            await (self._send_body(message) if self.has_started else self._start(message))
        except StreamLost:
            self.finished.set()
        except Stalled:
            self._stream.reset(ErrorCode.CANCEL)
            self._stream.lose()

    async def _start(self, message: Any) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"expected http.response.start, got {message['type']}")
        status = message["status"]
        self._has_body = not self._is_head_request and status not in _WITHOUT_BODY
        fields = self._head(status, message.get("headers", ()))
        self.has_started, self._awaits_continue = True, False
        await self._stream.send_headers(fields)

    async def _send_body(self, message: Any) -> None:
        if self.finished.is_set() or message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected {message['type']}, the response has begun or is complete")
        body, more = message.get("body", b"") if self._has_body else b"", message.get("more_body", False)
        if body or not more:
            await self._stream.send_data(body, end=not more)
        if not more:
            self.finished.set()
            self._stream.received.fail(StreamLost("the response is complete"))
