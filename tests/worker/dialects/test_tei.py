"""TEI's routes of every instance under /instances/{name} on the daemon's port: as on the instance's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.dialect_client import Asking

COST_HEADERS = (
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)
TEXTS = ["the quick fox", "fog by the harbour"]
ASKED: list[tuple[str, str, Any]] = [
    ("dense", "/embed", {"inputs": TEXTS, "prompt_name": "query"}),
    ("dense", "", {"inputs": TEXTS}),
    ("dense", "/", {"inputs": "fog", "parameters": {}}),
    ("dense", "/invocations", {"inputs": "fog"}),
    ("dense", "/embed_all", {"inputs": TEXTS}),
    ("dense", "/similarity", {"inputs": {"source_sentence": "fog", "sentences": TEXTS}}),
    ("dense", "/v1/embeddings", {"input": TEXTS, "model": "anything"}),
    ("dense", "/embeddings", {"input": "fog"}),
    ("splade", "/embed_sparse", {"inputs": TEXTS}),
    ("colbert", "/embed_all", {"inputs": TEXTS}),
    ("reranker", "/rerank", {"query": "a fox", "texts": TEXTS, "return_text": True}),
    ("classifier", "/predict", {"inputs": [["fog"], ["rain", "snow"]]}),
]
WITHOUT_COST: list[tuple[str, str, Any]] = [
    ("dense", "/tokenize", {"inputs": TEXTS}),
    ("dense", "/decode", {"ids": [[5, 6, 7], [8]]}),
    ("dense", "/vertex", {"instances": [{"inputs": "fog"}, {"inputs": TEXTS}]}),
]


@pytest.mark.parametrize(("instance", "path", "body"), [*ASKED, *WITHOUT_COST])
async def test_answers_are_those_of_the_own_port(ask: Asking, instance: str, path: str, body: Any) -> None:
    told = await ask.post(f"/instances/{instance}{path}", body)

    expected = await ask.own_port(instance, path or "/", body)
    assert flat(told.ok) == pytest.approx(flat(expected), abs=1e-5)
    costs = [name for name in COST_HEADERS if name in told.headers]
    assert costs == ([] if (instance, path, body) in WITHOUT_COST else list(COST_HEADERS))


def flat(value: Any) -> list[Any]:
    """Every leaf of a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *flat(inner))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in flat(inner)]
    return [value]


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        (
            "/instances/dense/embed",
            {"inputs": ""},
            400,
            {"error": "Input validation error: `inputs` cannot be empty", "error_type": "Empty"},
        ),
        (
            "/instances/dense/embed",
            {"inputs": ["fog"] * 33},
            422,
            {"error": "batch size 33 > maximum allowed batch size 32", "error_type": "Validation"},
        ),
        (
            "/instances/dense/embed_sparse",
            {"inputs": "fog"},
            424,
            {"error": "Backend error: Model is not an embedding model with SPLADE pooling", "error_type": "Backend"},
        ),
        (
            "/instances/dense/v1/embeddings",
            {"input": ""},
            400,
            {"message": "Input validation error: `inputs` cannot be empty", "code": 400, "type": "Empty"},
        ),
        (
            "/instances/classifie/embed",
            {"inputs": "fog"},
            404,
            {"error": "Instance 'classifie' not found; did you mean 'classifier'?", "error_type": "Validation"},
        ),
        (
            "/instances/idle/embed",
            {"inputs": "fog"},
            503,
            {"error": "Instance 'idle' is not running (status: stopped)", "error_type": "Unhealthy"},
        ),
    ],
)
async def test_errors_are_teis(ask: Asking, path: str, body: Any, status: int, expected: dict[str, Any]) -> None:
    told = await ask.post(path, body)

    assert (told.status, told.json) == (status, expected)


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"{}", 422), (b'{"inputs": 1}', 422)])
async def test_what_cannot_be_read_is_refused_in_plain_text(ask: Asking, body: bytes, status: int) -> None:
    told = await ask.post("/instances/dense/embed", body)

    assert (told.status, told.headers["content-type"]) == (status, "text/plain; charset=utf-8")
    assert told.body.startswith(b"Failed to ")


async def test_the_manager_keeps_its_own_routes(ask: Asking) -> None:
    assert (await ask.get("/instances/dense")).ok["name"] == "dense"
    assert "lines" in (await ask.get("/instances/dense/logs")).ok
    refused = await ask.get("/instances/dense/embed")
    assert (refused.status, refused.json["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert (await ask.post("/instances/nobody/start", {})).json["code"] == "INSTANCE_NOT_FOUND"


async def test_a_large_answer_is_whole(ask: Asking) -> None:
    rows = (await ask.post("/instances/dense/embed_all", {"inputs": ["rain " * 96] * 31 + ["fog rain " * 48]})).ok

    assert np.shape(rows) == (32, 96, 32)
    assert rows[0] != rows[31]
