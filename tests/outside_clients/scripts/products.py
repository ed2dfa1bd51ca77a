"""RAGFlow and Dify's plugin for Xinference: their calls of the libraries of OpenAI, Cohere and Xinference, with the
settings of their how-to pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin

from cohere import Client as Cohere
from openai import OpenAI
from telling import main, refusal
from xinference_client.client.restful import restful_client as xinference


def _rows(answer: Any) -> Any:
    return [row.embedding for row in answer.data]


def ragflow_by_openai(told: Any) -> Any:
    given = told.ragflow
    client = OpenAI(api_key=given["API-Key"], base_url=urljoin(given["Base url"], "v1"))
    more: Any = {"encoding_format": "float", "extra_body": {"drop_params": True}}
    return _rows(client.embeddings.create(input=told.texts, model=given["Model name"], **more))


def ragflow_by_xinference(told: Any) -> Any:
    client = OpenAI(api_key="x", base_url=urljoin(told.ragflow_others["Base url of Xinference"], "v1"))
    return _rows(client.embeddings.create(input=told.texts, model=told.ragflow["Model name"]))


def ragflow_by_vllm(told: Any) -> Any:
    client = OpenAI(api_key="x", base_url=urljoin(told.ragflow_others["Base url of VLLM, embedding"], "v1"))
    more: Any = {"encoding_format": "float", "extra_body": {"drop_params": True}}
    return _rows(client.embeddings.create(input=told.texts, model=told.ragflow["Model name"], **more))


def ragflow_ranks_by_vllm(told: Any) -> Any:
    return _ranks(told, told.ragflow_others["Base url of VLLM, reranking"])


def ragflow_wrong_base_url(told: Any) -> Any:
    return refusal(lambda: _ranks(told, told.ragflow_others["Base url of VLLM, reranking"] + "/v1"))


def _ranks(told: Any, url: str) -> Any:
    client = Cohere(api_key="none", base_url=url)
    found = client.rerank(
        model="reranker", query=told.query, documents=told.texts, top_n=len(told.texts), return_documents=False
    )
    return [row.relevance_score for row in sorted(found.results, key=lambda row: row.index)]


def dify_by_xinference(told: Any) -> Any:
    given = told.xinference
    handle = xinference.Client(base_url=given["Server URL"]).get_model(given["Model uid"])
    assert isinstance(handle, xinference.RESTfulEmbeddingModelHandle)
    return [row["embedding"] for row in handle.create_embedding(input=told.texts)["data"]]


def dify_ranks_by_xinference(told: Any) -> Any:
    given = told.xinference
    handle = xinference.Client(base_url=given["Server URL"]).get_model(given["Model uid of a reranker"])
    assert isinstance(handle, xinference.RESTfulRerankModelHandle)
    found = handle.rerank(documents=told.texts, query=told.query, top_n=3, return_documents=True)["results"]
    for row in found:
        assert row["document"]["text"] == told.texts[row["index"]]
    return [row["relevance_score"] for row in sorted(found, key=lambda row: row["index"])]


main(
    ragflow_by_openai,
    ragflow_by_xinference,
    ragflow_by_vllm,
    ragflow_ranks_by_vllm,
    ragflow_wrong_base_url,
    dify_by_xinference,
    dify_ranks_by_xinference,
)
