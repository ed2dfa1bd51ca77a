"""The openai client, on an instance's port and on the daemon's."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAI
from openai.types import CreateEmbeddingResponse
from telling import main, refusal


def _client(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def _vectors(answer: Any) -> Any:
    assert [row.index for row in answer.data] == list(range(len(answer.data)))
    return [row.embedding for row in answer.data]


def by_default(told: Any) -> Any:
    """In base64, which it asks for by itself."""
    answer = _client(told.embedding).embeddings.create(input=told.texts, model="any")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    return _vectors(answer)


def floats_of_8(told: Any) -> Any:
    create = _client(told.embedding).embeddings.create
    return _vectors(create(input=told.texts, model="any", encoding_format="float", dimensions=8))


def of_ids(told: Any) -> Any:
    return _vectors(_client(told.embedding).embeddings.create(input=[told.ids, told.ids], model="any"))


def in_async(told: Any) -> Any:
    async def ask() -> Any:
        async with AsyncOpenAI(base_url=f"{told.embedding}/v1", api_key="none") as client:
            return _vectors(await client.embeddings.create(input=told.texts, model="any"))

    return asyncio.run(ask())


def of_the_daemon(told: Any) -> Any:
    return _vectors(_client(told.daemon).embeddings.create(input=told.texts, model="embedding"))


def picture(told: Any) -> Any:
    """As vLLM's documents say: messages, by the client's `post`."""
    part = {"type": "image_url", "image_url": {"url": told.picture}}
    body = {"model": "pictures", "messages": [{"role": "user", "content": [part]}], "encoding_format": "float"}
    return _vectors(_client(told.daemon).post("/embeddings", body=body, cast_to=CreateEmbeddingResponse))


def of_nothing(told: Any) -> Any:
    return refusal(lambda: _client(told.embedding).embeddings.create(input="", model="any"))


def of_a_classifier(told: Any) -> Any:
    return refusal(lambda: _client(told.classifier).embeddings.create(input="fog", model="any"))


def of_nobody(told: Any) -> Any:
    return refusal(lambda: _client(told.daemon).embeddings.create(input="fog", model="nobody"))


def with_the_wrong_key(told: Any) -> Any:
    return refusal(lambda: _client(told.locked, "no").embeddings.create(input="fog", model="any"))


def with_the_key(told: Any) -> Any:
    return _vectors(_client(told.locked, told.key).embeddings.create(input=told.texts, model="any"))


main(
    by_default,
    floats_of_8,
    of_ids,
    in_async,
    of_the_daemon,
    picture,
    of_nothing,
    of_a_classifier,
    of_nobody,
    with_the_wrong_key,
    with_the_key,
)
