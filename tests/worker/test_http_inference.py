"""What TEI's routes bound beside what `tests/conformance` asks of them: quoted text, and inputs in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_process import WorkerProcess
from tests.worker.tei_client import TeiClient

from teimgr.wire.error_bodies import OPENAI, TEI, TEI_OPENAI
from teimgr.worker.http_inference import BadRequest

LONG = "text " * 200_000


@pytest.fixture
async def client(worker: WorkerProcess) -> AsyncIterator[TeiClient]:
    link, _ = await worker.watcher("ready")
    link.close()
    client = TeiClient(worker)
    yield client
    await client.session.close()


@pytest.fixture(scope="module")
def worker(tiny: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(tiny) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a", "prompt_name": LONG}),
        ("/embed", {"inputs": "a", "truncation_direction": LONG}),
        ("/embed", {"inputs": "a", "normalize": LONG}),
        ("/embed", {"inputs": "a", LONG: 1, "truncate": 5}),
        ("/v1/embeddings", {"input": "a", "encoding_format": LONG}),
        ("/v1/embeddings", {"input": "a", "dimensions": LONG}),
        ("/jina/v1/embeddings", {"input": "a", "embedding_type": LONG}),
        ("/cohere/v2/embed", {"texts": ["a"], "embedding_types": [LONG]}),
        ("/vllm/v1/embeddings", {"input": "a", "truncate_prompt_tokens": LONG}),
        ("/voyage/v1/embeddings", {"input": "a", "output_dtype": LONG}),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_a_refusal_quotes_little_of_a_long_text(client: TeiClient, path: str, body: Any) -> None:
    told = await client.post(path, body)

    assert 400 <= told.status < 500, told.text[:200]
    assert len(told.text) < 40_000


@pytest.mark.clause("D-client-batch")
async def test_the_openai_form_takes_2048_inputs(client: TeiClient) -> None:
    told = await client.ok("/v1/embeddings", {"input": ["fog"] * 2048, "encoding_format": "base64"})
    refused = await client.post("/v1/embeddings", {"input": ["fog"] * 2049})

    assert [row["index"] for row in told["data"]] == list(range(2048))
    assert refused.status == 422


@pytest.mark.parametrize("dialect", [TEI, TEI_OPENAI, OPENAI])
@pytest.mark.parametrize(
    ("status", "code"), [(400, "INVALID_INPUT"), (422, "INVALID_INPUT"), (413, "MESSAGE_TOO_LARGE")]
)
def test_a_body_that_cannot_be_read_has_its_code_in_a_header(dialect: str, status: int, code: str) -> None:
    reply = BadRequest(status, "inputs: is missing", input_index=3).reply(dialect)
    assert (reply.status, reply.headers["x-teimgr-code"]) == (status, code)
    if dialect != OPENAI:
        assert (reply.body, reply.headers["content-type"]) == (b"inputs: is missing", "text/plain; charset=utf-8")
        assert reply.headers["x-teimgr-input"] == "3"
