"""Server-sent events (WHATWG HTML): a response of named JSON events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
# In OpenAPI 3.1 the schema of a stream is that of each event.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_COMMENT = b": still here\n\n"


class Event(NamedTuple):
    """One event; `data` is any JSON value. A client that reconnects sends the last `id` as Last-Event-ID."""

    name: str
    data: object
    id: int | None = None

    def encode(self) -> bytes:
        """The event on the wire; orjson writes no line ends, so one `data` line suffices."""
        id = b"" if self.id is None else b"id: %d\n" % self.id
        return b"%bevent: %b\ndata: %b\n\n" % (id, self.name.encode(), orjson.dumps(self.data))


def is_wanted(request: Request) -> bool:
    """Whether the caller prefers events to one answer."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def event_stream(events: AsyncGenerator[Event], keep_alive_s: float = KEEP_ALIVE_S) -> StreamingResponse:
    """A response that sends `events`, and a comment after each `keep_alive_s` without one.

    The comments keep proxies from closing an idle stream, and detect that the client is gone.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_encoded(events, keep_alive_s), media_type=MEDIA_TYPE, headers=headers)


async def _encoded(events: AsyncGenerator[Event], keep_alive_s: float) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=keep_alive_s)
                if not done:
                    yield _COMMENT
                    continue
                event = coming.result()
                if event is None:
                    return
                yield event.encode()
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
