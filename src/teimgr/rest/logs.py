"""GET /instances/{name}/logs: a slice of an instance's log, streamed, or the log as it grows.

The fleet is not consulted: the log of a deleted instance is still served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
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
from teimgr.rest.log_files import Follower, Gap, Piece, complete_pieces, pieces, read_lines
from teimgr.rest.schemas import LogSlice
from teimgr.rest.sse import MEDIA_TYPE, Event, event_stream
from teimgr.spec import check_name

# TEI's word and ours.
_TIMES = ("ts", "timestamp")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """At least this level, not before this moment; None for any. A line that is no event, such as one of a traceback,
    goes with the event before it."""

    level: int | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, level: str | None, since: str | None) -> LogFilter:
        """What a query says: a level's word, and a moment in RFC 3339 or seconds ago.

        Raises:
            ValidationError: one of them is no such thing.
        """
        if level is not None and level.lower() not in LEVELS:
            raise ValidationError(f"level: no level {level!r}; known: {', '.join(LEVELS)}")
        return cls(None if level is None else LEVELS[level.lower()], None if since is None else _moment(since))

    @property
    def takes_all(self) -> bool:
        """Whether nothing is left out."""
        return self.level is None and self.since is None

    def sieve(self) -> Callable[[str], bool]:
        """What says of each line whether it is wanted; it is asked in order."""
        wanted = self.since is None  # what stands before the first event has no time that we know of

        def takes(line: str) -> bool:
            nonlocal wanted
            event = _event(line)
            wanted = wanted if event is None else self._wants(event)
            return wanted

        return (lambda line: True) if self.takes_all else takes

    def _wants(self, event: dict[str, Any]) -> bool:
        level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
        if self.level is not None and level < self.level:
            return False
        return self.since is None or (moment := _time_of(event)) is None or moment >= self.since


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if "level" in event else None


def _time_of(event: dict[str, Any]) -> datetime | None:
    said = next((event[key] for key in _TIMES if key in event), None)
    try:
        return _aware(datetime.fromisoformat(said)) if isinstance(said, str) else None
    except ValueError:
        return None


def _moment(text: str) -> datetime:
    try:
        return datetime.now(UTC) - timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    try:
        return _aware(datetime.fromisoformat(text.replace(" ", "+")))  # a plus sign that the query did not escape
    except ValueError:
        raise ValidationError(f"since: {text!r} is neither seconds ago nor a moment in RFC 3339") from None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


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
