"""litellm: providers whose API an instance's port speaks, and those that the daemon does."""

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


def as_vllm(told: Any) -> Any:
    where = {"model": "hosted_vllm/embedding", "api_base": f"{told.daemon}/v1", "api_key": "none"}
    return _vectors(litellm.embedding(input=told.texts, **where))


def ranks_as_cohere(told: Any) -> Any:
    return _daemon_ranks(told, "cohere/reranker", f"{told.daemon}/v1/rerank")


def ranks_as_infinity(told: Any) -> Any:
    return _daemon_ranks(told, "infinity/reranker", told.daemon)


def ranks_as_vllm(told: Any) -> Any:
    """Its requests to `/rerank` are the same as Infinity's, and its replies are not: vLLM's are below `/v2/rerank`."""
    return _daemon_ranks(told, "hosted_vllm/reranker", f"{told.daemon}/v2/rerank")


def ranks_as_vllm_by_a_header(told: Any) -> Any:
    return _daemon_ranks(told, "hosted_vllm/reranker", told.daemon, headers={"x-teimgr-dialect": "vllm"})


def ranks_as_vllm_by_a_field(told: Any) -> Any:
    return _daemon_ranks(told, "hosted_vllm/reranker", told.daemon, truncate_prompt_tokens=-1)


def ranks_as_vllm_by_the_prefix(told: Any) -> Any:
    return _daemon_ranks(told, "hosted_vllm/reranker", f"{told.daemon}/vllm")


def ranks_as_jina(told: Any) -> Any:
    return _daemon_ranks(told, "jina_ai/reranker", told.daemon)


def too_long(told: Any) -> Any:
    """The name of the exception."""
    where: Any = {"model": "hosted_vllm/embedding", "api_base": f"{told.daemon}/vllm/v1", "api_key": "none"}
    try:
        litellm.embedding(input=["fog", "fog and rain " * 2000], **where)
    except Exception as error:
        return type(error).__name__
    return None


def _daemon_ranks(told: Any, model: str, url: str, **how: Any) -> Any:
    found = litellm.rerank(model=model, query=told.query, documents=told.texts, api_base=url, api_key="none", **how)
    return [[told.texts[rank["index"]], rank["relevance_score"]] for rank in found.results]


main(
    as_openai,
    as_infinity,
    as_hugging_face,
    ranks,
    as_vllm,
    ranks_as_cohere,
    ranks_as_infinity,
    ranks_as_vllm,
    ranks_as_vllm_by_a_header,
    ranks_as_vllm_by_a_field,
    ranks_as_vllm_by_the_prefix,
    ranks_as_jina,
    too_long,
)
