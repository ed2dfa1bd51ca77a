"""Server-sent events: their form, the comments of a quiet stream, a reader that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from teimgr.api.rest.events import Event, event_stream


async def sent_parts(events: AsyncGenerator[Event], **how: float) -> list[bytes]:
    return [bytes(part) async for part in event_stream(events, **how).body_iterator]  # type: ignore[arg-type]


async def test_an_event_is_a_name_and_json_on_one_line() -> None:
    async def events() -> AsyncGenerator[Event]:
        yield Event("progress", {"text": "two\nlines"})
        yield Event("done", None)

    assert await sent_parts(events()) == [
        b'event: progress\ndata: {"text":"two\\nlines"}\n\n',
        b"event: done\ndata: null\n\n",
    ]


async def test_a_quiet_stream_says_that_it_is_there() -> None:
    go = asyncio.Event()

    async def events() -> AsyncGenerator[Event]:
        await go.wait()
        yield Event("done", 1)

    stream = event_stream(events(), keep_alive_s=0.001).body_iterator
    assert await anext(aiter(stream)) == b": still here\n\n"
    go.set()
    rest = [part async for part in stream]
    assert rest[-1] == b"event: done\ndata: 1\n\n"


async def test_a_reader_that_goes_away_ends_the_source() -> None:
    ended = asyncio.Event()

    async def events() -> AsyncGenerator[Event]:
        try:
            yield Event("first", 1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    stream = event_stream(events(), keep_alive_s=0.001).body_iterator
    await anext(aiter(stream))
    await stream.aclose()  # type: ignore[union-attr]
    assert ended.is_set()
