"""Server-sent events: named JSON events as one long response, as the HTML standard has them."""

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
# What OpenAPI 3.1 is told of a stream: its schema is that of each event.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_COMMENT = b": still here\n\n"


class Event(NamedTuple):
    """One event; `data` is anything that JSON has. `id` is what a reader that comes back says it has seen."""

    name: str
    data: object
    id: int | None = None

    def encode(self) -> bytes:
        """As it goes over the wire; JSON has no line ends that could break it."""
        known = b"" if self.id is None else b"id: %d\n" % self.id
        return b"%bevent: %b\ndata: %b\n\n" % (known, self.name.encode(), orjson.dumps(self.data))


def is_wanted(request: Request) -> bool:
    """Whether the caller prefers events to one answer."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def event_stream(events: AsyncGenerator[Event], keep_alive_s: float = KEEP_ALIVE_S) -> StreamingResponse:
    """The response that sends `events` as they come, and a comment whenever none came for `keep_alive_s`.

    The comments keep proxies from closing a quiet stream, and find out that the reader is gone.
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
