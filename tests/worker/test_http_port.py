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
from tests.worker.tei_client import TeiClient, Told

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


async def test_metrics_are_plain_text_and_count(http: aiohttp.ClientSession) -> None:
    before = await counted(http, 'te_request_count{method="single"}')
    await post(http, {"inputs": "fog"})

    assert await counted(http, 'te_request_count{method="single"}') == before + 1
    assert "te_queue_size" in await (await http.get("/metrics")).text()


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
