"""llama-index: TEI's embedding class and TEI's reranker."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from telling import main


def embedder(told: Any, **more: Any) -> TextEmbeddingsInference:
    return TextEmbeddingsInference(model_name="mine", base_url=told.embedding, **more)


def texts(told: Any) -> Any:
    return embedder(told).get_text_embedding_batch(told.texts)


def query(told: Any) -> Any:
    return embedder(told, query_instruction="query:").get_query_embedding(told.texts[0])


def in_async(told: Any) -> Any:
    return asyncio.run(embedder(told).aget_text_embedding_batch(told.texts))


def ranks(told: Any) -> Any:
    reranker = TextEmbeddingInference(base_url=told.reranker, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in told.texts]
    found = reranker.postprocess_nodes(nodes, query_str=told.query)
    return [[node.node.get_content(), node.score] for node in found]


main(texts, query, in_async, ranks)
