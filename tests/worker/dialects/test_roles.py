"""A sparse model that has another way for queries than for documents takes it on every surface that has a role."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

TEXTS = ["the quick fox", "fog by the harbour"]


async def entries(ask: Asking, role: str | None) -> list[dict[int, float]]:
    """By TEI's route on the instance's port, id → weight."""
    body = {"inputs": TEXTS} | ({} if role is None else {"prompt_name": role})
    rows = await ask.own_port("routed", "/embed_sparse", body)
    return [{entry["index"]: entry["value"] for entry in row} for row in rows]


async def test_prompt_name_and_is_query_choose_the_way(ask: Asking) -> None:
    queries, documents = await entries(ask, "query"), await entries(ask, "document")

    assert queries != documents
    assert await entries(ask, None) == documents
    assert all(len(query) <= 6 for query in queries)  # the tokens of the text, and no special ones
    for is_query, expected in ((True, queries), (False, documents)):
        body = {"items": [{"text": text} for text in TEXTS]}
        body["params"] = {"output_types": ["sparse"], "options": {"is_query": is_query}}  # type: ignore[assignment]
        items: list[dict[str, Any]] = (await ask.post("/v1/encode/routed", body)).ok["items"]
        for item, row in zip(items, expected, strict=True):
            assert item["sparse"]["indices"] == list(row)
            assert np.allclose(item["sparse"]["values"], list(row.values()), atol=1e-6)


@pytest.mark.parametrize("path", ["/score", "/v1/score/routed"])
async def test_scores_compare_a_query_with_documents(ask: Asking, path: str) -> None:
    [query, _], documents = await entries(ask, "query"), await entries(ask, "document")
    truth = [sum(weight * one.get(id, 0.0) for id, weight in query.items()) for one in documents]
    if path == "/score":
        body: dict[str, Any] = {"model": "routed", "text_1": TEXTS[0], "text_2": TEXTS}
        found = [one["score"] for one in (await ask.post(path, body)).ok["data"]]
    else:
        body = {"query": {"text": TEXTS[0]}, "items": [{"text": text} for text in TEXTS]}
        by_id = {one["item_id"]: one["score"] for one in (await ask.post(path, body)).ok["scores"]}
        found = [by_id[f"item-{row}"] for row in range(len(TEXTS))]

    assert np.allclose(found, truth, atol=1e-4)
