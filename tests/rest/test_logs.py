"""GET /instances/{name}/logs: Python slices over the log and its rotated files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from tests.support.rest_listener import Front

from teimgr.config.settings import Settings
from teimgr.rest.log_files import CHUNK_BYTES, CUT, LINE_LIMIT_BYTES, pieces, read_lines

FIVE = [f"line {n}" for n in range(5)]


@pytest.fixture
def log(settings: Settings) -> Path:
    settings.log_dir.mkdir()
    return settings.log_dir / "ghost.log"


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
    got = await front.call("GET", f"/instances/ghost/logs?{query}", 200)
    assert got == {"lines": FIVE[start:end], "start": start, "end": end, "total_lines": 5}


@pytest.mark.clause("M2.7-deleted")
async def test_the_log_of_a_deleted_instance_is_served(front: Front, log: Path) -> None:
    await front.create("ghost")
    log.write_text("last words\n")
    await front.call("DELETE", "/instances/ghost", 200)
    assert (await front.call("GET", "/instances/ghost/logs", 200))["lines"] == ["last words"]


async def test_rotated_files_are_read_through_oldest_first(front: Front, log: Path) -> None:
    for suffix, first in ((".2", 0), (".1", 2), ("", 4)):
        log.with_name(log.name + suffix).write_text(f"line {first}\nline {first + 1}\n")
    whole = await front.call("GET", "/instances/ghost/logs", 200)
    assert whole["lines"] == [f"line {n}" for n in range(6)]
    middle = await front.call("GET", "/instances/ghost/logs?start=1&end=-1", 200)
    assert middle == {"lines": [f"line {n}" for n in range(1, 5)], "start": 1, "end": 5, "total_lines": 6}


async def test_an_empty_log_has_no_lines(front: Front, log: Path) -> None:
    log.touch()
    got = await front.call("GET", "/instances/ghost/logs?start=-3", 200)
    assert got == {"lines": [], "start": 0, "end": 0, "total_lines": 0}


async def test_a_last_line_without_its_end_counts_and_bad_bytes_are_replaced(front: Front, log: Path) -> None:
    log.write_bytes(b'windows\r\n\n\xff\x00"\\ tail')
    got = await front.call("GET", "/instances/ghost/logs", 200)
    assert got["lines"] == ["windows", "", '\ufffd\x00"\\ tail']
    assert got["total_lines"] == 3


async def test_many_parts_make_one_document(front: Front, log: Path) -> None:
    lines = [f"{n} " + "x" * 100 for n in range(20_000)]
    log.write_text("\n".join(lines))
    assert (await front.call("GET", "/instances/ghost/logs", 200))["lines"] == lines


async def test_head_of_a_log_has_no_body(front: Front, log: Path) -> None:
    log.write_text("\n".join(FIVE))
    async with front.http.head("/instances/ghost/logs") as reply:
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
