"""Bad input is refused in one JSON shape, by a status that says what kind of bad."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

import pytest
from tests.support.rest_listener import Front
from yarl import URL

from teimgr.errors import Code, error_from_code
from teimgr.rest.json_http import BODY_LIMIT_BYTES, Event, error_response, event_stream
from teimgr.wire.status import STATUS

GOOD = {"name": "a", "model_id": "tiny"}
JSON = {"Content-Type": "application/json"}


def failed(failure: dict[str, Any], code: str) -> str:
    """The sentence of a failure in the one shape."""
    assert set(failure) == {"error", "code", "timestamp"}
    assert failure["code"] == code
    assert failure["timestamp"].endswith("Z")
    datetime.fromisoformat(failure["timestamp"])
    return str(failure["error"])


@pytest.mark.clause("M2.2-422", "M2.4-unknown-field")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (GOOD | {"prot": 1}, "unknown field 'prot'; did you mean 'port'?"),
        (GOOD | {"modelid": 1}, "unknown field 'modelid'; did you mean 'model_id'?"),
        (GOOD | {"zzzzzz": 1}, "unknown field 'zzzzzz'; known: dtype, extra_args"),
        ({"name": "a"}, "missing field `model_id`"),
        ({"model_id": "m"}, "missing field `name`"),
        ({"name": None, "model_id": "m"}, "name: "),
        (GOOD | {"model_id": ""}, "model_id: "),
        (GOOD | {"port": "8080"}, "port: Input should be a valid integer (got text '8080')"),
        (GOOD | {"port": True}, "port: "),
        (GOOD | {"port": 8080.0}, "port: "),
        (GOOD | {"port": -1}, "port: Input should be greater than or equal to 0"),
        (GOOD | {"port": 65536}, "port: Input should be less than or equal to 65535"),
        (GOOD | {"port": 10**30}, "port: "),
        (GOOD | {"gpu_id": -1}, "gpu_id: "),
        (GOOD | {"gpu_id": 2**32}, "gpu_id: "),
        (GOOD | {"max_batch_tokens": 0}, "max_batch_tokens: "),
        (GOOD | {"max_batch_tokens": 2**32}, "max_batch_tokens: "),
        (GOOD | {"max_concurrent_requests": 0}, "max_concurrent_requests: "),
        (GOOD | {"startup_timeout_secs": 0}, "startup_timeout_secs: "),
        (GOOD | {"threads": 0}, "threads: "),
        (GOOD | {"extra_args": "--dtype"}, "extra_args: "),
        (GOOD | {"extra_args": ["a", 1]}, "extra_args.1: "),
        (GOOD | {"extra_args": ["x"] * 257}, "extra_args: "),
        (GOOD | {"dtype": "int3"}, "dtype: "),
        (GOOD | {"pooling": 5}, "pooling: "),
        (GOOD | {"kind": "llm"}, "kind: "),
        (GOOD | {"trust_remote_code": "yes"}, "trust_remote_code: "),
        (GOOD | {"wanted_running": False}, "unknown field 'wanted_running'"),
        ([], "body: "),
        ("a", "body: "),
        (None, "body: "),
    ],
)
async def test_a_body_of_another_shape_is_422_and_names_the_field(front: Front, body: Any, says: str) -> None:
    failure = await front.call("POST", "/instances", 422, data=json.dumps(body), headers=JSON)
    assert says in failed(failure, "VALIDATION_ERROR")
    assert front.fleet.list() == []


@pytest.mark.clause("M2.2-400")
@pytest.mark.parametrize("text", ["", "{", '{"name": "a",}', '{"name": "a"} x', "nan", b"\xff\xfe", "[" * 5000])
async def test_what_is_no_json_is_400(front: Front, text: str | bytes) -> None:
    failure = await front.call("POST", "/instances", 400, data=text, headers=JSON)
    assert "Failed to parse the request body as JSON" in failed(failure, "VALIDATION_ERROR")


@pytest.mark.clause("M2.2-415")
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_another_content_type_is_415(front: Front, kind: str) -> None:
    failure = await front.call("POST", "/instances", 415, data=json.dumps(GOOD), headers={"Content-Type": kind})
    assert "Expected request with `Content-Type: application/json`" in failed(failure, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.clause("M2.2-415")
@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"])
async def test_every_spelling_of_json_is_taken(front: Front, kind: str) -> None:
    await front.call("POST", "/instances", 201, data=json.dumps(GOOD), headers={"Content-Type": kind})


@pytest.mark.clause("M2.2-413")
async def test_a_declared_size_over_the_limit_is_413(front: Front) -> None:
    huge = io.BytesIO(b" " * (BODY_LIMIT_BYTES + 1))
    failure = await front.call("POST", "/instances", 413, data=huge, headers=JSON)
    assert str(BODY_LIMIT_BYTES) in failed(failure, "MESSAGE_TOO_LARGE")


@pytest.mark.clause("M2.2-413")
async def test_an_undeclared_size_over_the_limit_is_413(front: Front) -> None:
    async def endless() -> Any:
        for _ in range(BODY_LIMIT_BYTES // 2**16 + 1):
            yield b" " * 2**16

    failure = await front.call("POST", "/instances", 413, data=endless(), headers=JSON)
    failed(failure, "MESSAGE_TOO_LARGE")


async def test_a_body_at_the_limit_is_read(front: Front) -> None:
    text = io.BytesIO(json.dumps(GOOD).encode().ljust(BODY_LIMIT_BYTES))
    await front.call("POST", "/instances", 201, data=text, headers=JSON)


@pytest.mark.clause("M2.4-name")
@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a b", "a/b", "a\\b", "../x", "é", "a\n", "a\0", "x" * 65])
async def test_a_bad_name_is_422_at_creation(front: Front, name: str) -> None:
    failed(await front.create(name, 422), "INVALID_INSTANCE_NAME")


@pytest.mark.clause("M2.4-name")
@pytest.mark.parametrize("name", ["a", "0", "A.b_c-d", "x" * 64])
async def test_a_good_name_is_taken(front: Front, name: str) -> None:
    assert (await front.create(name))["name"] == name


@pytest.mark.clause("M2.7-traversal")
@pytest.mark.parametrize(
    "path", ["a%2Fb", "..%2Fsecret", "..%2fsecret/logs", "a%2Flogs", "a%5Cb", "%2e%2e%2f%2e%2e%2fx/logs"]
)
async def test_an_encoded_separator_in_a_path_is_422(front: Front, path: str, tmp_path) -> None:
    (tmp_path / "secret.log").write_text("secret\n")
    failure = await front.call("GET", URL(f"{front.url}/instances/{path}", encoded=True), 422)
    assert "path separators" in failed(failure, "INVALID_INSTANCE_NAME")


@pytest.mark.clause("M2.7-traversal")
@pytest.mark.parametrize("name", ["a%252Fb", "..", "%2e%2e", "a%00b", "a%20b", "%C3%A9"])
async def test_a_name_that_cannot_exist_has_no_log(front: Front, name: str) -> None:
    async with front.http.get(URL(f"{front.url}/instances/{name}/logs", encoded=True)) as reply:
        assert reply.status in (404, 422)
        assert set(await reply.json()) == {"error", "code", "timestamp"}


@pytest.mark.clause("M2.2-query")
@pytest.mark.parametrize("query", ["start=x", "start=", "end=1.5", "start=2147483648", "end=-2147483649"])
async def test_an_index_that_is_no_i32_is_400(front: Front, query: str) -> None:
    failed(await front.call("GET", f"/instances/a/logs?{query}", 400), "VALIDATION_ERROR")


@pytest.mark.clause("M2-unknown-route")
@pytest.mark.parametrize("path", ["/", "/nope", "/instances/", "/instances/a/", "/instances/a/b/c", "/health/"])
async def test_an_unknown_route_is_404_in_the_same_shape(front: Front, path: str) -> None:
    assert path in failed(await front.call("GET", path, 404), "NOT_FOUND")


@pytest.mark.clause("M2-unknown-route")
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/instances", "GET, HEAD, POST"),
        ("PUT", "/instances/a", "GET, HEAD, PATCH, DELETE"),
        ("GET", "/instances/a/start", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/instances", "GET, HEAD, POST"),
    ],
)
async def test_another_method_is_405_and_says_which_are_allowed(
    front: Front, method: str, path: str, allowed: str
) -> None:
    async with front.http.request(method, path) as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, allowed)
        failed(await reply.json(), "METHOD_NOT_ALLOWED")


@pytest.mark.clause("M2.2-internal")
async def test_a_defect_of_ours_is_500_and_tells_nothing(front: Front, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("the secret of /etc/passwd")

    monkeypatch.setattr(front.fleet, "list", broken)
    failure = await front.call("GET", "/instances", 500)
    assert "secret" not in failed(failure, "INTERNAL_ERROR")


@pytest.mark.clause("M2.2-shape", "M2.2-codes", "D-queue")
@pytest.mark.parametrize("code", Code)
def test_every_failure_has_its_status_and_says_when_to_come_back(code: Code) -> None:
    response = error_response(error_from_code(code, "why"))
    assert response.status_code == STATUS[code].http
    assert failed(json.loads(bytes(response.body)), code.name) == "why"
    assert ("Retry-After" in response.headers) == (STATUS[code].http in (429, 503))


# Server-sent events


async def sent_parts(events: AsyncGenerator[Event], **how: float) -> list[bytes]:
    return [bytes(part) async for part in event_stream(events, **how).body_iterator]  # type: ignore[arg-type]


async def test_an_event_is_a_name_and_json_on_one_line() -> None:
    async def events() -> AsyncGenerator[Event]:
        yield Event("progress", {"text": "two\nlines"})
        yield Event("done", None)

    assert await sent_parts(events()) == [
        b'event: progress\ndata: {"text":"two\\nlines"}\n\n',
        b"event: done\ndata: null\n\n",
    ]


async def test_a_quiet_stream_says_that_it_is_there() -> None:
    go = asyncio.Event()

    async def events() -> AsyncGenerator[Event]:
        await go.wait()
        yield Event("done", 1)

    stream = event_stream(events(), keep_alive_s=0.001).body_iterator
    assert await anext(aiter(stream)) == b": still here\n\n"
    go.set()
    rest = [part async for part in stream]
    assert rest[-1] == b"event: done\ndata: 1\n\n"


async def test_a_reader_that_goes_away_ends_the_source() -> None:
    ended = asyncio.Event()

    async def events() -> AsyncGenerator[Event]:
        try:
            yield Event("first", 1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    stream = event_stream(events(), keep_alive_s=0.001).body_iterator
    await anext(aiter(stream))
    await stream.aclose()  # type: ignore[union-attr]
    assert ended.is_set()
