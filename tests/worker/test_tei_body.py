"""Bodies of the TEI routes: what is read, and how the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.requests import Request

from teimgr.worker.tei_body import BodyRefused, EmbedBody, read_body

LIMIT_BYTES = 1000


async def read(body: bytes | dict[str, Any] | list[Any], content_type: str | None = "application/json") -> EmbedBody:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    chunks = [sent[start : start + 100] for start in range(0, len(sent), 100)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    request = Request({"type": "http", "method": "POST", "path": "/embed", "headers": headers}, receive)
    return await read_body(request, EmbedBody, LIMIT_BYTES)


async def refusal(body: Any, content_type: str | None = "application/json") -> tuple[int, str]:
    with pytest.raises(BodyRefused) as caught:
        await read(body, content_type)
    return caught.value.status, caught.value.text


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
async def test_another_content_type_is_415(content_type: str | None) -> None:
    assert await refusal({"inputs": "a"}, content_type) == (
        415,
        "Expected request with `Content-Type: application/json`",
    )


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
async def test_every_json_content_type_is_read(content_type: str) -> None:
    assert (await read({"inputs": "a"}, content_type)).inputs == "a"


async def test_a_body_over_the_limit_is_413() -> None:
    assert (await read(b'{"inputs": "' + b"a" * (LIMIT_BYTES - 14) + b'"}')).inputs

    assert await refusal({"inputs": "a" * LIMIT_BYTES}) == (
        413,
        "Failed to buffer the request body: length limit exceeded",
    )


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"inputs": "\\ud800"}', b'{"inputs": NaN}', b"[" * 900])
async def test_what_is_no_json_is_400(body: bytes) -> None:
    status, text = await refusal(body)

    assert status == 400
    assert text.startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"inputs": None},
        {"inputs": 5},
        {"inputs": [1, "a"]},
        {"inputs": ["a", None]},
        {"inputs": [["a", "b"]]},
        {"inputs": "a", "normalize": None},
        {"inputs": "a", "normalize": "true"},
        {"inputs": "a", "normalize": 1},
        {"inputs": "a", "truncation_direction": None},
        {"inputs": "a", "truncation_direction": "LEFT"},
        {"inputs": "a", "truncate": 1},
        {"inputs": "a", "prompt_name": 1},
        {"inputs": "a", "dimensions": -1},
        {"inputs": "a", "dimensions": 1.5},
        {"inputs": "a", "dimensions": 2**32},
        {"inputs": "a", "dimensions": True},
    ],
)
async def test_json_of_another_shape_is_422(body: Any) -> None:
    status, text = await refusal(body)

    assert status == 422
    assert text.startswith("Failed to deserialize the JSON body into the target type: ")


async def test_only_these_fields_take_null() -> None:
    body = await read({"inputs": "a", "truncate": None, "prompt_name": None, "dimensions": None})

    assert (body.truncate, body.prompt_name, body.dimensions) == (None, None, None)


async def test_the_defaults_are_teis() -> None:
    body = await read({"inputs": ["a"]})

    assert body.normalize is True
    assert body.truncate is None
    assert body.truncation_direction == "right"


@pytest.mark.parametrize("name", ["left", "Left", "right", "Right"])
async def test_the_four_names_of_a_direction(name: str) -> None:
    assert (await read({"inputs": "a", "truncation_direction": name})).truncation_direction == name


async def test_unknown_fields_are_passed_over() -> None:
    assert (await read({"inputs": "a", "model": "gpt", "nested": {"a": [None]}})).inputs == "a"
