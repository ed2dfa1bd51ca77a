"""Requests that arrive whole, answered by the protocol of their connection, without ASGI.

A server that has a `Direct` offers it each POST whose body is small and comes at once; what it declines, and everything
else, is served by the ASGI application. Half of a small request's cost was the way through ASGI's layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from teimgr.http.byte_budget import ByteBudget, Charge

log = logging.getLogger(__name__)

# A larger body waits for its budget and is parsed on a thread: as an ASGI request.
MAX_BODY_BYTES = 64 * 1024
# How long a small body is awaited for an answer without ASGI, which would wait for it within other limits.
HOLD_S = 1.0
# Of a response, written at once; the rest in parts of this size, each when the client has read most of those before.
PART_BYTES = 256 * 1024
_CLOSE = (b"connection", b"close")
# Requests of web pages, which middleware has to examine.
_OF_PAGES = frozenset((b"origin", b"sec-fetch-site"))


class DirectRequest(NamedTuple):
    """A POST of `target`, the path as it was sent; `headers` has lower-case names and the first of several values.

    `scope` is the ASGI scope, without the fields that are parsed from the target.
    """

    target: bytes
    headers: Mapping[bytes, bytes]
    body: bytes
    scope: MutableMapping[str, Any]

    @property
    def is_of_page(self) -> bool:
        """Whether a web page may have sent it."""
        return not _OF_PAGES.isdisjoint(self.headers)


class DirectReply(NamedTuple):
    """A response; its length is added to the headers."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray | memoryview


Answer = Callable[[], Coroutine[Any, Any, DirectReply]]
"""Answers one request; cancelled if the client disconnects."""

Direct = Callable[[DirectRequest], Answer | None]
"""What answers a request; None if ASGI is to serve it."""

FAILED = DirectReply(500, {"content-type": "text/plain; charset=utf-8"}, b"Internal Server Error")


class DirectExchange:
    """The answering of one request; in uvicorn's protocol it takes the place of an ASGI cycle.

    A response of several parts is charged to `unread`, fit or not, until the client has read all but the last one.
    """

    def __init__(self, protocol: HttpToolsProtocol, answer: Answer, keep_alive: bool, unread: ByteBudget) -> None:
        self._protocol = protocol
        self._unread = unread
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.task = protocol.loop.create_task(self._run(answer))

    @property
    def message_event(self) -> DirectExchange:
        """Uvicorn sets it when the client has disconnected. No attribute: that would be a reference cycle."""
        return self

    def set(self) -> None:
        """Cancel the answering of a client that has disconnected."""
        if not self.response_complete:
            self.disconnected = True
            self.task.cancel()

    async def _run(self, answer: Answer) -> None:
        try:
            try:
                reply = await answer()
            except Exception:
                log.exception("a request failed")
                reply, self.keep_alive = FAILED, False
            await self._send(reply)
        except BaseException:  # cancelled, or half a response: the connection is of no more use
            self.keep_alive = False
            raise
        finally:
            self.response_complete = True
            if not self.keep_alive:
                self._protocol.transport.close()
            self._protocol.on_response_complete()
            del self.task  # whose exception has this frame: a reference cycle

    async def _send(self, reply: DirectReply) -> None:
        protocol = self._protocol
        transport, flow, body = protocol.transport, protocol.flow, memoryview(reply.body)
        if flow.write_paused:
            await flow.drain()
        standing = protocol.server_state.default_headers
        if _CLOSE in standing:
            self.keep_alive = False
        elif not self.keep_alive:
            standing = [*standing, _CLOSE]
        lines = [f"{name}: {value}\r\n" for name, value in reply.headers.items()]
        fields = "".join(lines)
        if not len(lines) == fields.count("\r") == fields.count("\n") or "\0" in fields:
            raise ValueError("a header has a line break or a NUL in it")
        defaults = [b"%s: %s\r\n" % header for header in standing]
        end = b"content-length: %d\r\n\r\n" % len(body)
        head = b"".join((STATUS_LINE[reply.status], *defaults, fields.encode("latin-1"), end))
        transport.writelines((head, body[:PART_BYTES]))
        if len(body) > PART_BYTES:
            await self._send_rest(body)

    async def _send_rest(self, body: memoryview) -> None:
        """The parts of a body behind the first one."""
        transport, flow = self._protocol.transport, self._protocol.flow
        charge = Charge(self._unread)
        charge.add(len(body))
        try:
            for start in range(PART_BYTES, len(body), PART_BYTES):
                if flow.write_paused:
                    await flow.drain()
                transport.write(body[start : start + PART_BYTES])
        finally:
            charge.release()
