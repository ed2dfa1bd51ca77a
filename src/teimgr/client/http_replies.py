"""Replies of the REST API, without a transport: errors as `TeimgrError`, server-sent events, what a channel has."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from teimgr.errors import Code, Internal, Refused, TeimgrError, error_from_code
from teimgr.wire.status import STATUS

JsonObject = Mapping[str, Any]
Query = Mapping[str, int | str] | list[tuple[str, str]]


class ServerSentEvent(NamedTuple):
    """One event of a `text/event-stream`; `data` is its parsed JSON."""

    event: str
    data: Any
    id: str | None = None


class RestChannel(Protocol):
    """A connection to the REST port: `HttpChannel` on an event loop, or `BlockingHttpChannel`."""

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        timeout_s: float | None,
    ) -> Any: ...

    async def text(self, path: str, *, timeout_s: float) -> str: ...

    async def succeeds(self, path: str, *, timeout_s: float) -> bool: ...

    def events(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        last_event_id: str | None = None,
    ) -> AsyncGenerator[ServerSentEvent]: ...

    async def pause(self, seconds: float) -> None: ...


class EventParser:
    """Splits the chunks of a `text/event-stream` into events; comments (keep-alives) are skipped."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        *blocks, self._pending = (self._pending + chunk).split(b"\n\n")
        for block in blocks:
            lines = (line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if fields := {name.decode(): value.decode() for name, value in lines}:
                yield ServerSentEvent(fields["event"], json.loads(fields["data"]), fields.get("id"))


def json_of(path: str, status: int, reply: bytes) -> Any:
    """The parsed JSON of a reply, None for an empty one.

    Raises:
        TeimgrError: the daemon's error reply; `Internal` where a good reply is no JSON.
    """
    if status >= 400:
        raise error_from_reply(status, reply)
    if not reply:
        return None
    try:
        return json.loads(reply)
    except ValueError as error:
        raise Internal(f"{path}: the reply is no JSON: {error}") from error


# The words of TEI's error bodies, which routes of inference have.
_TEI_CODES = {
    "Empty": Code.EMPTY_INPUT,
    "Validation": Code.INVALID_INPUT,
    "Tokenizer": Code.TOKENIZER_ERROR,
    "Overloaded": Code.OVERLOADED,
    "Unhealthy": Code.BACKEND_UNAVAILABLE,
    "Backend": Code.INFERENCE_FAILED,
}


def error_from_reply(status: int, body: bytes) -> TeimgrError:
    """The exception for an HTTP error reply, in our shape or TEI's; another body becomes its text."""
    try:
        fields = json.loads(body)
        if "error_type" not in fields:
            code = Code[fields["code"]]
        else:
            code = Code.INSTANCE_NOT_FOUND if status == 404 else _TEI_CODES[fields["error_type"]]
        return error_from_code(code, str(fields["error"]))
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()
        message = f"HTTP {status}: {text[:500]}" if text else f"HTTP {status}"
        codes = [code for code, row in STATUS.items() if row.http == status]
        if len(codes) == 1:
            return error_from_code(codes[0], message)
        return Refused(message) if status < 500 else Internal(message)
