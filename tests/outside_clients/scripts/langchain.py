"""langchain: Hugging Face's endpoint class, and OpenAI's, also as LibreChat's RAG API uses it.

The first refuses a URL as its model, so its clients are put in as its own validator would; everything else is its.
"""

from __future__ import annotations

import asyncio
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from telling import main


def endpoint(told: Any, **more: Any) -> HuggingFaceEndpointEmbeddings:
    url = f"{told.embedding}/embed"
    clients = {"client": InferenceClient(model=url), "async_client": AsyncInferenceClient(model=url)}
    return HuggingFaceEndpointEmbeddings.model_construct(model=url, **clients, **more)


def documents(told: Any) -> Any:
    return endpoint(told).embed_documents(told.texts)


def query(told: Any) -> Any:
    return endpoint(told).embed_query(told.texts[0])


def with_a_prompt(told: Any) -> Any:
    return endpoint(told, model_kwargs={"prompt_name": "query"}).embed_documents(told.texts)


def in_async(told: Any) -> Any:
    return asyncio.run(endpoint(told).aembed_documents(told.texts))


def openai_documents(told: Any) -> Any:
    """Without the check of lengths, which fetches OpenAI's tokenizer from the network."""
    url = f"{told.embedding}/v1"
    return OpenAIEmbeddings(
        base_url=url, api_key="none", model="mine", check_embedding_ctx_length=False, dimensions=8
    ).embed_documents(told.texts)


def _librechat(told: Any) -> OpenAIEmbeddings:
    given = told.librechat
    return OpenAIEmbeddings(
        model=given["EMBEDDINGS_MODEL"],
        api_key=given["RAG_OPENAI_API_KEY"],
        openai_api_base=given["RAG_OPENAI_BASEURL"],
        openai_proxy=None,
        chunk_size=200,
        check_embedding_ctx_length=given["RAG_CHECK_EMBEDDING_CTX_LENGTH"] == "true",
    )


def librechat_documents(told: Any) -> Any:
    return _librechat(told).embed_documents(told.texts)


def librechat_query(told: Any) -> Any:
    return _librechat(told).embed_query(told.texts[0])


main(documents, query, with_a_prompt, in_async, openai_documents, librechat_documents, librechat_query)
