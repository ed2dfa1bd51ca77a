"""GET /instances/{name}/logs: a slice of an instance's log, or the log as it grows as server-sent events.

A log is read across its rotated files. A follower identifies a file by its first bytes, which start with a time:
rotation moves its content to `.1`, `.2`, …, by renaming or by copying, and the follower continues there. The log of a
deleted instance is still served.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from teimgr.config.settings import Settings
from teimgr.errors import InstanceNotFound, ValidationError
from teimgr.observability.logs import LEVELS, pretty
from teimgr.rest.events import EVENT_STREAM, Event, event_stream
from teimgr.rest.instances import UNKNOWN
from teimgr.rest.schemas import ANY_FAILURE, LogSlice
from teimgr.spec import check_name

CHUNK_BYTES = 2**20
LINE_LIMIT_BYTES = 64 * 2**10
CUT = " … [line cut]"
FOLLOW_CHUNK_BYTES = 256 * 2**10
_HEAD_BYTES = 512


class Piece(NamedTuple):
    """One file of a log: its lines, of which the last may have no end (`has_rest`), and its bytes up to there."""

    path: Path
    lines: int
    complete_bytes: int
    has_rest: bool


def rotated(log: Path) -> Iterator[Path]:
    """The rotated files of a log, newest first."""
    return takewhile(Path.exists, (log.with_name(f"{log.name}.{number}") for number in count(1)))


def pieces(log: Path) -> list[Piece]:
    """The files of a log, oldest first; empty when there is none."""
    return [piece for path in reversed((log, *rotated(log))) if (piece := _scan(path)) is not None]


def read_lines(parts: list[Piece], start: int, end: int) -> Iterator[str]:
    """Lines [start, end) of all files; invalid UTF-8 is replaced, lines over `LINE_LIMIT_BYTES` are cut."""
    before = 0
    for path, lines, *_ in parts:
        first, last = max(start - before, 0), min(end - before, lines)
        if first < last:
            yield from islice(_read_from(path, first), last - first)
        before += lines


def _scan(path: Path) -> Piece | None:
    """None where the file does not exist, as just after a rotation."""
    lines = complete_bytes = size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if ends := chunk.count(b"\n"):
                    lines, complete_bytes = lines + ends, size + chunk.rindex(b"\n") + 1
                size += len(chunk)
    except FileNotFoundError:
        return None
    has_rest = size > complete_bytes
    return Piece(path, lines + has_rest, complete_bytes, has_rest)


def _read_from(path: Path, skip: int) -> Iterator[str]:
    with path.open("rb") as file:
        _skip_lines(file, skip)
        while line := file.readline(LINE_LIMIT_BYTES):
            tail = "" if line.endswith(b"\n") or not _skip_rest(file) else CUT
            yield line.rstrip(b"\r\n").decode("utf-8", "replace") + tail


def _skip_rest(file: BinaryIO) -> bool:
    """Seek to the next line; false where this one had no more bytes."""
    some = False
    while rest := file.readline(CHUNK_BYTES):
        some = True
        if rest.endswith(b"\n"):
            break
    return some


def _skip_lines(file: BinaryIO, lines: int) -> None:
    while lines and (chunk := file.read(CHUNK_BYTES)):
        ends = chunk.count(b"\n")
        if ends >= lines:
            position = 0
            for _ in range(lines):
                position = chunk.index(b"\n", position) + 1
            file.seek(position - len(chunk), os.SEEK_CUR)
            return
        lines -= ends


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines were rotated away before they were read."""


class Follower:
    """Reads what is appended to `log`, from `position` in the file of that name.

    It holds one unfinished line of at most `LINE_LIMIT_BYTES`, and reads at most one chunk at a time.
    """

    def __init__(self, log: Path, position: int) -> None:
        self._log = log
        self._position = position
        self._head = _read(log, 0, min(position, _HEAD_BYTES))
        self._before = b""  # the head of the file before this one
        self._rest = b""
        self._skipping = False

    def read(self) -> list[str | Gap]:
        """The lines completed since the last call, at most a chunk; empty when there are none."""
        found: list[str | Gap] = []
        files = [*reversed([*rotated(self._log)]), self._log]
        at = self._find(files)
        if at is None:
            found += [*self._next_file(), Gap()]
            at = 0
        chunk = _read(files[at], self._position, FOLLOW_CHUNK_BYTES)
        while not chunk and at + 1 < len(files):
            found += self._next_file()
            at += 1
            chunk = _read(files[at], 0, FOLLOW_CHUNK_BYTES)
        return [*found, *self._lines(chunk)]

    def _find(self, files: list[Path]) -> int | None:
        """The index of the current file in `files`, oldest first; None when it was rotated away."""
        newest_first = range(len(files) - 1, -1, -1)
        if self._head:
            return next((at for at in newest_first if _begins(files[at], self._head, self._position)), None)
        if not self._before:
            return len(files) - 1
        before = next((at for at in newest_first if _begins(files[at], self._before, 0)), None)
        return None if before is None else min(before + 1, len(files) - 1)

    def _next_file(self) -> Iterator[str]:
        """Go to the beginning of another file; an unfinished line will not be completed any more."""
        if self._rest:
            yield _text(self._rest)
        self._before, self._head, self._position = self._head or self._before, b"", 0
        self._rest, self._skipping = b"", False

    def _lines(self, chunk: bytes) -> Iterator[str]:
        if len(self._head) == self._position:
            self._head = (self._head + chunk)[:_HEAD_BYTES]
        self._position += len(chunk)
        *complete, rest = (self._rest + chunk).split(b"\n")
        for line in complete:
            if not self._skipping:
                yield _text(line)
            self._skipping = False
        if not self._skipping and len(rest) > LINE_LIMIT_BYTES:
            yield _text(rest)
            self._skipping = True
        self._rest = b"" if self._skipping else rest


def _text(line: bytes) -> str:
    tail = CUT if len(line) > LINE_LIMIT_BYTES else ""
    return line[:LINE_LIMIT_BYTES].rstrip(b"\r").decode("utf-8", "replace") + tail


def _begins(path: Path, head: bytes, size: int) -> bool:
    """Whether a file starts with `head` and has at least `size` bytes."""
    return _read(path, 0, len(head)) == head and (not size or path.stat().st_size >= size)


def _read(path: Path, position: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(size)
    except FileNotFoundError:
        return b""


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
            if (event := _event(line)) is not None:
                level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
                is_late = self.since is None or (moment := _time_of(event)) is None or moment >= self.since
                kept = is_late and (self.level is None or level >= self.level)
            return kept

        return (lambda line: True) if self.takes_all else keeps


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = orjson.loads(line) if line.startswith("{") else {}
    except ValueError:
        return None
    return event if "level" in event else None


def _time_of(event: dict[str, Any]) -> datetime | None:
    text = event.get("ts", event.get("timestamp"))  # our key, and TEI's
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


router = APIRouter(tags=["instances"], responses=ANY_FAILURE)

PLAIN_TEXT = "text/plain"
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
_BOTH = UNKNOWN | {
    200: {"model": LogSlice, "content": {EVENT_STREAM: {}, PLAIN_TEXT: {}}, "description": "a slice, events, or lines"}
}


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
    has {"line": text}, and `gap` means that lines were rotated away before they were read. With `Accept: text/plain`
    both are lines for people: date, level, message, fields.
    """
    settings: Settings = request.app.state.settings
    log = settings.log_dir / f"{check_name(name)}.log"
    filter = LogFilter.of(level, since)
    parts, size = pieces(log), 0
    if not parts:
        raise InstanceNotFound(name)
    if follow and parts[-1].path == log:  # a last line without an end is the follower's
        newest = parts.pop()
        parts.append(newest._replace(lines=newest.lines - newest.has_rest))
        size = newest.complete_bytes
    total = sum(piece.lines for piece in parts) if filter.takes_all else sum(1 for _ in _lines(parts, filter))
    if follow:
        first = slice(-_TAIL_LINES if start is None else start, None).indices(total)[0]
        events = _events(_lines(parts, filter, first, total), Follower(log, size), filter)
        return _plain(_shown(events)) if wants_text(request) else event_stream(events)
    first, last, _ = slice(start, end).indices(total)
    if wants_text(request):
        return _plain(f"{pretty(line)}\n".encode() for line in _lines(parts, filter, first, last))
    body = _body(_lines(parts, filter, first, last), first, last, total)
    return StreamingResponse(body, media_type="application/json")


def wants_text(request: Request) -> bool:
    """Whether the caller asks for lines rather than for JSON or events."""
    return PLAIN_TEXT in request.headers.get("accept", "")


def _plain(lines: Iterable[bytes] | AsyncIterable[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(lines, media_type=PLAIN_TEXT, headers=headers)


async def _shown(events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for event in events:
            line = event.data.get("line") if isinstance(event.data, dict) else None
            yield f"{pretty(line) if line is not None else '… lines were rotated away'}\n".encode()


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
