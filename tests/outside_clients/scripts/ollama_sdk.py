"""Ollama's package, and the embedding classes of langchain and llama-index that call it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_ollama import OllamaEmbeddings
from llama_index.embeddings.ollama import OllamaEmbedding
from ollama import AsyncClient, Client
from telling import main, refusal

MODEL = "embedding"


def one(told: Any) -> Any:
    return Client(told.daemon).embed(MODEL, told.texts[0]).embeddings[0]


def several(told: Any) -> Any:
    options = {"temperature": 0.1, "num_ctx": 512}
    found = Client(told.daemon).embed(f"{MODEL}:latest", told.texts, truncate=True, options=options, keep_alive="10m")
    assert found.total_duration, found
    assert found.prompt_eval_count, found
    assert found.load_duration is not None, found
    return found.embeddings


def short(told: Any) -> Any:
    return Client(told.daemon).embed(MODEL, told.texts, dimensions=8, keep_alive=-1).embeddings


def in_async(told: Any) -> Any:
    return asyncio.run(AsyncClient(told.daemon).embed(MODEL, told.texts)).embeddings


def older(told: Any) -> Any:
    return [Client(told.daemon).embeddings(MODEL, text).embedding for text in told.texts]


def listed(told: Any) -> Any:
    client = Client(told.daemon)
    running = client.ps().models
    assert all(each.expires_at and each.digest for each in running), running
    return [sorted(each.model or "" for each in models) for models in (client.list().models, running)]


def shown(told: Any) -> Any:
    found = Client(told.daemon).show(MODEL)
    return [found.capabilities, found.modelinfo]


def refused(told: Any) -> Any:
    client = Client(told.daemon)
    return [
        refusal(lambda: client.embed("nobody", "fog")),
        refusal(lambda: client.embed(MODEL, "fog " * 1000, truncate=False)),
        refusal(lambda: client.generate(MODEL, "fog")),
        refusal(lambda: client.pull("nobody")),
    ]


def _langchain(told: Any, **more: Any) -> OllamaEmbeddings:
    return OllamaEmbeddings(model=MODEL, base_url=told.daemon, validate_model_on_init=True, **more)


def langchain_documents(told: Any) -> Any:
    return _langchain(told, keep_alive=300, temperature=0.0).embed_documents(told.texts)


def langchain_query(told: Any) -> Any:
    return _langchain(told).embed_query(told.texts[0])


def langchain_short(told: Any) -> Any:
    return asyncio.run(_langchain(told, dimensions=8).aembed_documents(told.texts))


def _llama_index(told: Any, **more: Any) -> OllamaEmbedding:
    return OllamaEmbedding(model_name=MODEL, base_url=told.daemon, **more)


def llama_index_texts(told: Any) -> Any:
    return _llama_index(told, ollama_additional_kwargs={"mirostat": 0}).get_text_embedding_batch(told.texts)


def llama_index_query(told: Any) -> Any:
    return _llama_index(told, query_instruction="query:", keep_alive="5m").get_query_embedding(told.texts[0])


def llama_index_in_async(told: Any) -> Any:
    return asyncio.run(_llama_index(told).aget_text_embedding_batch(told.texts))


main(
    one,
    several,
    short,
    in_async,
    older,
    listed,
    shown,
    refused,
    langchain_documents,
    langchain_query,
    langchain_short,
    llama_index_texts,
    llama_index_query,
    llama_index_in_async,
)
