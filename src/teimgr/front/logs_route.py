"""GET /instances/{name}/logs: a slice of an instance's log, streamed, or the log as it grows.

The fleet is not consulted: the log of a deleted instance is still served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from teimgr.errors import InstanceNotFound
from teimgr.front.events_stream import MEDIA_TYPE, Event, event_stream
from teimgr.front.instances import UNKNOWN
from teimgr.front.log_filter import LogFilter
from teimgr.front.log_follow import Follower, Gap
from teimgr.front.log_lines import Piece, complete_pieces, pieces, read_lines
from teimgr.front.schemas import LogSlice
from teimgr.settings import Settings
from teimgr.spec import check_name

router = APIRouter(tags=["instances"])

PART_BYTES = 64 * 2**10
I32 = 2**31
# With `follow` and no `start`, as `tail -f` does.
_FOLLOWED_LINES = 10
_LOOK_S = 0.25
_BATCH_LINES = 200

Index = Annotated[int | None, Query(ge=-I32, lt=I32, description="as in a Python slice; negative counts from the end")]
Follow = Annotated[
    bool,
    Query(description="server-sent events: `line` from `start` on (default -10) and as they come; `end` is ignored"),
]
Level = Annotated[str | None, Query(description="this level and those above; a slice then counts only such lines")]
Since = Annotated[str | None, Query(description="a moment in RFC 3339, or seconds ago")]
_BOTH = UNKNOWN | {200: {"model": LogSlice, "content": {MEDIA_TYPE: {}}, "description": "a slice, or events"}}


@router.get("/instances/{name}/logs", response_model=LogSlice, responses=_BOTH)
def get_logs(
    request: Request,
    name: str,
    start: Index = None,
    end: Index = None,
    follow: Follow = False,
    level: Level = None,
    since: Since = None,
) -> StreamingResponse:
    """Lines [start, end) of the log, rotated files included, or the log as it grows; memory does not grow with it.

    `level` and `since` look at structured lines; others go with the structured line before them. A follower gets an
    event `line` with {"line": text} for each, and `gap` where lines were rotated away before it took them.
    """
    settings: Settings = request.app.state.settings
    log = settings.log_dir / f"{check_name(name)}.log"
    wanted = LogFilter.of(level, since)
    parts, size = complete_pieces(log) if follow else (pieces(log), 0)
    if not parts:
        raise InstanceNotFound(name)
    total = sum(piece.lines for piece in parts) if wanted.takes_all else sum(1 for _ in _lines(parts, wanted))
    if follow:
        first = slice(-_FOLLOWED_LINES if start is None else start, None).indices(total)[0]
        return event_stream(_events(_lines(parts, wanted, first, total), Follower(log, size), wanted))
    first, last, _ = slice(start, end).indices(total)
    body = _body(_lines(parts, wanted, first, last), first, last, total)
    return StreamingResponse(body, media_type="application/json")


def _lines(parts: list[Piece], wanted: LogFilter, start: int = 0, end: int | None = None) -> Iterator[str]:
    """Lines [start, end) of those that are wanted."""
    whole = sum(piece.lines for piece in parts)
    if wanted.takes_all:
        return read_lines(parts, start, whole if end is None else end)
    return islice(filter(wanted.sieve(), read_lines(parts, 0, whole)), start, end)


async def _events(past: Iterator[str], follower: Follower, wanted: LogFilter) -> AsyncGenerator[Event]:
    """What there is, and then what comes; files are read on a thread, and nothing faster than the client takes it."""
    while batch := await asyncio.to_thread(lambda: [*islice(past, _BATCH_LINES)]):
        for line in batch:
            yield Event("line", {"line": line})
    takes = wanted.sieve()
    while True:
        found = await asyncio.to_thread(follower.read)
        for item in found:
            if isinstance(item, Gap):
                yield Event("gap", {"reason": "lines were rotated away before they were read"})
            elif takes(item):
                yield Event("line", {"line": item})
        if not found:
            await asyncio.sleep(_LOOK_S)


def _body(lines: Iterator[str], start: int, end: int, total: int) -> Iterator[bytes]:
    part, comma = bytearray(b'{"lines":['), b""
    for line in lines:
        part += comma + orjson.dumps(line)
        comma = b","
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b'],"start":%d,"end":%d,"total_lines":%d}' % (start, end, total)
