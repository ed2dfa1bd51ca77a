"""Inference requests, answered by the connection's protocol without ASGI, whose layers were half of their cost.

A server passes the head of each request to its `Direct`; declined requests go to the ASGI application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, NamedTuple, NoReturn, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from teimgr.http.byte_budget import ByteBudget, Charge

log = logging.getLogger(__name__)

# The first part of a response is written at once, further ones as the client reads.
PART_BYTES = 256 * 1024
_CLOSE = (b"connection", b"close")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Incoming(Protocol):
    """The body of a request while it arrives. A task that waits for it is cancelled if the client disconnects."""

    @property
    def whole_bytes(self) -> int | None:
        """The size of what was received and not taken, once that is all; None while more may come."""

    def take(self) -> bytes | bytearray:
        """Return what was received and not taken."""

    async def read_some(self) -> bytes | bytearray:
        """Like `take`, but wait for at least a byte; empty at the end. Sends 100 Continue if the client expects it."""


class DirectRequest(NamedTuple):
    """A request; `headers` have lower-case names and the first of several values.

    `scope` is the ASGI scope, without the fields that are parsed from the target.
    """

    headers: Mapping[bytes, bytes]
    scope: MutableMapping[str, Any]
    body: Incoming


class DirectReply(NamedTuple):
    """A response; its length is added to the headers. A long body is charged to `budget`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray | memoryview
    budget: ByteBudget | None = None

    def charges(self, unread: ByteBudget) -> tuple[Charge, Charge]:
        """Charge `unread` for a part, and the budget for the rest; the caller releases both once all is written."""
        part, rest, size = Charge(unread), Charge(self.budget or unread), len(self.body)
        part.add(min(size, PART_BYTES))
        if size > PART_BYTES:
            rest.add(size - PART_BYTES)
        return part, rest


Answer = Callable[[DirectRequest], Coroutine[Any, Any, DirectReply]]
"""Answers a request; cancelled if the client disconnects."""

Direct = Callable[[bytes, bytes], Answer | None]
"""Returns the answer function for a method and a target, or None for ASGI."""

FAILED = DirectReply(500, {"content-type": "text/plain; charset=utf-8"}, b"Internal Server Error")


async def answered_directly(request: Any) -> NoReturn:
    """The endpoint of a route that `Direct` answers; the application has it so that other methods are refused there."""
    raise RuntimeError("an inference request reached the ASGI application")


class DirectExchange:
    """Answers one request over HTTP/1, in place of uvicorn's ASGI cycle.

    It is also the request's `Incoming`: uvicorn appends received bytes to `body` and clears `more_body` at the end. A
    response of several parts is charged to `unread`, even beyond its limit, until the last part is written.
    """

    def __init__(
        self,
        protocol: HttpToolsProtocol,
        answer: Answer,
        headers: Mapping[bytes, bytes],
        *,
        keep_alive: bool,
        unread: ByteBudget,
    ) -> None:
        self._protocol = protocol
        self._answer = answer
        self._headers = headers
        self._scope: MutableMapping[str, Any] = protocol.scope  # type: ignore[assignment]
        self._unread = unread
        self._awaits_continue = protocol.expect_100_continue
        self._progress: asyncio.Future[None] | None = None  # awaited by the reader of the body
        self._task: asyncio.Task[None] | None = None
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False

    # Called by the protocol.

    def begin(self) -> asyncio.Task[None]:
        """Begin to answer, whether or not the body has arrived."""
        self._task = self._protocol.loop.create_task(self._run())
        return self._task

    def add(self, data: bytes) -> None:
        """Add to the body, before `begin`."""
        self.body += data

    def end(self) -> None:
        """Note that all of the body has arrived, before `begin`."""
        self.more_body = False

    @property
    def message_event(self) -> DirectExchange:
        """The event that uvicorn sets when something has arrived. Not an attribute: that would be a reference cycle."""
        return self

    def set(self) -> None:
        """Wake the task that waits for the body."""
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def lose(self) -> None:
        """Write nothing more; the connection is closed, and `leave` follows."""
        self.disconnected = True

    def leave(self) -> None:
        """Cancel the answering of a client that has disconnected."""
        if self._task is None:
            self.response_complete = True
        elif not self.response_complete:
            self.disconnected = True
            self._task.cancel()

    # The body

    @property
    def whole_bytes(self) -> int | None:
        return None if self.more_body else len(self.body)

    def take(self) -> bytearray:
        taken, self.body = self.body, bytearray()
        if self._protocol.flow.read_paused:
            self._protocol.flow.resume_reading()  # also at the end of the body, to detect a disconnect
        return taken

    async def read_some(self) -> bytearray:
        while not self.body and self.more_body:
            if self._awaits_continue:
                self._awaits_continue = False
                if not self.disconnected:
                    self._protocol.transport.write(_CONTINUE)
            self._protocol.flow.resume_reading()
            self._progress = self._protocol.loop.create_future()
            await self._progress
        return self.take()

    # The answer

    async def _run(self) -> None:
        try:
            try:
                reply = await self._answer(DirectRequest(self._headers, self._scope, self))
            except Exception:
                log.exception("a request failed")
                reply, self.keep_alive = FAILED, False
            await self._send(reply)
        except BaseException:  # cancelled, or an incomplete response: close the connection
            self.keep_alive = False
            raise
        finally:
            self.response_complete = True
            if not self.keep_alive:
                self._protocol.transport.close()
            self._protocol.on_response_complete()
            self._task = None  # breaks a reference cycle with its exception

    async def _send(self, reply: DirectReply) -> None:
        protocol = self._protocol
        transport, flow, body = protocol.transport, protocol.flow, memoryview(reply.body)
        if flow.write_paused:
            await flow.drain()
        if self.disconnected:
            return
        standing = protocol.server_state.default_headers
        if _CLOSE in standing:
            self.keep_alive = False
        elif not self.keep_alive:
            standing = [*standing, _CLOSE]
        fields = "\r\n".join([*map(": ".join, reply.headers.items()), ""])
        if not len(reply.headers) == fields.count("\r") == fields.count("\n") or "\0" in fields:
            raise ValueError("a header contains a line break or NUL")
        defaults = [b"%s: %s\r\n" % header for header in standing]
        end = b"content-length: %d\r\n\r\n" % len(body)
        head = b"".join((STATUS_LINE[reply.status], *defaults, fields.encode("latin-1"), end))
        transport.writelines((head, body[:PART_BYTES]))
        if len(body) > PART_BYTES:
            await self._send_rest(reply)

    async def _send_rest(self, reply: DirectReply) -> None:
        """Send the parts of a body after the first one."""
        transport, flow, body = self._protocol.transport, self._protocol.flow, memoryview(reply.body)
        charges = reply.charges(self._unread)
        try:
            for start in range(PART_BYTES, len(body), PART_BYTES):
                if flow.write_paused:
                    await flow.drain()
                if self.disconnected:
                    return
                transport.write(body[start : start + PART_BYTES])
        finally:
            for charge in charges:
                charge.release()
