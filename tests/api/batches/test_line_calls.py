"""Pauses between the attempts of a request of a batch."""

from __future__ import annotations

import orjson
import pytest

from teimgr.api.batches.line_calls import pause_s, result_line
from teimgr.api.batches.lines import InputRequest
from teimgr.wire.frames import HttpReply

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
