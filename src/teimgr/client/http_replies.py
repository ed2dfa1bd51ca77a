"""Calls of the REST API without their transport: JSON, server-sent events, errors as `TeimgrError`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import Code, Internal, Refused, TeimgrError, ValidationError, error_from_code
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import CODE_KEY, STATUS

JsonObject = Mapping[str, Any]
Query = Mapping[str, int | str] | list[tuple[str, str]]


CONNECT_S = 10.0
MAX_REPLY_BYTES, MAX_EVENT_BYTES = 256 * 2**20, 16 * 2**20
"""Limits on one reply and on one event, so that an endless reply cannot fill the memory."""


class ServerSentEvent(NamedTuple):
    """One event of a `text/event-stream`; `data` is its parsed JSON."""

    event: str
    data: Any
    id: str | None = None


class Reply(NamedTuple):
    """An HTTP reply: status, body, and headers, by names in lower case or of a mapping that ignores case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class Request(NamedTuple):
    """One request; `timeout_s` bounds it with its reply. `path` is percent-encoded; if the body is pieces, `headers`
    has their type."""

    method: str
    path: str
    body: JsonObject | Iterable[bytes] | None
    query: Query | None
    headers: Mapping[str, str]
    timeout_s: float | None


class ReplyHead(NamedTuple):
    """The head of an HTTP reply, with the pieces of its body as they arrive."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class RestChannel(ABC):
    """A connection to the REST port: `HttpChannel` on an event loop, or `BlockingHttpChannel`."""

    def __init__(
        self, address: ServerAddress, tls: Tls, api_key: str | None = None, expect_fingerprint: str | None = None
    ) -> None:
        self._address = address
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        if expect_fingerprint is not None:
            self._headers[EXPECT_KEY] = expect_fingerprint

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        timeout_s: float | None,
    ) -> Any:
        """Return the parsed JSON of the reply, None for an empty one. `path` is already percent-encoded.

        Raises:
            InvalidConfig: a certificate file cannot be used.
            ValidationError: `body` cannot be encoded as JSON.
            TeimgrError: the daemon's error reply.
            Unreachable: no connection, or TLS failed.
            DeadlineExceeded: no complete reply within `timeout_s`; None waits without a limit.
        """
        return json_of(path, await self._exchange(method, path, body, query, timeout_s))

    async def text(self, path: str, *, timeout_s: float) -> str:
        """Return the text of the reply to a GET.

        Raises:
            TeimgrError: see `call`.
        """
        reply = await self._exchange("GET", path, None, None, timeout_s)
        if reply.status >= 400:
            raise error_from_reply(*reply)
        return reply.body.decode()

    async def succeeds(self, path: str, *, timeout_s: float) -> bool:
        """True if GET answers 200 rather than 503.

        Raises:
            TeimgrError: any other answer.
        """
        reply = await self._exchange("GET", path, None, None, timeout_s)
        if reply.status not in (200, 503):
            raise error_from_reply(*reply)
        return reply.status == 200

    async def events(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        last_event_id: str | None = None,
    ) -> AsyncGenerator[ServerSentEvent]:
        """Yield the server-sent events of a reply until the server ends it; comments (keep-alives) are skipped.

        Raises:
            ValidationError: `body` cannot be encoded as JSON.
            TeimgrError: the daemon's error reply.
            Unreachable: no connection, or it was lost.
        """
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        async with self._reply(Request(method, path, body, query, headers, None)) as head:
            if head.status >= 400:
                raise error_from_reply(*await _whole(path, head))
            parser = EventParser()
            async for piece in head.pieces:
                for event in parser.feed(piece):
                    yield event

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait between two attempts."""

    async def _exchange(
        self, method: str, path: str, body: JsonObject | None, query: Query | None, timeout_s: float | None
    ) -> Reply:
        """Return the reply with any status."""
        async with self._reply(Request(method, path, body, query, {}, timeout_s)) as head:
            return await _whole(path, head)

    @abstractmethod
    def _reply(self, request: Request) -> AbstractAsyncContextManager[ReplyHead]:
        """Send a request and yield the head of its reply; the body is read within the block."""


async def _whole(path: str, head: ReplyHead) -> Reply:
    body = bytearray()
    async for piece in head.pieces:
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise Internal(f"{path}: the reply has more than {MAX_REPLY_BYTES} bytes")
    return Reply(head.status, bytes(body), head.headers)


class EventParser:
    """Splits the chunks of a `text/event-stream` into events; comments (keep-alives) are skipped."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Return the events that a chunk completes. Raises Internal if an event is invalid or too long."""
        known = max(0, len(self._pending) - 1)
        self._pending += chunk
        if self._pending.find(b"\n\n", known) < 0:
            if len(self._pending) > MAX_EVENT_BYTES:
                raise Internal(f"an event of the server has more than {MAX_EVENT_BYTES} bytes")
            return
        *blocks, self._pending = self._pending.split(b"\n\n")
        for block in blocks:
            lines = (line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            try:
                fields = {name.decode(): value.decode() for name, value in lines}
                event = (
                    ServerSentEvent(fields["event"], json.loads(fields["data"]), fields.get("id")) if fields else None
                )
            except (ValueError, KeyError, RecursionError) as error:
                raise Internal(f"an event of the server cannot be read: {type(error).__name__}: {error}") from error
            if event is not None:
                yield event


def json_of(path: str, reply: Reply) -> Any:
    """Return the parsed JSON of a reply, None for an empty one.

    Raises:
        TeimgrError: the daemon's error reply; `Internal` if a successful reply is not JSON.
    """
    if reply.status >= 400:
        raise error_from_reply(*reply)
    if not reply.body:
        return None
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise Internal(f"{path}: the reply is not JSON: {error}") from error


# Error types in TEI's bodies, which the inference routes send.
_TEI_CODES = {
    "Empty": Code.EMPTY_INPUT,
    "Validation": Code.INVALID_INPUT,
    "Tokenizer": Code.TOKENIZER_ERROR,
    "Overloaded": Code.OVERLOADED,
    "Unhealthy": Code.BACKEND_UNAVAILABLE,
    "Backend": Code.INFERENCE_FAILED,
}


_OF_STATUS = {404: Code.INSTANCE_NOT_FOUND, 412: Code.SPACE_DIFFERS}  # TEI's error types do not distinguish these


def error_from_reply(status: int, body: bytes, headers: Mapping[str, str]) -> TeimgrError:
    """Return the exception for an HTTP error reply, in our shape or TEI's; another body becomes its text.

    Headers may have the code, which is more precise than TEI's types, and the time to wait.
    """
    error = _error_of(status, body, headers.get(CODE_KEY))
    if (wait := headers.get("retry-after", "")).isdecimal():  # a proxy may send a date
        error.try_after(float(wait))
    return error


def _error_of(status: int, body: bytes, named: str | None) -> TeimgrError:
    known = Code.__members__.get(named or "")
    try:
        fields = json.loads(body)
        if known is not None:
            code = known
        elif "error_type" not in fields:
            code = Code[fields["code"]]
        else:
            code = _OF_STATUS.get(status) or _TEI_CODES[fields["error_type"]]
        error = fields["error"]
        return error_from_code(code, str(error["message"] if isinstance(error, dict) else error))  # OpenAI's, or ours
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        if known is not None and text:  # TEI answers an unreadable body in plain text
            return error_from_code(known, text[:500])
        message = f"HTTP {status}: {text[:500]}" if text else f"HTTP {status}"
        codes = [code for code, row in STATUS.items() if row.http == status]
        if len(codes) == 1:
            return error_from_code(codes[0], message)
        if status == 404 and not text:
            message += ": this address has no such route; is it an instance's own port, and not a daemon's REST port?"
        if status in (400, 415, 422):
            return ValidationError(message)
        return Refused(message) if status < 500 else Internal(message)
