"""Lines of input files: what is a request, and what is wrong with a line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.api.batches.conftest import EMBEDDINGS, line

from teimgr.api.batches.batch_record import BatchFault
from teimgr.api.batches.disk import Disk
from teimgr.api.batches.lines import InputRequest, Parsed, read_requests

LIMIT_BYTES = 8192


async def read(path: Path, data: bytes) -> list[list[Parsed]]:
    path.write_bytes(data)
    disk = Disk()
    try:
        return [chunk async for chunk in read_requests(disk, path, EMBEDDINGS, LIMIT_BYTES)]
    finally:
        disk.close()


async def fault(path: Path, value: Any) -> tuple[str, str | None]:
    [[found]] = await read(path, value if isinstance(value, bytes) else orjson.dumps(value))
    assert isinstance(found, BatchFault)
    assert found.line == 1
    return found.code, found.param


async def test_requests_are_numbered_by_row_and_by_line(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + orjson.dumps(line("a")) + b"\r\n\n  \n" + orjson.dumps(line("b", "東京"))
    [[first, second]] = await read(tmp_path / "in", data)

    assert isinstance(first, InputRequest)
    assert isinstance(second, InputRequest)
    assert (first.row, first.number, first.custom_id) == (0, 1, "a")
    assert (second.row, second.number, second.custom_id) == (1, 4, "b")
    assert orjson.loads(second.body) == {"model": "mini", "input": "東京"}


async def test_what_follows_megabytes_of_blank_lines_is_read(tmp_path: Path) -> None:
    """The first chunk of blank lines alone was taken for the end of the file."""
    first, last = (orjson.dumps(line(name)) + b"\n" for name in "ab")
    chunks = await read(tmp_path / "in", first + (b" " * 3000 + b"\n") * 1000 + b"\r\n" + last)

    found = [each for chunk in chunks for each in chunk]
    assert [each.custom_id for each in found if isinstance(each, InputRequest)] == ["a", "b"]
    assert all(chunks)


async def test_a_long_file_comes_in_chunks(tmp_path: Path) -> None:
    chunks = await read(tmp_path / "in", b"".join(orjson.dumps(line(f"r-{n}")) + b"\n" for n in range(2000)))

    assert len(chunks) > 2
    assert [each.row for chunk in chunks for each in chunk if isinstance(each, InputRequest)] == list(range(2000))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"{half", ("invalid_json_line", None)),
        (b"[1]", ("invalid_json_line", None)),
        (b"\xff", ("invalid_json_line", None)),
        ({"method": "POST"}, ("missing_required_parameter", "custom_id")),
        (line(""), ("missing_required_parameter", "custom_id")),
        (line("a") | {"custom_id": 5}, ("invalid_type", "custom_id")),
        (line("x" * 513), ("string_above_max_length", "custom_id")),
        (line("a", method="GET"), ("invalid_method", "method")),
        (line("a", url="/v1/rerank"), ("mismatched_endpoint", "url")),
        (line("a", body=None), ("missing_required_parameter", "body")),
        (line("a", body={"input": "x"}), ("missing_required_parameter", "body.model")),
        (line("a", body={"model": 1}), ("invalid_type", "body.model")),
        (line("a", body={"model": "m" * 4097}), ("string_above_max_length", "body.model")),
        (line("a", "x" * LIMIT_BYTES), ("line_too_long", None)),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, value: Any, expected: tuple[str, str | None]) -> None:
    assert await fault(tmp_path / "in", value) == expected


async def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    data = orjson.dumps(line("a", "x" * 3_000_000)) + b"\n" + orjson.dumps(line("b"))
    [first], [second] = await read(tmp_path / "in", data)

    assert isinstance(first, BatchFault)
    assert isinstance(second, InputRequest)
    assert (second.row, second.number) == (1, 2)


async def test_a_file_whose_opening_is_cancelled_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it to read ends when it is opened to write
    disk = Disk()
    requests = read_requests(disk, path, EMBEDDINGS, LIMIT_BYTES)
    reading = asyncio.ensure_future(anext(requests))
    await asyncio.wait({reading}, timeout=0)
    reading.cancel()
    writer = await asyncio.to_thread(path.open, "wb")
    with pytest.raises(asyncio.CancelledError):
        await reading
    disk.close()

    with writer, pytest.raises(BrokenPipeError):
        os.write(writer.fileno(), b"x")
