"""Readers for logs of instances, of one host or of several hosts in one order; `LogFilter` selects lines.

Each host has one log per instance, which all replicas there write. The logs of several hosts are merged by the times of
their lines; a line without a time, as in a traceback, stays after the line before it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import orjson

from teimgr.errors import Overloaded, TeimgrError, Unavailable, ValidationError
from teimgr.observability.log_files import Follower, Gap, Piece, pieces, read_lines
from teimgr.observability.logs import LEVELS, log_path


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Selects lines by minimum level and earliest time; None selects all.

    A line that is not a JSON event, such as one of a traceback, is kept or dropped with the event before it.
    """

    level: int | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, level: str | None, since: str | None) -> LogFilter:
        """Make the filter of a query: the name of a level, and a time in RFC 3339 or in seconds ago.

        Raises:
            ValidationError: an unknown level or an invalid time.
        """
        if level is not None and level.lower() not in LEVELS:
            raise ValidationError(f"level: no level {level!r}; known: {', '.join(LEVELS)}")
        return cls(None if level is None else LEVELS[level.lower()], None if since is None else _since(since))

    @property
    def takes_all(self) -> bool:
        return self.level is None and self.since is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for another host."""
        return {"level": self.level, "since": self.since.isoformat() if self.since else None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LogFilter:
        """The inverse of `to_json`. Raises ValueError, TypeError and KeyError."""
        level, since = values["level"], values["since"]
        return cls(None if level is None else int(level), datetime.fromisoformat(since) if since else None)

    def predicate(self) -> Callable[[str], bool]:
        """Return a function that tells whether to keep each line of a log, called in order."""
        kept = self.since is None  # lines before the first event have no known time

        def keeps(line: str) -> bool:
            nonlocal kept
            if (event := event_of(line)) is not None:
                level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
                is_late = self.since is None or (moment := time_of(event)) is None or moment >= self.since
                kept = is_late and (self.level is None or level >= self.level)
            return kept

        return (lambda line: True) if self.takes_all else keeps


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is not JSON."""
    try:
        event = orjson.loads(line) if line.startswith("{") else {}
    except ValueError:
        return None
    return event if "level" in event else None


def time_of(event: Mapping[str, Any]) -> datetime | None:
    """Return the time of a log line, if it has one: `ts` of ours, `timestamp` of TEI's."""
    text = event.get("ts", event.get("timestamp"))
    try:
        return _aware(datetime.fromisoformat(text)) if isinstance(text, str) else None
    except ValueError:
        return None


def _since(text: str) -> datetime:
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) - timedelta(seconds=float(text))
    try:
        return _aware(datetime.fromisoformat(text.replace(" ", "+")))  # an unescaped plus sign of a query
    except ValueError:
        raise ValidationError(f"since: {text!r} is neither seconds ago nor a moment in RFC 3339") from None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


log = logging.getLogger(__name__)

BATCH_LINES = 200
_BATCH_CHARS = 128 * 2**10
POLL_S = 0.25
OPEN_LIMIT_S = 10.0
"""Time limit for a host to open its log; later hosts are left out."""
MAX_AT_A_TIME = 32
_QUEUED_BATCHES = 4
# Opening a log reads all of it on a thread of a shared pool. Limits on the logs being opened, and on those waiting.
_OPENING = 4
_MAX_WAITING = 32
_LOOK_S = 3.0
_LATE_LINES = 10
_EARLIEST = datetime.min.replace(tzinfo=UTC)

Batch = list[str | Gap]


class OpenLog(Protocol):
    """A log at one moment, and the lines after it. `total` counts the lines that pass the filter."""

    total: int

    @property
    def unread(self) -> Sequence[str]:
        """Sentences about hosts whose part is missing."""

    def past(self, start: int, end: int) -> AsyncGenerator[Batch]:
        """Lines [start, end), in batches."""

    def live(self) -> AsyncGenerator[Batch]:
        """Yield the lines appended after that moment, and an empty batch at intervals."""

    async def close(self) -> None:
        """Release opened resources; `past` and `live` have ended."""


class LogSource(Protocol):
    """The logs on one host, by the name of the instance."""

    host: str

    async def open(self, name: str, filter: LogFilter, *, follow: bool) -> OpenLog | None:
        """Return the log of an instance, or None if the host has none. `live` needs `follow`.

        Raises:
            TeimgrError, OSError: the host does not answer now.
        """


class LocalLogs:
    """The logs in a folder of this host, which is named `host` in a fleet of several."""

    def __init__(self, folder: Path, host: str = "") -> None:
        self.host = host
        self._folder = folder
        self._opening = asyncio.Semaphore(_OPENING)
        self._asked = 0

    async def open(self, name: str, filter: LogFilter, *, follow: bool) -> LocalLog | None:
        """Like `LogSource.open`.

        Raises:
            Overloaded: too many logs are being opened.
        """
        if self._asked >= _OPENING + _MAX_WAITING:
            raise Overloaded("Too many logs are being read; try again later")
        path = log_path(self._folder, name)
        self._asked += 1
        try:
            async with self._opening:
                return await asyncio.to_thread(LocalLog.read, path, filter, follow=follow)
        finally:
            self._asked -= 1


class LocalLog:
    """One log file and its rotated ones. Files are read on a thread, no faster than the lines are consumed."""

    unread: Sequence[str] = ()

    def __init__(self, parts: list[Piece], total: int, filter: LogFilter, follower: Follower | None) -> None:
        self.total = total
        self._parts = parts
        self._filter = filter
        self._follower = follower

    @classmethod
    def read(cls, path: Path, filter: LogFilter, *, follow: bool) -> LocalLog | None:
        """Return the log at `path`, or None. Blocking, as it counts the lines."""
        parts, size = pieces(path), 0
        if not parts:
            return None
        if follow and parts[-1].path == path:  # the follower reads an unfinished last line
            newest = parts.pop()
            parts.append(newest._replace(lines=newest.lines - newest.has_rest))
            size = newest.complete_bytes
        whole = sum(piece.lines for piece in parts)
        total = whole if filter.takes_all else sum(1 for _ in _lines(parts, filter, 0, None))
        return cls(parts, total, filter, Follower(path, size) if follow else None)

    async def past(self, start: int, end: int) -> AsyncGenerator[Batch]:
        lines = _lines(self._parts, self._filter, start, end)
        while batch := await asyncio.to_thread(_batch, lines):
            yield batch

    async def live(self) -> AsyncGenerator[Batch]:
        assert self._follower is not None
        keeps = self._filter.predicate()
        while True:
            found = await asyncio.to_thread(self._follower.read)
            yield [item for item in found if isinstance(item, Gap) or keeps(item)]
            if not found:
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Do nothing: no file is held open."""


def _lines(parts: list[Piece], filter: LogFilter, start: int, end: int | None) -> Iterator[str]:
    whole = sum(piece.lines for piece in parts)
    if filter.takes_all:
        return read_lines(parts, start, whole if end is None else end)
    keeps = filter.predicate()
    return islice((line for line in read_lines(parts, 0, whole) if keeps(line)), start, end)


def _batch(lines: Iterator[str]) -> Batch:
    """Return the next lines, bounded in number and size; empty only at the end."""
    batch: Batch = []
    chars = 0
    for line in lines:
        batch.append(line)
        chars += len(line)
        if len(batch) >= BATCH_LINES or chars >= _BATCH_CHARS:
            break
    return batch


class FleetLogs:
    """The logs of all hosts: of this host, and of `others`, which is called again for each log."""

    def __init__(self, local: LogSource, others: Callable[[], Sequence[LogSource]] = tuple) -> None:
        self._local = local
        self._others = others

    async def open(self, name: str, filter: LogFilter, *, follow: bool) -> OpenLog | None:
        """Return the log of an instance on all hosts that have one; None if no host has one.

        Raises:
            Unavailable: no host has one, and some did not answer.
        """
        if not self._others():
            return await self._local.open(name, filter, follow=follow)
        merged = MergedLog(lambda: [self._local, *self._others()], name, filter, follow=follow)
        if await merged.open():
            return merged
        if merged.unread:
            raise Unavailable(f"no log of '{name}' was read: {'; '.join(merged.unread)}")
        return None


class MergedLog:
    """`OpenLog` of several hosts. Hosts that fail while it is read are left out, and named in a `Gap`."""

    def __init__(
        self, sources: Callable[[], Sequence[LogSource]], name: str, filter: LogFilter, *, follow: bool
    ) -> None:
        self.total = 0
        self._problems: dict[str, str] = {}
        self._sources = sources
        self._name = name
        self._filter = filter
        self._follow = follow
        self._logs: dict[str, OpenLog] = {}
        self._seen: set[str] = set()
        self._asking = asyncio.Semaphore(MAX_AT_A_TIME)

    @property
    def unread(self) -> Sequence[str]:
        return [*self._problems.values()]

    async def open(self) -> bool:
        """Open the log of each host; return whether one of them has it."""
        sources = self._sources()
        found = await asyncio.gather(*map(self._open, sources))
        self._seen = {source.host for source in sources}
        self._logs = {source.host: each for source, each in zip(sources, found, strict=True) if each is not None}
        self.total = sum(each.total for each in self._logs.values())
        return bool(self._logs)

    async def _open(self, source: LogSource) -> OpenLog | None:
        try:
            async with self._asking, asyncio.timeout(OPEN_LIMIT_S):
                return await source.open(self._name, self._filter, follow=self._follow)
        except (TeimgrError, OSError) as error:  # TimeoutError is an OSError
            self._leave_out(source.host, error)
            return None

    def _leave_out(self, host: str, error: BaseException) -> Gap:
        text = f"host {host}: {getattr(error, 'message', '') or str(error) or 'no answer in time'}"
        if self._problems.get(host) != text:
            log.warning("a part of a log is missing", extra={"instance": self._name, "reason": text})
        self._problems[host] = text
        return Gap(text)

    async def past(self, start: int, end: int) -> AsyncGenerator[Batch]:
        """Yield lines [start, end) of all hosts together.

        No host has more than `wanted` of the lines from `start` on, so each is read from `wanted` before its end.
        """
        wanted = self.total - start
        suffixes = {host: max(0, each.total - wanted) for host, each in self._logs.items()}
        skip = sum(each.total - suffixes[host] for host, each in self._logs.items()) - wanted
        left = end - start
        merging = self._merged({host: (each, suffixes[host]) for host, each in self._logs.items()})
        async with aclosing(merging):
            batch: Batch = []
            async for item in merging:
                if isinstance(item, Gap):
                    batch.append(item)
                    continue
                if skip > 0:
                    skip -= 1
                    continue
                if left <= 0:
                    break
                left -= 1
                batch.append(item)
                if len(batch) >= BATCH_LINES:
                    yield batch
                    batch = []
            if batch:
                yield batch

    async def _merged(self, logs: dict[str, tuple[OpenLog, int]]) -> AsyncGenerator[str | Gap]:
        """Yield all lines in the order of time. One batch of each host is held."""
        streams = {host: _Timed(each.past(start, each.total)) for host, (each, start) in logs.items()}
        heap: list[tuple[datetime, int, str]] = []
        order = {host: number for number, host in enumerate(streams)}
        try:
            waiting = [*streams]
            while waiting or heap:
                for host in waiting:
                    try:
                        if (moment := await streams[host].advance()) is not None:
                            heapq.heappush(heap, (moment, order[host], host))
                    except (TeimgrError, OSError) as error:
                        yield self._leave_out(host, error)
                waiting = []
                if heap:
                    _, _, host = heapq.heappop(heap)
                    yield streams[host].item
                    waiting = [host]
        finally:
            for stream in streams.values():
                await stream.close()

    async def live(self) -> AsyncGenerator[Batch]:
        """Yield lines as each host sends them; hosts that join or return are included from then on."""
        queue: asyncio.Queue[tuple[str, Batch | None]] = asyncio.Queue(_QUEUED_BATCHES)
        tasks = {host: asyncio.create_task(self._pump(host, each, queue)) for host, each in self._logs.items()}
        looking = asyncio.create_task(self._look_for_more(tasks, queue), name=f"hosts with a log of {self._name}")
        try:
            while True:
                host, batch = await queue.get()
                if batch is None:
                    del tasks[host]
                    await self._logs.pop(host).close()
                else:
                    yield batch
        finally:
            ending = [looking, *tasks.values()]
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)

    async def _pump(self, host: str, opened: OpenLog, queue: asyncio.Queue[tuple[str, Batch | None]]) -> None:
        """Pass on the lines of one host until it fails: then a `Gap`, and None."""
        try:
            async with aclosing(opened.live()) as batches:
                async for batch in batches:
                    await queue.put((host, batch))
        except (TeimgrError, OSError) as error:
            await queue.put((host, [self._leave_out(host, error)]))
        await queue.put((host, None))

    async def _look_for_more(
        self, tasks: dict[str, asyncio.Task[None]], queue: asyncio.Queue[tuple[str, Batch | None]]
    ) -> None:
        """Follow the log on hosts that lacked it or did not answer, starting with its last lines."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for source in self._sources():
                if source.host in tasks:
                    continue
                if (opened := await self._open(source)) is None:
                    continue
                self._logs[source.host] = opened  # so that `close` closes it
                first = opened.total if source.host in self._seen else max(0, opened.total - _LATE_LINES)
                self._seen.add(source.host)
                async with aclosing(opened.past(first, opened.total)) as past:
                    async for batch in past:
                        await queue.put((source.host, batch))
                tasks[source.host] = asyncio.create_task(self._pump(source.host, opened, queue))

    async def close(self) -> None:
        for each in self._logs.values():
            await each.close()
        self._logs.clear()


class _Timed:
    """Iterates over the lines of one log; `item` is the current one."""

    def __init__(self, batches: AsyncGenerator[Batch]) -> None:
        self.item: str | Gap = ""
        self._batches = batches
        self._items: Iterator[str | Gap] = iter(())
        self._moment = _EARLIEST

    async def advance(self) -> datetime | None:
        """Go to the next line and return its time, or that of the line before it; None at the end."""
        item = next(self._items, None)
        while item is None:
            batch = await anext(self._batches, None)
            if batch is None:
                return None
            self._items = iter(batch)
            item = next(self._items, None)
        self.item = item
        event = event_of(item) if isinstance(item, str) else None
        moment = time_of(event) if event is not None else None
        if moment is not None and moment > self._moment:
            self._moment = moment
        return self._moment

    async def close(self) -> None:
        await self._batches.aclose()
