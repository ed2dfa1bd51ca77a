"""Jina's embeddings: on its own prefix with its errors, and on the shared path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

TEXTS = ["the quick fox", "fog by the harbour"]
PATHS = ["/v1/embeddings", "/jina/v1/embeddings"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [[{"text": text} for text in TEXTS], [TEXTS[0], {"text": TEXTS[1]}]])
async def test_objects_with_a_text_are_texts(ask: Asking, path: str, given: Any) -> None:
    answer = (await ask.post(path, {"model": "dense", "input": given, "task": "retrieval.query"})).ok
    vectors = await ask.vectors("dense", TEXTS, prompt_name="query")
    assert np.allclose([one["embedding"] for one in answer["data"]], vectors, atol=1e-6)


async def test_one_object_is_one_text(ask: Asking) -> None:
    answer = (await ask.post(PATHS[1], {"model": "dense", "input": {"text": TEXTS[0]}})).ok
    assert np.allclose(answer["data"][0]["embedding"], (await ask.vectors("dense", TEXTS[:1]))[0], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([{"image": "aGk="}], "input.0"),
        (["a", {"text": "b", "image": "aGk="}], "input.1.image"),
        ([{"text": 1}], "input.0"),
    ],
)
async def test_other_objects_are_refused_by_name(ask: Asking, given: Any, place: str) -> None:
    refused = await ask.post(PATHS[1], {"model": "dense", "input": given})
    assert (refused.status, list(refused.json)) == (400, ["detail"])
    assert refused.json["detail"].startswith(f"{place}: ")


async def test_a_query_may_be_an_object_with_a_text_and_images_are_refused_by_name(ask: Asking) -> None:
    path, body = "/jina/v1/rerank", {"model": "reranker", "query": TEXTS[0], "documents": TEXTS}
    as_object = (await ask.post(path, body | {"query": {"text": TEXTS[0]}})).ok
    assert as_object["results"] == (await ask.post(path, body)).ok["results"]
    of_text = "only text is supported by the model reranker"
    for more, told in (
        ({"query": {"image": "aGk="}}, f"query: {of_text}"),
        ({"documents": ["a", {"image": "aGk="}]}, f"documents.1: {of_text}"),
    ):
        refused = await ask.post(path, body | more)
        assert (refused.status, list(refused.json)) == (400, ["detail"])
        assert refused.json["detail"].startswith(told)


@pytest.mark.parametrize("instance", ["dense", "m3"])
async def test_a_task_without_a_prompt_takes_the_default(ask: Asking, instance: str) -> None:
    plain = (await ask.post(PATHS[0], {"model": instance, "input": TEXTS})).ok["data"]
    matched = (await ask.post(PATHS[0], {"model": instance, "input": TEXTS, "task": "text-matching"})).ok["data"]
    assert matched == plain


async def test_errors_of_its_own_path_have_its_form(ask: Asking) -> None:
    refused = await ask.post(PATHS[1], {"model": "nothing", "input": "fog"})
    assert (refused.status, list(refused.json)) == (404, ["detail"])
