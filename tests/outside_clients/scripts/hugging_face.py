"""huggingface_hub's InferenceClient, which Hugging Face's own endpoints are asked with."""

from __future__ import annotations

import asyncio
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from telling import main, refusal


def of_the_path(told: Any) -> Any:
    return InferenceClient(model=f"{told.embedding}/embed").feature_extraction(told.texts)


def of_the_base(told: Any) -> Any:
    """It posts to `/`."""
    return InferenceClient(base_url=told.embedding).feature_extraction(told.texts)


def with_options(told: Any) -> Any:
    client = InferenceClient(base_url=told.embedding)
    options: dict[str, Any] = {
        "prompt_name": "query",
        "truncate": True,
        "truncation_direction": "left",
        "dimensions": 8,
    }
    return client.feature_extraction(told.texts[0], normalize=True, **options)


def not_normalized(told: Any) -> Any:
    return InferenceClient(base_url=told.embedding).feature_extraction(told.texts, normalize=False)


def in_async(told: Any) -> Any:
    async def ask() -> Any:
        async with AsyncInferenceClient(base_url=told.embedding) as client:
            return await client.feature_extraction(told.texts)

    return asyncio.run(ask())


def similarity(told: Any) -> Any:
    client = InferenceClient(model=f"{told.embedding}/similarity")
    return client.sentence_similarity(told.texts[0], other_sentences=told.texts[1:])


def classes(told: Any) -> Any:
    """TEI's flat list is one answer here, so the best label is all that this client keeps of it."""
    best = InferenceClient(model=f"{told.classifier}/predict").text_classification(told.texts[0])
    return {"label": best.label, "score": best.score}


def through_the_daemon(told: Any) -> Any:
    return InferenceClient(model=f"{told.daemon}/instances/embedding/embed").feature_extraction(told.texts)


def refused(told: Any) -> Any:
    return refusal(lambda: InferenceClient(base_url=told.embedding).feature_extraction(""))


def with_the_wrong_key(told: Any) -> Any:
    return refusal(lambda: InferenceClient(base_url=told.locked, token="no").feature_extraction("fog"))


def with_the_key(told: Any) -> Any:
    return InferenceClient(base_url=told.locked, token=told.key).feature_extraction(told.texts)


main(
    of_the_path,
    of_the_base,
    with_options,
    not_normalized,
    in_async,
    similarity,
    classes,
    through_the_daemon,
    refused,
    with_the_wrong_key,
    with_the_key,
)
