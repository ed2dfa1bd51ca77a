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
from teimgr.api.batches.lines import InputRequest, Parsed, pause_s, read_requests, result_line
from teimgr.wire.frames import HttpReply

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


REQUEST = InputRequest(0, 1, "a", "mini", b"{}", 100)
JSON = {"content-type": "application/json"}
USAGE = {"prompt_tokens": 7, "total_tokens": 7}
META = {"api_version": {"version": "2"}}


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        ({"data": [], "usage": USAGE}, 7),
        ({"data": [], "usage": {"text_tokens": 7, "image_pixels": 9, "total_tokens": 8}}, 8),
        (
            {"results": [], "usage": USAGE, "meta": META | {"billed_units": {}, "tokens": {"input_tokens": 7}}},
            7,
        ),
        ({"texts": [], "meta": META | {"billed_units": {"input_tokens": 7}}, "response_type": "embeddings_floats"}, 7),
        ({"meta": META | {"billed_units": {"input_tokens": 7, "images": 1, "image_tokens": 70}}}, 77),
        ({"items": [], "usage": {"input_tokens": 7, "images": 2}}, 7),
        ({"inputs": ['"total_tokens":5']}, 0),
    ],
)
def test_tokens_are_counted_in_the_replies_of_all_dialects(reply: dict[str, object], tokens: int) -> None:
    for before in (b"", b"x" * 10_000):
        body = orjson.dumps({"first": before.decode()} | reply)
        assert result_line("batch_1", REQUEST, HttpReply(200, JSON, body)).tokens == tokens


@pytest.mark.parametrize(("status", "told"), [(200, 400), (429, 429)])
def test_a_reply_that_is_no_json_is_a_refused_line(status: int, told: int) -> None:
    line = result_line("batch_1", REQUEST, HttpReply(status, {"content-type": "application/octet-stream"}, b"abc"))
    assert (line.is_error, orjson.loads(line.data)["response"]["status_code"]) == (True, told)


def test_pauses_double_from_the_first_to_the_longest() -> None:
    assert [pause_s(attempts, 0.0, 0.0) for attempts in (1, 2, 3, 6, 10_000)] == [0.2, 0.4, 0.8, 5.0, 5.0]


def test_a_time_that_the_worker_names_lengthens_a_pause_up_to_the_longest() -> None:
    assert [pause_s(1, named_s, 0.0) for named_s in (0.1, 3.0, 60.0)] == [0.2, 3.0, 5.0]


def test_pauses_of_many_requests_differ() -> None:
    assert [pause_s(1, 3.0, jitter) for jitter in (0.0, 0.5, 1.0)] == [3.0, 2.25, 1.5]
