"""What bounds inference on the daemon's port: room in the worker, clients that leave, workers that go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from bench import weights
from tests.support.daemon_process import DaemonProcess
from tests.support.polling import eventually
from tests.worker.dialects.dialect_client import LIMIT_S, Asking, Told

BATCHES = 'te_request_count{method="batch"}'
DROPPED = 'te_request_failure{err="dropped"}'
LONG = [f"{number} " + "rain " * 300 for number in range(500)]  # distinct: equal ones are computed once


@pytest.fixture(scope="module")
def small(
    served: tuple[DaemonProcess, dict[str, int]],
) -> Iterator[tuple[DaemonProcess, dict[str, int]]]:
    """An instance that one running call, and four that wait, fit into; the real model needs some 5 s for `LONG`."""
    daemon, _ = served
    with daemon.client() as client:
        limits = {"max_concurrent_requests": 1, "max_waiting": 4}
        client.create("tight", str(weights.minilm()), dtype="float32", **limits)
        client.wait_until_running("tight", deadline_s=60)
        yield daemon, {"tight": client.get("tight").port}
        client.delete("tight")


@pytest.fixture
async def tight(small: tuple[DaemonProcess, dict[str, int]]) -> AsyncIterator[Asking]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
        yield Asking(*small, session)


async def metric(ask: Asking, name: str) -> float:
    """The sum of all series of that name on the instance's own page."""
    lines = (await ask.own_text("tight", "/metrics")).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def until(ask: Asking, name: str, least: float) -> None:
    async def reached() -> bool:
        return await metric(ask, name) >= least

    await eventually(reached)


async def test_a_full_worker_refuses_in_the_words_of_the_dialect(tight: Asking) -> None:
    body = {"model": "tight", "input": LONG}
    before = await metric(tight, BATCHES)
    tasks = [asyncio.create_task(tight.post("/v1/embeddings", body)) for _ in range(5)]
    await until(tight, BATCHES, before + 5)
    paths: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"model": "tight", "input": "fog"}),
        ("/v2/embed", {"model": "tight", "texts": ["fog"]}),
        ("/instances/tight/embed", {"inputs": "fog"}),
        ("/v1/encode/tight", {"items": [{"text": "fog"}]}),
    ]
    refused: list[Told] = [await tight.post(path, one) for path, one in paths]

    assert [one.status for one in refused] == [429] * 4
    assert all(1 <= int(one.headers["retry-after"]) <= 30 for one in refused)  # by the throughput, where that is known
    assert refused[0].json["error"]["code"] == "rate_limit_exceeded"
    assert refused[1].json == {"message": "Model is overloaded"}
    assert refused[2].json == {"error": "Model is overloaded", "error_type": "Overloaded"}
    assert refused[3].json["detail"]["code"] == "RESOURCE_EXHAUSTED"
    dropped = await metric(tight, DROPPED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(tight, DROPPED, dropped + 5)


async def test_a_client_that_hangs_up_takes_its_call_with_it(tight: Asking) -> None:
    before, dropped = await metric(tight, BATCHES), await metric(tight, DROPPED)
    task = asyncio.create_task(tight.post("/v1/embeddings", {"model": "tight", "input": LONG}))
    await until(tight, BATCHES, before + 1)
    task.cancel()
    await asyncio.wait({task})

    await until(tight, DROPPED, dropped + 1)
    assert (await tight.post("/v1/embeddings", {"model": "tight", "input": "fog"})).status == 200


async def test_a_client_that_hangs_up_in_its_body_is_no_defect(tight: Asking) -> None:
    body = json.dumps({"model": "tight", "input": "fog"}).encode()
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", tight.daemon.api_port)
    writer.write(head.encode() + b"\r\n" + body[:-5])
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    assert (await tight.post("/v1/embeddings", {"model": "tight", "input": "fog"})).status == 200
    assert "Traceback" not in tight.daemon.log()


async def test_a_body_in_chunks_is_read(tight: Asking) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"model": "tight", '
        yield b'"input": "fog"}'

    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(tight.daemon.api + "/v1/embeddings", data=chunks(), headers=headers) as reply,
    ):
        assert reply.status == 200


async def test_a_worker_that_dies_is_unavailable_and_comes_back(tight: Asking) -> None:
    with tight.daemon.client() as client:
        before = client.get("tight")
        assert before.pid is not None
        await asyncio.to_thread(kill, before.pid)
        async with asyncio.timeout(LIMIT_S):
            while (told := await tight.post("/v1/embeddings", {"model": "tight", "input": "fog"})).status != 200:
                assert told.status == 503, told
                assert told.json["error"]["code"] == "model_not_ready"
        assert client.get("tight").pid != before.pid


def kill(pid: int) -> None:
    import psutil

    process = psutil.Process(pid)
    process.kill()
    process.wait(LIMIT_S)


async def test_the_requests_are_counted(tight: Asking) -> None:
    await tight.post("/v1/embeddings", {"model": "tight", "input": "fog"})
    await tight.post("/v2/embed", {"model": "nobody", "texts": ["fog"]})
    page = (await tight.get("/metrics")).body.decode()

    for labels in (
        'dialect="openai",route="/v1/embeddings",status="200"',
        'dialect="cohere",route="/v2/embed",status="404"',
    ):
        assert f"teimgr_inference_seconds_count{{{labels}}} " in page
    assert 'teimgr_inference_bytes_total{dialect="openai",direction="in"} ' in page
