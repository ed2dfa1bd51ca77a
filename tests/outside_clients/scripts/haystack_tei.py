"""Haystack: TEI's embedders and TEI's ranker, over HTTP and, by reflection, over gRPC."""

from __future__ import annotations

from typing import Any

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from telling import main


def _warm(component: Any) -> Any:
    component.warm_up()
    return component


def _embedder(kind: Any, url: str, **more: Any) -> Any:
    return _warm(kind(api_type="text_embeddings_inference", api_params={"url": url}, token=None, **more))


def _ranks(url: str, told: Any, **more: Any) -> Any:
    ranker = _warm(HuggingFaceTEIRanker(url=url, token=None, **more))
    documents = [Document(content=text) for text in told.texts]
    found = ranker.run(query=told.query, documents=documents)["documents"]
    return [[document.content, document.score] for document in found]


def text(told: Any) -> Any:
    return _embedder(HuggingFaceAPITextEmbedder, told.embedding).run(text=told.texts[0])["embedding"]


def documents(told: Any) -> Any:
    embedder = _embedder(HuggingFaceAPIDocumentEmbedder, told.embedding, progress_bar=False, normalize=True)
    found = embedder.run(documents=[Document(content=text) for text in told.texts])["documents"]
    return [document.embedding for document in found]


def ranks(told: Any) -> Any:
    return _ranks(told.reranker, told)


def raw_ranks(told: Any) -> Any:
    return _ranks(told.reranker, told, raw_scores=True)


def with_the_key(told: Any) -> Any:
    where: Any = {"api_type": "text_embeddings_inference", "api_params": {"url": told.locked}}
    embedder = _warm(HuggingFaceAPITextEmbedder(token=Secret.from_token(told.key), **where))
    return embedder.run(text=told.texts[0])["embedding"]


def text_over_grpc(told: Any) -> Any:
    return _embedder(HuggingFaceAPITextEmbedder, told.grpc_embedding, use_grpc=True).run(text=told.texts[0])[
        "embedding"
    ]


def ranks_over_grpc(told: Any) -> Any:
    return _ranks(told.grpc_reranker, told, use_grpc=True)


main(text, documents, ranks, raw_ranks, with_the_key, text_over_grpc, ranks_over_grpc)
