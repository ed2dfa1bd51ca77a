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

from teimgr.http.bodies import UNREAD
from teimgr.http.byte_budget import UnreadReplies
from teimgr.http.connection_gate import Ticket
from teimgr.http.direct import FAILED, Answer, DirectReply, DirectRequest
from teimgr.http.http1 import ServerConnections
from teimgr.http.http2.connection import Connection
from teimgr.http.http2.frame_reader import ErrorCode
from teimgr.http.http2.headers import InvalidHead, RequestHead
from teimgr.http.http2.stream import Stalled, Stream, StreamLost

log = logging.getLogger(__name__)

# Connection headers of HTTP/1.1, which HTTP/2 does not have.
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_WITHOUT_BODY = (204, 304)
_TEXT = {"content-type": "text/plain; charset=utf-8"}

PeerScope = Callable[[asyncio.Transport], dict[str, Any]]
"""Returns fields about a connection's peer for the scope of its requests."""


def protocol(state: ServerConnections, ticket: Ticket, peer_scope: PeerScope | None = None) -> Connection:
    """Make the protocol of a connection that carries only HTTP requests."""
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
            head, direct = stream.head, self._state.direct
            answer = None if direct is None else direct(head.method, head.target)
            scope = self._scope(stream, head)
            if answer is None:
                await self._run_app(stream, head, scope | head.location())
            else:
                await self._answer_directly(stream, head, scope, answer)
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

    async def _answer_directly(self, stream: Stream, head: RequestHead, scope: dict[str, Any], answer: Answer) -> None:
        is_awaited = not stream.received.has_ended and head.expects_continue
        body = _AwaitedBody(stream, is_awaited) if is_awaited else stream.received
        try:
            reply = await answer(DirectRequest(dict(reversed(head.fields)), scope, body))
        except StreamLost:
            raise
        except Exception:
            log.exception("a request failed")
            reply = FAILED
        await self._reply(stream, reply)

    async def _reply(self, stream: Stream, reply: DirectReply) -> None:
        given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
        fields = [*self.head(reply.status, given), (b"content-length", b"%d" % len(reply.body))]
        charges = reply.charges(self._unread)
        try:
            await stream.send_headers(fields, end=not reply.body)
            if reply.body:
                await stream.send_data(reply.body, end=True)
        except Stalled:
            stream.reset(ErrorCode.CANCEL)
        finally:
            for charge in charges:
                charge.release()

    async def _run_app(self, stream: Stream, head: RequestHead, scope: dict[str, Any]) -> None:
        exchange = AsgiExchange(stream, partial(self.head), head)
        stream.call_when(lost=exchange.finished.set)  # the application runs to its end, as over HTTP/1.1
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
                raise ValueError(f"invalid response header: {name!r}")
            if (lower := name.lower()) not in _OF_CONNECTIONS:
                sent.append((lower, value))
        return sent


class _AwaitedBody:
    """The body of a request whose client expects 100 Continue; `is_awaited` until that is sent."""

    def __init__(self, stream: Stream, is_awaited: bool) -> None:
        self._stream = stream
        self._received = stream.received
        self.is_awaited = is_awaited

    @property
    def whole_bytes(self) -> int | None:
        return self._received.whole_bytes

    def take(self) -> bytes | bytearray:
        return self._received.take()

    async def read_some(self) -> bytes | bytearray:
        if self.is_awaited:
            self.is_awaited = False
            with suppress(StreamLost):
                await self._stream.send_headers([(b":status", b"100")])
        return await self._received.read_some()


class AsgiExchange:
    """One request and its response as ASGI messages; `finished` is set when it is answered or the stream is lost."""

    def __init__(
        self, stream: Stream, head: Callable[[int, Iterable[tuple[bytes, bytes]]], Any], request: RequestHead
    ) -> None:
        self._stream = stream
        self._head = head
        self._is_head_request = request.method == b"HEAD"
        self._body = _AwaitedBody(stream, request.expects_continue)
        self._has_body = True
        self._may_have_more = True
        self.has_started = False
        self.finished = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._may_have_more and not self.finished.is_set():
            try:
                body = await self._body.read_some()
            except StreamLost:
                return {"type": "http.disconnect"}
            self._may_have_more = self._body.whole_bytes is None
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
        self.has_started, self._body.is_awaited = True, False
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
