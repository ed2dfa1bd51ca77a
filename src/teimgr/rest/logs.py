"""GET /instances/{name}/logs: a slice of an instance's log, or the log as it grows as server-sent events.

The log of a deleted instance is still served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from teimgr.config.settings import Settings
from teimgr.errors import InstanceNotFound, ValidationError
from teimgr.observability.logs import LEVELS
from teimgr.rest.instances import UNKNOWN
from teimgr.rest.json_http import EVENT_STREAM, Event, event_stream
from teimgr.rest.log_files import Follower, Gap, Piece, complete_pieces, pieces, read_lines
from teimgr.rest.schemas import LogSlice
from teimgr.spec import check_name

# Our key of a log event's time, and TEI's.
_TIMES = ("ts", "timestamp")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Minimum level and earliest time; None for any.

    A line that is not a JSON event, such as one of a traceback, is kept or dropped with the event before it.
    """

    level: int | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, level: str | None, since: str | None) -> LogFilter:
        """The filter of a query: the name of a level, and a time in RFC 3339 or in seconds ago.

        Raises:
            ValidationError: an unknown level or an invalid time.
        """
        if level is not None and level.lower() not in LEVELS:
            raise ValidationError(f"level: no level {level!r}; known: {', '.join(LEVELS)}")
        return cls(None if level is None else LEVELS[level.lower()], None if since is None else _since(since))

    @property
    def takes_all(self) -> bool:
        return self.level is None and self.since is None

    def predicate(self) -> Callable[[str], bool]:
        """Whether to keep a line, for the lines of a log in their order."""
        kept = self.since is None  # lines before the first event have no known time

        def keeps(line: str) -> bool:
            nonlocal kept
            event = _event(line)
            kept = kept if event is None else self._keeps(event)
            return kept

        return (lambda line: True) if self.takes_all else keeps

    def _keeps(self, event: dict[str, Any]) -> bool:
        level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
        if self.level is not None and level < self.level:
            return False
        return self.since is None or (moment := _time_of(event)) is None or moment >= self.since


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = orjson.loads(line) if line.startswith("{") else {}
    except ValueError:
        return None
    return event if "level" in event else None


def _time_of(event: dict[str, Any]) -> datetime | None:
    text = next((event[key] for key in _TIMES if key in event), None)
    try:
        return _aware(datetime.fromisoformat(text)) if isinstance(text, str) else None
    except ValueError:
        return None


def _since(text: str) -> datetime:
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) - timedelta(seconds=float(text))
    try:
        return _aware(datetime.fromisoformat(text.replace(" ", "+")))  # an unescaped plus sign in the query
    except ValueError:
        raise ValidationError(f"since: {text!r} is neither seconds ago nor a moment in RFC 3339") from None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


router = APIRouter(tags=["instances"])

PART_BYTES = 64 * 2**10
I32 = 2**31
# With `follow` and no `start`, as `tail -f` does.
_TAIL_LINES = 10
_POLL_S = 0.25
_BATCH_LINES = 200

Index = Annotated[int | None, Query(ge=-I32, lt=I32, description="as in a Python slice; negative counts from the end")]
Follow = Annotated[
    bool,
    Query(description="server-sent events: `line` from `start` on (default -10), then new ones; `end` is ignored"),
]
Level = Annotated[str | None, Query(description="minimum level; a slice then counts only such lines")]
Since = Annotated[str | None, Query(description="a time in RFC 3339, or in seconds ago")]
_BOTH = UNKNOWN | {200: {"model": LogSlice, "content": {EVENT_STREAM: {}}, "description": "a slice, or events"}}


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

    `level` and `since` apply to JSON lines; others belong to the JSON line before them. With `follow`, an event `line`
    has {"line": text}, and `gap` means that lines were rotated away before they were read.
    """
    settings: Settings = request.app.state.settings
    log = settings.log_dir / f"{check_name(name)}.log"
    filter = LogFilter.of(level, since)
    parts, size = complete_pieces(log) if follow else (pieces(log), 0)
    if not parts:
        raise InstanceNotFound(name)
    total = sum(piece.lines for piece in parts) if filter.takes_all else sum(1 for _ in _lines(parts, filter))
    if follow:
        first = slice(-_TAIL_LINES if start is None else start, None).indices(total)[0]
        return event_stream(_events(_lines(parts, filter, first, total), Follower(log, size), filter))
    first, last, _ = slice(start, end).indices(total)
    body = _body(_lines(parts, filter, first, last), first, last, total)
    return StreamingResponse(body, media_type="application/json")


def _lines(parts: list[Piece], filter: LogFilter, start: int = 0, end: int | None = None) -> Iterator[str]:
    whole = sum(piece.lines for piece in parts)
    if filter.takes_all:
        return read_lines(parts, start, whole if end is None else end)
    keeps = filter.predicate()
    return islice((line for line in read_lines(parts, 0, whole) if keeps(line)), start, end)


async def _events(past: Iterator[str], follower: Follower, filter: LogFilter) -> AsyncGenerator[Event]:
    """The existing lines, then new ones. Files are read on a thread, no faster than the client reads."""
    while batch := await asyncio.to_thread(lambda: [*islice(past, _BATCH_LINES)]):
        for line in batch:
            yield Event("line", {"line": line})
    keeps = filter.predicate()
    while True:
        found = await asyncio.to_thread(follower.read)
        for item in found:
            if isinstance(item, Gap):
                yield Event("gap", {"reason": "lines were rotated away before they were read"})
            elif keeps(item):
                yield Event("line", {"line": item})
        if not found:
            await asyncio.sleep(_POLL_S)


def _body(lines: Iterator[str], start: int, end: int, total: int) -> Iterator[bytes]:
    part, comma = bytearray(b'{"lines":['), b""
    for line in lines:
        part += comma + orjson.dumps(line)
        comma = b","
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b'],"start":%d,"end":%d,"total_lines":%d}' % (start, end, total)
