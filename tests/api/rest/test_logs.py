"""GET /instances/{name}/logs: slices of a log and its rotated files; a log as it grows, filtered, through rotation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.rest_listener import Front

from teimgr.config.settings import Settings
from teimgr.observability import logs
from teimgr.observability.log_files import (
    CHUNK_BYTES,
    CUT,
    FOLLOW_CHUNK_BYTES,
    LINE_LIMIT_BYTES,
    Follower,
    Gap,
    pieces,
    read_lines,
)
from teimgr.observability.logs import open_log, shrink

LIMIT_S = 20.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
FIVE = [f"line {n}" for n in range(5)]


@pytest.fixture
def log(settings: Settings) -> Path:
    settings.log_dir.mkdir()
    return settings.log_dir / "a.log"


@pytest.mark.clause("M2.7-slice")
@pytest.mark.parametrize(
    ("query", "start", "end"),
    [
        ("", 0, 5),
        ("start=0&end=2", 0, 2),
        ("start=3", 3, 5),
        ("end=2", 0, 2),
        ("start=-2", 3, 5),
        ("end=-2", 0, 3),
        ("start=-4&end=-1", 1, 4),
        ("start=-100", 0, 5),
        ("end=100", 0, 5),
        ("start=9&end=2", 5, 2),
        ("start=5", 5, 5),
        ("start=2&end=2", 2, 2),
        ("start=-2147483648&end=2147483647", 0, 5),
        ("start=1&follow=false&tail=3", 1, 5),
    ],
)
async def test_slices_are_those_of_python(front: Front, log: Path, query: str, start: int, end: int) -> None:
    log.write_text("\n".join(FIVE) + "\n")
    got = await front.call("GET", f"/instances/a/logs?{query}", 200)
    assert got == {"lines": FIVE[start:end], "start": start, "end": end, "total_lines": 5}


async def test_the_log_of_the_daemon_is_read_as_that_of_an_instance(front: Front, log: Path) -> None:
    root = logging.getLogger()
    logs.keep_in_file(log.with_name("_daemon.log"), 2**20, 1)
    handler = root.handlers[-1]
    try:
        logging.getLogger("teimgr.audit").warning("change", extra={"by": "key ops"})
    finally:
        root.removeHandler(handler)
        handler.close()

    (line,) = (await front.call("GET", "/logs", 200))["lines"]
    assert json.loads(line) | {"ts": ""} == {
        **{"ts": "", "level": "warning", "logger": "teimgr.audit", "message": "change", "by": "key ops"}
    }
    assert log.with_name("_daemon.log").stat().st_mode & 0o777 == 0o640
    assert (await front.call("GET", "/instances/_daemon/logs", 422))["code"] == "INVALID_INSTANCE_NAME"


@pytest.mark.clause("M2.7-deleted")
async def test_the_log_of_a_deleted_instance_is_served(front: Front, log: Path) -> None:
    await front.create("a")
    log.write_text("last words\n")
    await front.call("DELETE", "/instances/a", 200)
    assert (await front.call("GET", "/instances/a/logs", 200))["lines"] == ["last words"]


async def test_rotated_files_are_read_through_oldest_first(front: Front, log: Path) -> None:
    for suffix, first in ((".2", 0), (".1", 2), ("", 4)):
        log.with_name(log.name + suffix).write_text(f"line {first}\nline {first + 1}\n")
    whole = await front.call("GET", "/instances/a/logs", 200)
    assert whole["lines"] == [f"line {n}" for n in range(6)]
    middle = await front.call("GET", "/instances/a/logs?start=1&end=-1", 200)
    assert middle == {"lines": [f"line {n}" for n in range(1, 5)], "start": 1, "end": 5, "total_lines": 6}


async def test_an_empty_log_has_no_lines(front: Front, log: Path) -> None:
    log.touch()
    got = await front.call("GET", "/instances/a/logs?start=-3", 200)
    assert got == {"lines": [], "start": 0, "end": 0, "total_lines": 0}


async def test_a_last_line_without_its_end_counts_and_bad_bytes_are_replaced(front: Front, log: Path) -> None:
    log.write_bytes(b'windows\r\n\n\xff\x00"\\ tail')
    got = await front.call("GET", "/instances/a/logs", 200)
    assert got["lines"] == ["windows", "", '\ufffd\x00"\\ tail']
    assert got["total_lines"] == 3


async def test_many_parts_make_one_document(front: Front, log: Path) -> None:
    lines = [f"{n} " + "x" * 100 for n in range(20_000)]
    log.write_text("\n".join(lines))
    assert (await front.call("GET", "/instances/a/logs", 200))["lines"] == lines


async def test_head_of_a_log_has_no_body(front: Front, log: Path) -> None:
    log.write_text("\n".join(FIVE))
    async with front.http.head("/instances/a/logs") as reply:
        assert (reply.status, await reply.read()) == (200, b"")


def test_a_line_that_never_ends_is_cut(log: Path) -> None:
    log.write_bytes(b"a" * (3 * CHUNK_BYTES) + b"\nnext\n" + b"b" * LINE_LIMIT_BYTES)
    assert list(read_lines(pieces(log), 0, 3)) == ["a" * LINE_LIMIT_BYTES + CUT, "next", "b" * LINE_LIMIT_BYTES]


def test_a_slice_of_a_large_log_takes_little_memory(log: Path) -> None:
    line = b"x" * 99 + b"\n"
    with log.open("wb") as file:
        for _ in range(400):
            file.write(line * 1000)
    tracemalloc.start()
    try:
        parts = pieces(log)
        tail = list(read_lines(parts, 399_990, 400_000))
        whole = sum(1 for _ in read_lines(parts, 0, 400_000))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(tail), whole, parts[0].lines) == (10, 400_000, 400_000)
    assert peak_bytes < 8 * CHUNK_BYTES


def event(level: str, minutes: float, message: str) -> str:
    """A line of our own logs, some minutes after noon."""
    moment = (NOON + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")
    return json.dumps({"ts": moment, "level": level, "message": message})


EVENTS = [
    "words before any event",
    event("info", 0, "start"),
    event("error", 1, "broken"),
    "Traceback of it",
    event("debug", 2, "detail"),
    event("warning", 3, "late"),
]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("level=debug", [0, 1, 2, 3, 4, 5]),
        ("level=info", [0, 1, 2, 3, 5]),
        ("level=WARN", [0, 2, 3, 5]),
        ("level=error", [0, 2, 3]),
        ("since=2026-11-21T12:01:00Z", [2, 3, 4, 5]),
        ("since=2026-11-21T13:01:00%2B01:00", [2, 3, 4, 5]),
        ("since=2026-11-21T13:01:00+01:00", [2, 3, 4, 5]),
        ("since=2026-11-21T12:02:00Z&level=warning", [5]),
        ("level=error&start=-1", [3]),
        ("level=info&start=1&end=3", [1, 2]),
        ("since=1e-9", []),
    ],
)
async def test_filters_look_at_structured_lines(front: Front, log: Path, query: str, wanted: list[int]) -> None:
    log.write_text("\n".join(EVENTS) + "\n")
    got = await front.call("GET", f"/instances/a/logs?{query}", 200)
    assert got["lines"] == [EVENTS[n] for n in wanted]
    assert got["end"] - got["start"] == len(wanted)


async def test_since_may_be_seconds_ago(front: Front, log: Path) -> None:
    now = datetime.now(UTC)
    lines = [json.dumps({"ts": (now - timedelta(seconds=s)).isoformat(), "level": "info"}) for s in (900, 100)]
    log.write_text("\n".join(lines) + "\n")
    assert (await front.call("GET", "/instances/a/logs?since=300", 200))["lines"] == lines[1:]


@pytest.mark.parametrize("query", ["level=loud", "since=yesterday", "since=1e999", "since=nan"])
async def test_what_is_no_filter_is_refused(front: Front, log: Path, query: str) -> None:
    log.touch()
    assert (await front.call("GET", f"/instances/a/logs?{query}", 400))["code"] == "VALIDATION_ERROR"


class Stream:
    """A follower's end of the wire."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    async def next(self) -> tuple[str, str]:
        """The next event: its name, and its line or reason."""
        async with asyncio.timeout(LIMIT_S):
            name = ""
            async for raw in self._reply.content:
                field, _, value = raw.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    return name, next(iter(json.loads(value).values()))
        raise AssertionError("the stream ended")

    async def lines(self, count: int) -> list[str]:
        found = [await self.next() for _ in range(count)]
        assert {name for name, _ in found} <= {"line"}, found
        return [line for _, line in found]


@asynccontextmanager
async def following(front: Front, query: str = "") -> AsyncIterator[Stream]:
    async with front.http.get(f"/instances/a/logs?follow=true{query}") as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        yield Stream(reply)


def append(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


async def test_a_follower_gets_the_last_lines_and_then_each_new_one(front: Front, log: Path) -> None:
    log.with_name("a.log.1").write_text("".join(f"line {n}\n" for n in range(8)))
    append(log, "line 8", "line 9", "line 10", "line 11")
    async with following(front) as stream:
        assert await stream.lines(10) == [f"line {n}" for n in range(2, 12)]
        append(log, "line 12")
        assert await stream.lines(1) == ["line 12"]
        append(log, *(f"more {n}" for n in range(1000)))
        assert await stream.lines(1000) == [f"more {n}" for n in range(1000)]


async def test_a_line_comes_once_it_is_whole(front: Front, log: Path) -> None:
    log.write_text("whole\nhal")
    async with following(front, "&start=0") as stream:
        assert await stream.lines(1) == ["whole"]
        append(log, "f")
        assert await stream.lines(1) == ["half"]


async def test_a_follower_reads_on_through_rotation(front: Front, log: Path) -> None:
    append(log, event("info", 0, "first"))
    async with following(front, "&start=0") as stream:
        assert await stream.lines(1) == [event("info", 0, "first")]
        append(log, event("info", 1, "unread when the file is rotated"))
        assert shrink(log, 1, 2)
        append(log, event("info", 2, "in the new file"))
        assert await stream.lines(2) == [
            event("info", 1, "unread when the file is rotated"),
            event("info", 2, "in the new file"),
        ]


async def test_a_follower_filters_what_comes(front: Front, log: Path) -> None:
    append(log, *EVENTS)
    async with following(front, "&level=error&start=0") as stream:
        assert await stream.lines(3) == [EVENTS[0], EVENTS[2], EVENTS[3]]
        append(log, event("info", 4, "no"), event("error", 5, "yes"), "its traceback")
        assert await stream.lines(2) == [event("error", 5, "yes"), "its traceback"]


async def test_nobody_follows_a_log_that_never_was(front: Front) -> None:
    await front.call("GET", "/instances/a/logs?follow=true", 404)


def stand_behind(log: Path, turns: int, keep: int) -> list[str | Gap]:
    """What a follower reads that looked away while the log was rotated so often."""
    append(log, event("info", 0, "seen"))
    follower = Follower(log, log.stat().st_size)
    for turn in range(turns):
        append(log, event("info", turn + 1, f"turn {turn}"))
        assert shrink(log, 1, keep)
    append(log, event("info", 100, "last"))
    found: list[str | Gap] = []
    while some := follower.read():
        found += some
    return found


def test_a_follower_that_looked_away_reads_all_files_that_are_left(log: Path) -> None:
    expected = [event("info", turn + 1, f"turn {turn}") for turn in range(3)] + [event("info", 100, "last")]
    assert stand_behind(log, 3, keep=5) == expected


def test_a_follower_that_falls_behind_is_told(log: Path) -> None:
    expected = [event("info", turn + 1, f"turn {turn}") for turn in (3, 4)] + [event("info", 100, "last")]
    assert stand_behind(log, 5, keep=2) == [Gap(), *expected]


def test_a_renamed_file_is_read_to_its_end(log: Path) -> None:
    follower = Follower(log, 0)
    append(log, event("info", 0, "one"))
    assert follower.read() == [event("info", 0, "one")]
    append(log, event("info", 1, "two"))
    with os.fdopen(open_log(log, 1, 3), "a") as file:
        file.write(event("info", 2, "three") + "\n")
    assert follower.read() == [event("info", 1, "two")]
    assert follower.read() == [event("info", 2, "three")]


def test_a_file_that_is_rotated_while_it_is_looked_up_is_read_under_its_other_name(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, event("info", 0, "one"))
    follower, find = Follower(log, log.stat().st_size), Follower._find
    append(log, event("info", 1, "two"))

    def rotate_behind_it(self: Follower, files: list[Path]) -> int | None:
        found = find(self, files)
        monkeypatch.setattr(Follower, "_find", find)
        assert shrink(log, 1, 3)
        append(log, event("info", 2, "three, which is longer than what was there before"))
        return found

    monkeypatch.setattr(Follower, "_find", rotate_behind_it)
    found = [item for _ in range(3) for item in follower.read()]
    assert found == [event("info", 1, "two"), event("info", 2, "three, which is longer than what was there before")]


def test_a_follower_holds_little_of_a_line_that_never_ends(log: Path) -> None:
    log.touch()
    follower = Follower(log, 0)
    with log.open("ab") as file:
        file.write(b"x" * (3 * FOLLOW_CHUNK_BYTES) + b"\nnext\n")
    found = [item for _ in range(5) for item in follower.read()]
    assert found == ["x" * LINE_LIMIT_BYTES + CUT, "next"]


SHOWN = "2026-11-21 12:00:00.000 warning  a hot day                            degrees=31 teimgr.x"


def _event_line() -> str:
    event = {"ts": "2026-11-21T12:00:00.000000Z", "level": "warning", "logger": "teimgr.x"}
    return json.dumps(event | {"message": "a hot day", "degrees": 31})


async def test_a_slice_is_lines_for_people_where_plain_text_is_accepted(front: Front, log: Path) -> None:
    log.write_text(f"{_event_line()}\nTraceback of a library\n")
    async with front.http.get("/instances/a/logs?level=info", headers={"Accept": "text/plain"}) as reply:
        assert reply.content_type == "text/plain"
        assert (await reply.text()).splitlines() == [SHOWN, "Traceback of a library"]


async def test_a_log_is_followed_in_lines_for_people(front: Front, log: Path) -> None:
    log.write_text(f"{_event_line()}\n")
    async with (
        asyncio.timeout(LIMIT_S),
        front.http.get("/instances/a/logs?follow=true", headers={"Accept": "text/plain"}) as reply,
    ):
        assert (await reply.content.readline()).decode() == f"{SHOWN}\n"
        with log.open("a") as file:
            file.write("more\n")
        assert await reply.content.readline() == b"more\n"
