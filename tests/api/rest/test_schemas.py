"""Request bodies: what is no JSON, too long or of another shape is refused with the field and the limit."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from tests.support.measures import held_s
from tests.support.rest_listener import Front, failed

from teimgr.api.rest.schemas import BODY_LIMIT_BYTES, CreateInstance, parsed_json
from teimgr.http import bodies as http_bodies

GOOD = {"name": "a", "model_id": "tiny"}
JSON = {"Content-Type": "application/json"}


@pytest.mark.clause("M2.2-422", "M2.4-unknown-field")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (GOOD | {"prot": 1}, "unknown field 'prot'; did you mean 'port'?"),
        (GOOD | {"modelid": 1}, "unknown field 'modelid'; did you mean 'model_id'?"),
        (GOOD | {"zzzzzz": 1}, "unknown field 'zzzzzz'; known: cache_bytes, code_revision, dtype"),
        ({"name": "a"}, "missing field `model_id`"),
        ({"model_id": "m"}, "missing field `name`"),
        ({"name": None, "model_id": "m"}, "name: "),
        (GOOD | {"model_id": ""}, "model_id: "),
        (GOOD | {"port": "8080"}, "port: must be a valid integer (got text '8080')"),
        (GOOD | {"port": True}, "port: "),
        (GOOD | {"port": 8080.0}, "port: "),
        (GOOD | {"port": -1}, "port: must be greater than or equal to 0"),
        (GOOD | {"port": 65536}, "port: must be less than or equal to 65535"),
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


@pytest.mark.parametrize(
    "text",
    [
        b'{"name":"a","x":[' + b"[]," * 600_000 + b"[]]}",
        b"{" + b"".join(b'"k%d":0,' % n for n in range(150_000)) + b'"name":"a"}',
        b'{"name":"a","tags":{' + b"".join(b'"k%d":0,' % n for n in range(150_000)) + b'"a":""}}',
    ],
    ids=["lists", "keys", "tags"],
)
def test_a_body_with_more_values_than_a_route_takes_is_refused_and_holds_nobody_up(text: bytes) -> None:
    def parse() -> None:
        with pytest.raises(HTTPException, match="more than 12000 values") as refused:
            parsed_json(text, CreateInstance)
        assert refused.value.status_code == 422

    assert held_s(parse, 2) < 0.15  # 1.3 s for the report on the keys


async def test_a_body_that_does_not_come_is_408(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "BODY_TIMEOUT_S", 0.2)

    async def unfinished() -> Any:
        yield b"{"
        await asyncio.sleep(20)

    failure = await front.call("POST", "/instances", 408, data=unfinished(), headers=JSON)
    assert "did not come in time" in failed(failure, "TIMEOUT")


@pytest.mark.clause("M2.4-name")
@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a b", "a/b", "a\\b", "../x", "é", "a\n", "a\0", "x" * 65])
async def test_a_bad_name_is_422_at_creation(front: Front, name: str) -> None:
    failed(await front.create(name, 422), "INVALID_INSTANCE_NAME")


@pytest.mark.clause("M2.4-name")
@pytest.mark.parametrize("name", ["a", "0", "A.b_c-d", "x" * 64])
async def test_a_good_name_is_taken(front: Front, name: str) -> None:
    assert (await front.create(name))["name"] == name


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/instances?state=running", "unknown query parameter 'state'; did you mean 'status'?"),
        ("POST", "/instances?wiat=true", "unknown query parameter 'wiat'; did you mean 'wait'?"),
        ("GET", "/instances/a?verbose=1", "unknown query parameter 'verbose'; this route has no query parameters"),
        ("GET", "/health/all?prob=true", "unknown query parameter 'prob'; did you mean 'probe'?"),
    ],
)
async def test_an_unknown_parameter_is_refused_and_nothing_is_done(
    front: Front, method: str, path: str, says: str
) -> None:
    refused = await front.call(method, path, 400, json={"name": "a", "model_id": "tiny"})
    assert failed(refused, "VALIDATION_ERROR") == f"Validation error: {says}"
    assert await front.call("GET", "/instances", 200) == []


async def test_known_parameters_and_those_of_probes_are_taken(front: Front) -> None:
    await front.call("GET", "/instances?status=running&tag=a", 200)
    await front.call("GET", "/health?from=balancer", 200)
