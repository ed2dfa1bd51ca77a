"""The instance's own HTTP port: bodies, statuses, headers and texts of Text Embeddings Inference."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from starlette.requests import Request
from tests.support.polling import eventually
from tests.support.rest_listener import MODEL
from tests.support.worker_process import LIMIT_S, OFFLINE, Connect, WorkerLink, WorkerProcess, arrow
from tests.worker.tei_client import COST_HEADERS, TeiClient, Told

from teimgr.errors import DeadlineExceeded
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import Flag, Method
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.http_port import InstancePort


@pytest.fixture
async def http(worker: WorkerProcess, link: WorkerLink) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(worker.url, timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
        yield session


async def post(http: aiohttp.ClientSession, body: Any) -> tuple[int, str, str]:
    """Status, media type and text of a POST /embed; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with http.post("/embed", data=data, headers={"content-type": "application/json"}) as reply:
        return reply.status, reply.content_type, await reply.text()


async def counted(http: aiohttp.ClientSession, series: str) -> float:
    """The value of `series` on /metrics, 0 where it is absent."""
    async with http.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), 0.0)


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_health_is_an_empty_200(http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(path) as reply:
        assert (reply.status, await reply.read()) == (200, b"")


async def test_all_that_ask_for_health_share_a_self_test_and_one_that_hangs_is_unhealthy() -> None:
    class Engine:
        """One whose self-test ends when it may."""

        def __init__(self) -> None:
            self.info, self.tests, self.may_end = replace(MODEL), 0, threading.Event()

        def stats(self) -> Any:
            raise NotImplementedError

        def self_test(self, timeout_s: float) -> None:
            self.tests += 1
            assert self.may_end.wait(LIMIT_S)
            raise DeadlineExceeded("the device gave no answer")

    engine, dispatcher = Engine(), Dispatcher(WorkerSpec(name="i", model_id="m", port=1))
    dispatcher.attach(cast(Any, engine))
    port, request = InstancePort(dispatcher), Request({"type": "http", "headers": []})
    asking = [asyncio.create_task(port.health(request)) for _ in range(20)]
    await eventually(lambda: engine.tests == 1)
    engine.may_end.set()
    replies = await asyncio.gather(*asking)

    assert {reply.status_code for reply in replies} == {503}
    assert b"unhealthy" in replies[0].body
    assert engine.tests == 1
    assert (await port.health(request)).status_code == 503
    assert engine.tests == 2
    dispatcher.close()


async def test_info_says_what_tei_says(http: aiohttp.ClientSession, worker: WorkerProcess) -> None:
    async with http.get("/info") as reply:
        info = await reply.json()

    assert list(info)[:6] == [
        "model_id",
        "model_sha",
        "model_dtype",
        "served_model_name",
        "model_type",
        "max_concurrent_requests",
    ]
    assert info["model_id"] == info["served_model_name"] == worker.spec.model_id
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_client_batch_size"] == 32
    assert info["auto_truncate"] is True


async def test_metrics_are_plain_text_and_count(http: aiohttp.ClientSession) -> None:
    before = await counted(http, 'te_request_count{method="single"}')
    await post(http, {"inputs": "fog"})

    assert await counted(http, 'te_request_count{method="single"}') == before + 1
    assert "te_queue_size" in await (await http.get("/metrics")).text()


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/info", "/metrics", "/docs/", "/api-doc/openapi.json"])
async def test_what_is_got_can_be_headed(http: aiohttp.ClientSession, path: str) -> None:
    async with http.head(path) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [("GET", "/embed", 405), ("POST", "/info", 405), ("GET", "/no", 404), ("POST", "/embed/", 404), ("PUT", "/", 405)],
)
async def test_what_is_not_there_has_no_body(http: aiohttp.ClientSession, verb: str, path: str, status: int) -> None:
    async with http.request(verb, path) as reply:
        assert (reply.status, await reply.read()) == (status, b"")


async def test_one_text_gives_a_list_of_one_vector_and_eight_headers(
    http: aiohttp.ClientSession, link: WorkerLink
) -> None:
    async with http.post("/embed", json={"inputs": "the quick fox"}) as reply:
        vectors = await reply.json()
        headers = [name for name in COST_HEADERS if name in reply.headers]

    assert headers == list(COST_HEADERS)
    assert reply.headers["x-compute-type"] == "gpu+optimized"
    assert reply.headers["x-compute-characters"] == "13"
    assert all(int(reply.headers[name]) >= 0 for name in COST_HEADERS[1:])
    expected = (await link.answer(link.embed("the quick fox", flags=Flag.WAIT))).vector
    assert np.allclose(vectors, [expected], atol=1e-6)


async def test_options_are_obeyed(http: aiohttp.ClientSession) -> None:
    async def vectors(**body: Any) -> np.ndarray:
        status, _, text = await post(http, body)
        assert status == 200, text
        return np.array(json.loads(text))

    plain = await vectors(inputs=["fog", "dog"])
    assert plain.shape == (2, 32)
    assert (await vectors(inputs="fog", dimensions=8)).shape == (1, 8)
    assert not np.allclose(await vectors(inputs="fog", prompt_name="query"), plain[:1], atol=1e-3)
    assert not np.allclose(np.linalg.norm(await vectors(inputs="fog", normalize=False)), 1, atol=1e-3)
    assert (await vectors(inputs="rain " * 300)).shape == (1, 32)  # truncates of itself
    long = "the quick brown fox " * 30 + "lamps and fog by the harbour " * 20
    ends = {name: await vectors(inputs=long, truncation_direction=name) for name in ("left", "Left", "right", "Right")}
    assert np.allclose(ends["left"], ends["Left"], atol=1e-6)
    assert np.allclose(ends["right"], ends["Right"], atol=1e-6)
    assert not np.allclose(ends["left"], ends["right"], atol=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "error", "kind"),
    [
        ({"inputs": ""}, 400, "Input validation error: `inputs` cannot be empty", "Empty"),
        ({"inputs": []}, 400, "Input validation error: `inputs` cannot be empty", "Empty"),
        ({"inputs": ["fog"] * 33}, 422, "batch size 33 > maximum allowed batch size 32", "Validation"),
        (
            {"inputs": "fog", "dimensions": 0},
            422,
            "Input validation error: `dimensions` should be positive",
            "Validation",
        ),
    ],
)
async def test_errors_are_teis(http: aiohttp.ClientSession, body: Any, status: int, error: str, kind: str) -> None:
    got, media_type, text = await post(http, body)

    assert (got, media_type) == (status, "application/json")
    assert json.loads(text) == {"error": error, "error_type": kind}


async def test_every_refusal_is_counted_once(http: aiohttp.ClientSession, link: WorkerLink) -> None:
    names = ("tokenization", "batch_size", "overloaded")
    series = [f'te_request_failure{{err="{name}"}}' for name in names]
    before = [await counted(http, one) for one in series]
    requests = await counted(http, 'te_request_count{method="single"}')

    await post(http, {"inputs": "fog", "dimensions": 0})
    await post(http, {"inputs": ["fog"] * 33})
    await link.answers([link.embed() for _ in range(6)])

    assert [await counted(http, one) - past for one, past in zip(series, before, strict=True)] == [1, 1, 1]
    assert await counted(http, 'te_request_count{method="single"}') - requests == 7


@pytest.mark.parametrize(
    ("body", "status", "start"),
    [
        (b"{", 400, "Failed to parse the request body as JSON: "),
        (b"\xff", 400, "Failed to parse the request body as JSON: "),
        ({}, 422, "Failed to deserialize the JSON body into the target type: "),
        ([], 422, "Failed to deserialize the JSON body into the target type: "),
        (
            {"inputs": "fog", "normalize": None},
            422,
            "Failed to deserialize the JSON body into the target type: normalize",
        ),
        (b'{"inputs": "' + b"a" * 20_000 + b'"}', 413, "Failed to buffer the request body: length limit exceeded"),
    ],
)
async def test_what_cannot_be_read_is_refused_in_plain_text(
    http: aiohttp.ClientSession, body: Any, status: int, start: str
) -> None:
    got, media_type, text = await post(http, body)

    assert (got, media_type) == (status, "text/plain")
    assert text.startswith(start)


@pytest.mark.clause("D-client-batch")
async def test_33_inputs_are_refused_and_32_are_not(http: aiohttp.ClientSession) -> None:
    assert (await post(http, {"inputs": ["fog"] * 33}))[0] == 422
    assert (await post(http, {"inputs": ["fog"] * 32}))[0] == 200


async def test_a_connection_is_kept(worker: WorkerProcess, link: WorkerLink) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.spec.port)
    body = b'{"inputs": "fog"}'
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            length = next(line for line in answer.lower().splitlines() if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_hangs_up_takes_its_call_with_it(
    worker: WorkerProcess, http: aiohttp.ClientSession, link: WorkerLink
) -> None:
    dropped = 'te_request_failure{err="dropped"}'
    before = await counted(http, dropped)
    busy = [link.post(Method.EMBED_ARROW, arrow(["rain " * 30] * 4000), flags=Flag.BULK) for _ in range(3)]
    body = json.dumps({"inputs": ["rain " * 30] * 32}).encode()

    async with asyncio.timeout(LIMIT_S):
        while (
            await counted(http, dropped) == before
        ):  # again where it was answered before the end of the connection came
            await hang_up_after(worker, body, cut=0)

    for id in busy:
        link.cancel(id)
    await link.emptied()


async def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_no_defect(
    worker: WorkerProcess, http: aiohttp.ClientSession
) -> None:
    await hang_up_after(worker, json.dumps({"inputs": ["rain"] * 32}).encode(), cut=10)

    assert (await post(http, {"inputs": "fog"}))[0] == 200
    assert "Traceback" not in worker.log


async def hang_up_after(worker: WorkerProcess, body: bytes, cut: int) -> None:
    """Send a request whose last `cut` bytes are missing, and close."""
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    _, writer = await asyncio.open_connection("127.0.0.1", worker.spec.port)
    writer.write(head + body[: len(body) - cut])
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@pytest.mark.clause("D-queue")
async def test_a_call_that_finds_no_room_is_429_and_the_tokenizer_takes_none(
    worker: WorkerProcess, http: aiohttp.ClientSession, link: WorkerLink
) -> None:
    """The five calls that fit are there, and busy for long."""
    texts = [f"{number} " + "rain " * 30 for number in range(4000)]  # distinct: equal ones are computed once
    busy = [link.post(Method.EMBED_ARROW, arrow(texts), flags=Flag.BULK) for _ in range(5)]
    async with asyncio.timeout(LIMIT_S):
        while await link.calls() < 5:
            pass

    client = TeiClient(worker)
    told = await client.post("/embed", {"inputs": "fog"})
    openai = await client.post("/v1/embeddings", {"input": "fog"})
    vertex = await client.post("/vertex", {"instances": [{"inputs": "fog"}, {"inputs": "dog"}]})
    tokens = await client.post("/tokenize", {"inputs": "fog"})
    for id in busy:
        link.cancel(id)
    await client.session.close()
    await link.emptied()

    for refused in (told, vertex):
        assert refused.error == (429, {"error": "Model is overloaded", "error_type": "Overloaded"})
        assert refused.headers["retry-after"] == "1"
    assert openai.error == (429, {"message": "Model is overloaded", "code": 429, "type": "Overloaded"})
    assert tokens.status == 200
    assert "never retrieved" not in worker.log


async def test_a_large_answer_is_whole(http: aiohttp.ClientSession, worker: WorkerProcess) -> None:
    """32 inputs of 96 tokens are 98,304 numbers, too many to be written on the finisher's thread."""
    async with http.post("/embed_all", json={"inputs": ["rain " * 96] * 31 + ["fog rain " * 48]}) as reply:
        rows = await reply.json()

    assert reply.headers["x-compute-tokens"] == str(32 * 96)
    assert np.shape(rows) == (32, 96, 32)
    assert rows[0] != rows[31]


async def test_the_openapi_document_has_teis_names(http: aiohttp.ClientSession) -> None:
    async with http.get("/api-doc/openapi.json") as reply:
        document = await reply.json()

    assert document["openapi"] == "3.0.3"
    assert set(document["paths"]) == {
        *("/decode", "/embed", "/embed_all", "/embed_sparse", "/health", "/info", "/metrics", "/predict", "/rerank"),
        *("/similarity", "/tokenize", "/v1/embeddings", "/vertex"),
    }
    schemas = document["components"]["schemas"]
    assert set(schemas["ErrorType"]["enum"]) == {
        *("Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty")
    }
    assert {"EmbedRequest", "OpenAICompatErrorResponse", "PredictInput", "InputIds", "Rank"} <= set(schemas)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(schemas)
    assert schemas["EmbedRequest"]["properties"]["truncate"]["nullable"] is True
    assert '"null"' not in json.dumps(document)


async def test_the_docs_page_lists_the_routes_and_loads_nothing(http: aiohttp.ClientSession) -> None:
    async with http.get("/docs", allow_redirects=False) as reply:
        assert (reply.status, reply.headers["location"]) == (303, "/docs/")
    async with http.get("/docs/", allow_redirects=False) as reply:
        page = await reply.text()

    assert (reply.status, reply.content_type) == (200, "text/html")
    assert "/embed_sparse" in page
    assert 'href="/api-doc/openapi.json"' in page
    assert not re.search(r"<(script|img|link)|https?://", page)


# §1.17: origins and the key.


@pytest.mark.parametrize("path", ["/embed", "/info", "/no"])
async def test_a_preflight_is_answered_before_anything_else(worker: WorkerProcess, link: WorkerLink, path: str) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    told = await once(worker, "OPTIONS", path, headers=asked)

    assert (told.status, told.text) == (200, "")
    assert told.headers["access-control-allow-origin"] == "*"
    assert told.headers["access-control-allow-methods"] == "GET,POST"
    assert told.headers["access-control-allow-headers"] == "content-type"
    assert told.headers.get("allow") == {"/embed": "POST", "/info": "GET,HEAD", "/no": None}[path]


async def test_a_path_is_matched_as_it_was_sent(worker: WorkerProcess, link: WorkerLink) -> None:
    assert (await once(worker, "POST", "/v1%2Fembeddings")).status == 404


@pytest.mark.parametrize(("verb", "path"), [("GET", "/health"), ("POST", "/embed"), ("GET", "/no")])
async def test_every_answer_may_be_read_by_every_page(
    worker: WorkerProcess, link: WorkerLink, verb: str, path: str
) -> None:
    assert (await once(worker, verb, path)).headers["access-control-allow-origin"] == "*"


@pytest.fixture(scope="module")
def locked(tiny: Path) -> Iterator[WorkerProcess]:
    """A worker with a key, two allowed origins, and a default task as on Hugging Face's endpoints."""
    origins = ("https://a.example", "https://b.example")
    environ = OFFLINE | {"TASK": "sentence-similarity"}
    with WorkerProcess(tiny, environ=environ, api_key="s3crét", cors_allow_origin=origins) as one:
        yield one


@pytest.fixture
async def locked_ready(locked: WorkerProcess, connect: Connect) -> WorkerProcess:
    link = await connect(locked)
    await link.state(link.post(Method.WATCH), "ready")
    return locked


@pytest.mark.parametrize(
    "given", [None, "s3crét", "Bearer", "Bearer ", "Bearer s3cr", "bearer s3crét", "Bearer s3crét "]
)
@pytest.mark.parametrize(("verb", "path"), [("POST", "/embed"), ("POST", "/"), ("GET", "/info"), ("POST", "/vertex")])
async def test_without_the_key_there_is_401_and_no_body(
    locked_ready: WorkerProcess, verb: str, path: str, given: str | None
) -> None:
    said = {} if given is None else {"authorization": given}
    told = await once(locked_ready, verb, path, {"inputs": "fog"}, said)

    assert (told.status, told.text) == (401, "")
    assert "www-authenticate" not in told.headers


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/metrics", "/docs", "/docs/", "/api-doc/openapi.json"])
async def test_what_is_public_needs_no_key(locked_ready: WorkerProcess, path: str) -> None:
    assert (await once(locked_ready, "GET", path)).status == 200


async def test_with_the_key_everything_is_served(locked_ready: WorkerProcess) -> None:
    said = {"authorization": "Bearer s3crét"}

    assert (await once(locked_ready, "POST", "/embed", {"inputs": "fog"}, said)).status == 200
    assert (await once(locked_ready, "GET", "/info", headers=said)).status == 200


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_the_environment_may_name_the_default_task(locked_ready: WorkerProcess, path: str) -> None:
    body = {"inputs": {"source_sentence": "fog", "sentences": ["fog", "rain"]}}
    told = await once(locked_ready, "POST", path, body, {"authorization": "Bearer s3crét"})

    assert told.status == 200, told
    assert told.json[0] == pytest.approx(1, abs=1e-5)
    assert len(told.json) == 2


@pytest.mark.parametrize(
    ("origin", "allowed"), [("https://b.example", "https://b.example"), ("https://c.example", None), (None, None)]
)
async def test_only_the_origins_that_were_named_are_let_in(
    locked_ready: WorkerProcess, origin: str | None, allowed: str | None
) -> None:
    said = {} if origin is None else {"origin": origin}
    for verb in ("OPTIONS", "GET"):
        told = await once(locked_ready, verb, "/health", headers=said)
        assert told.status == 200
        assert told.headers.get("access-control-allow-origin") == allowed
        assert "origin" in told.headers["vary"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://c.example", "content-type": "text/plain"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://rebound.example:80", "host": "rebound.example:80"}, 403),
        ({"origin": "https://b.example"}, 200),
        ({"host": "teimgr.internal"}, 200),
    ],
)
async def test_a_page_of_an_origin_that_is_not_named_starts_nothing(
    locked_ready: WorkerProcess, headers: dict[str, str], status: int
) -> None:
    told = await once(locked_ready, "POST", "/embed", {"inputs": "fog"}, {"authorization": "Bearer s3crét"} | headers)

    assert told.status == status, told
    if status == 403:
        assert told.json["error_type"] == "forbidden" or "may only read" in told.json["error"]


async def once(
    worker: WorkerProcess, verb: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Told:
    """One request on a connection of its own."""
    client = TeiClient(worker)
    try:
        return await client.ask(verb, path, body, headers)
    finally:
        await client.session.close()


@pytest.mark.parametrize("route", ["/embed", "/v1/embeddings"])
async def test_a_compressed_body_is_refused_by_that_name(http: aiohttp.ClientSession, route: str) -> None:
    body = json.dumps({"inputs": "a", "input": "a"}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with http.post(route, data=gzip.compress(body), headers=headers) as reply:
        reason = "The body is compressed (Content-Encoding: gzip); send it uncompressed"
        assert (reply.status, await reply.text()) == (400, reason)
    async with http.post(route, data=body, headers=headers) as reply:  # TEI ignores the header
        assert reply.status == 200
