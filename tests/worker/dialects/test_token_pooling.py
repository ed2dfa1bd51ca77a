"""Token pooling in the words of every dialect with vectors per token, and over Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from tests.worker.dialects.dialect_client import Asking
from tests.worker.dialects.test_pages import TYPED, of_query

TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of it"
FACTOR = 3


async def pooled_by_the_library(ask: Asking, instance: str, given: Any) -> np.ndarray:
    whole = np.array((await ask.own_port(instance, "/embed_all", {"inputs": given}))[0], np.float32)
    found = HierarchicalTokenPooling(FACTOR).pool([torch.from_numpy(whole)])[0].numpy()
    assert len(found) == 1 + (len(whole) - 1) // FACTOR
    return found


def sie(answer: Any) -> Any:
    return answer["items"][0]["multivector"]["values"]


FORMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "TEI": ("/instances/colbert/embed_all", {"inputs": [TEXT], "pool_factor": FACTOR}, lambda answer: answer[0]),
    "vLLM": (
        "/pooling",
        {"model": "colbert", "input": [TEXT], "pool_factor": FACTOR, "truncate_prompt_tokens": -1},
        lambda answer: answer["data"][0]["data"],
    ),
    "Infinity": (
        "/infinity/embeddings",
        {"model": "colbert", "input": [TEXT], "pool_factor": str(FACTOR)},
        lambda answer: answer["data"][0]["embedding"],
    ),
    "SIE": (
        "/v1/encode/colbert",
        {
            "items": [{"text": TEXT}],
            "params": {"output_types": ["multivector"], "options": {"pool_factor": FACTOR}},
        },
        sie,
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_document_has_the_vectors_of_the_library(ask: Asking, form: str) -> None:
    path, body, taken = FORMS[form]
    expected = await pooled_by_the_library(ask, "colbert", [TEXT])
    found = np.array(taken((await ask.post(path, body)).ok), np.float32)
    assert found.shape == expected.shape
    assert np.allclose(found, expected, atol=1e-5)


async def test_over_arrow(ask: Asking) -> None:
    expected = await pooled_by_the_library(ask, "colbert", [TEXT])
    table = pa.table({"text": [TEXT, None, TEXT]})
    async with ask.daemon.async_client() as client:
        answer = await client.infer(table, instance="colbert", outputs=["multi_vector"], pool_factor=FACTOR)
    first, none, last = answer["multi_vector"].to_pylist()
    assert np.allclose(first, expected, atol=1e-5)
    assert none is None
    assert np.allclose(last, expected, atol=1e-5)


async def test_pages_are_pooled_and_queries_are_not(ask: Asking) -> None:
    expected = await pooled_by_the_library(ask, "pages", [TYPED[0]])
    query = await of_query(ask)
    body = {"inputs": [TYPED[0], "the quick fox"], "pool_factor": FACTOR}
    page, text = (await ask.post("/instances/pages/embed_all", body)).ok
    assert np.allclose(page, expected, atol=1e-5)
    assert np.allclose(text, query, atol=1e-5)
    body = {"inputs": [TEXT], "prompt_name": "query"}
    whole = (await ask.post("/instances/colbert/embed_all", body)).ok
    assert np.allclose((await ask.post("/instances/colbert/embed_all", body | {"pool_factor": 2})).ok, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/instances/colbert/embed_all", {"inputs": "a", "pool_factor": 0.5}, "must be a number of at least 1"),
        ("/instances/dense/embed_all", {"inputs": "a", "pool_factor": 2}, "of a late-interaction model"),
        (
            "/v1/encode/dense",
            {"items": [{"text": "a"}], "params": {"options": {"pool_factor": 2}}},
            "of a late-interaction model",
        ),
        (
            "/v1/encode/colbert",
            {"items": [{"text": "a"}], "params": {"output_types": ["multivector"], "options": {"pool_factor": "2"}}},
            "options.pool_factor: must be a number",
        ),
    ],
)
async def test_refusals_name_the_field_and_its_limit(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path, body)
    assert 400 <= told.status < 500, told
    assert "pool_factor" in told.body.decode()
    assert said in told.body.decode()
