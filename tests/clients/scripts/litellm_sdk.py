"""litellm: three of its providers, and a rerank."""

from __future__ import annotations

from typing import Any

import litellm
from telling import main


def _vectors(answer: Any) -> Any:
    return [row["embedding"] for row in answer.data]


def as_openai(told: Any) -> Any:
    where = {"model": "openai/any", "api_base": f"{told.embedding}/v1", "api_key": "none"}
    return _vectors(litellm.embedding(input=told.texts, **where))


def as_infinity(told: Any) -> Any:
    return _vectors(litellm.embedding(model="infinity/any", input=told.texts, api_base=told.embedding, api_key="none"))


def as_hugging_face(told: Any) -> Any:
    where: Any = {"model": "huggingface/tei", "api_base": told.embedding, "input_type": "embed", "api_key": "none"}
    return _vectors(litellm.embedding(input=told.texts, **where))


def ranks(told: Any) -> Any:
    where: Any = {"model": "huggingface/tei", "api_base": told.reranker, "api_key": "none"}
    found = litellm.rerank(query=told.query, documents=told.texts, **where)
    return [[told.texts[rank["index"]], rank["relevance_score"]] for rank in found.results]


main(as_openai, as_infinity, as_hugging_face, ranks)
