"""GET /instances/{name}/logs and GET /logs: a slice or a stream of the log of an instance or of the daemon.

The log of a deleted instance is still available.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import StreamingResponse

from teimgr.api.rest.events import EVENT_STREAM, Event, event_stream
from teimgr.api.rest.instances import UNKNOWN
from teimgr.api.rest.schemas import ANY_FAILURE, LogSlice
from teimgr.errors import InstanceNotFound
from teimgr.observability.log_files import Gap
from teimgr.observability.log_source import FleetLogs, LogFilter, OpenLog
from teimgr.observability.logs import DAEMON, pretty
from teimgr.spec import check_name

router = APIRouter(tags=["instances"], responses=ANY_FAILURE)

PLAIN_TEXT = "text/plain"
PART_BYTES = 64 * 2**10
I32 = 2**31
_TAIL_LINES = 10  # for `follow` without `start`, as in `tail -f`

_Index = Annotated[int | None, Query(ge=-I32, lt=I32, description="as in a Python slice; negative counts from the end")]
_Follow = Annotated[
    bool,
    Query(description="server-sent events: `line` from `start` on (default -10), then new ones; `end` is ignored"),
]
_Level = Annotated[str | None, Query(description="minimum level; a slice then counts only such lines")]
_Since = Annotated[str | None, Query(description="a time in RFC 3339, or in seconds ago")]


@dataclass(frozen=True, slots=True)
class Slice:
    """The requested part of a log."""

    start: _Index = None
    end: _Index = None
    follow: _Follow = False
    level: _Level = None
    since: _Since = None


Asked = Annotated[Slice, Depends()]
_BOTH = UNKNOWN | {
    200: {"model": LogSlice, "content": {EVENT_STREAM: {}, PLAIN_TEXT: {}}, "description": "a slice, events, or lines"}
}


@router.get("/instances/{name}/logs", response_model=LogSlice, responses=_BOTH)
async def get_logs(request: Request, name: str, asked: Asked) -> StreamingResponse:
    """Lines [start, end) of the log, rotated files included, or the log as it grows; memory does not grow with it.

    `level` and `since` apply to JSON lines; others belong to the JSON line before them. With `follow`, an event `line`
    has {"line": text}, and `gap` means that lines were rotated away before they were read. With `Accept: text/plain`
    both are lines for people: date, level, message, fields. Lines of several hosts come in the order of their times;
    hosts that did not answer are named in `unread`, or in a `gap`.
    """
    return await _answer(request, check_name(name), asked)


@router.get("/logs", response_model=LogSlice, responses=_BOTH)
async def get_daemon_logs(request: Request, asked: Asked) -> StreamingResponse:
    """The daemon's own log, as /instances/{name}/logs has that of an instance: starts, decisions, who changed what."""
    return await _answer(request, DAEMON, asked)


async def _answer(request: Request, name: str, asked: Slice) -> StreamingResponse:
    logs: FleetLogs = request.app.state.logs
    opened = await logs.open(name, LogFilter.of(asked.level, asked.since), follow=asked.follow)
    if opened is None:
        raise InstanceNotFound(name)
    if asked.follow:
        first = slice(-_TAIL_LINES if asked.start is None else asked.start, None).indices(opened.total)[0]
        events = _events(opened, first)
        return _plain(_shown(events)) if wants_text(request) else event_stream(events)
    first, last, _ = slice(asked.start, asked.end).indices(opened.total)
    if wants_text(request):
        return _plain(_text(opened, first, last))
    return StreamingResponse(_body(opened, first, last), media_type="application/json")


def wants_text(request: Request) -> bool:
    """True if the caller asks for lines rather than for JSON or events."""
    return PLAIN_TEXT in request.headers.get("accept", "")


def _plain(lines: AsyncIterable[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(lines, media_type=PLAIN_TEXT, headers=headers)


async def _shown(events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for event in events:
            data = event.data if isinstance(event.data, dict) else {}
            yield _for_people(data["line"] if "line" in data else Gap(str(data.get("reason"))))


def _for_people(item: str | Gap) -> bytes:
    return f"{f'… {item.reason}' if isinstance(item, Gap) else pretty(item)}\n".encode()


async def _items(log: OpenLog, start: int, end: int) -> AsyncGenerator[list[str | Gap]]:
    """The past lines in batches; the log is closed at the end."""
    try:
        async with aclosing(log.past(start, end)) as past:
            async for batch in past:
                yield batch
    finally:
        await log.close()


async def _text(log: OpenLog, start: int, end: int) -> AsyncGenerator[bytes]:
    for problem in log.unread:
        yield _for_people(Gap(problem))
    async with aclosing(_items(log, start, end)) as batches:
        async for batch in batches:
            yield b"".join(map(_for_people, batch))


async def _events(log: OpenLog, start: int) -> AsyncGenerator[Event]:
    """The existing lines, then new ones."""
    try:
        for problem in log.unread:
            yield _event(Gap(problem))
        async with aclosing(log.past(start, log.total)) as past:
            async for batch in past:
                for item in batch:
                    yield _event(item)
        async with aclosing(log.live()) as live:
            async for batch in live:
                for item in batch:
                    yield _event(item)
    finally:
        await log.close()


def _event(item: str | Gap) -> Event:
    return Event("gap", {"reason": item.reason}) if isinstance(item, Gap) else Event("line", {"line": item})


async def _body(log: OpenLog, start: int, end: int) -> AsyncGenerator[bytes]:
    part, comma = bytearray(b'{"lines":['), b""
    async with aclosing(_items(log, start, end)) as batches:
        async for batch in batches:
            for item in batch:
                if isinstance(item, Gap):  # also reported in `unread`
                    continue
                part += comma + orjson.dumps(item)
                comma = b","
            if len(part) >= PART_BYTES:
                yield bytes(part)
                part.clear()
    unread = b',"unread":%b' % orjson.dumps(list(log.unread)) if log.unread else b""
    yield bytes(part) + b'],"start":%d,"end":%d,"total_lines":%d%b}' % (start, end, log.total, unread)
