"""A request for each POST route of inference, for OpenAPI; a test sends each to a daemon.

The models are `mini` (dense vectors), `splade`, `reranker`, `classifier`, `clip` and `clap`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teimgr.wire.error_bodies import (
    COHERE,
    INFINITY,
    JINA,
    OLLAMA,
    OPENAI,
    SIE,
    TEI,
    TEI_OPENAI,
    VLLM,
    VOYAGE,
    WEAVIATE,
)

_TEXTS = ["What is deep learning?", "A harbour in the fog"]
_EMBED = {"model": "mini", "input": _TEXTS}
_RANK = {"model": "reranker", "query": "What is deep learning?", "documents": _TEXTS, "top_n": 1}
_CLASSIFY = {"model": "classifier", "input": _TEXTS}
_COHERE_EMBED = {"model": "mini", "texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]}
_SCORE = {"model": "reranker", "text_1": "What is deep learning?", "text_2": _TEXTS}
_ITEMS = [{"id": "1", "text": "What is deep learning?"}]
_IDS = [101, 102]

# A picture of one pixel, and a sound of 32 samples.
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAA"
    "AABJRU5ErkJggg=="
)
_SILENCE = (
    "data:audio/wav;base64,UklGRmQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YUAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
)

EXAMPLES: Mapping[tuple[str, str], dict[str, Any]] = {
    (OPENAI, "/v1/embeddings"): _EMBED,
    (JINA, "/v1/embeddings"): _EMBED | {"task": "retrieval.passage", "normalized": True},
    (VLLM, "/v1/embeddings"): _EMBED | {"truncate_prompt_tokens": -1},
    (VOYAGE, "/v1/embeddings"): _EMBED | {"input_type": "document", "output_dtype": "int8"},
    (VOYAGE, "/v1/multimodalembeddings"): {
        "model": "mini",
        "inputs": [{"content": [{"type": "text", "text": one}]} for one in _TEXTS],
        "input_type": "document",
    },
    (COHERE, "/v1/embed"): _COHERE_EMBED,
    (COHERE, "/v2/embed"): _COHERE_EMBED,
    **{(INFINITY, path): _EMBED for path in ("/embeddings", "/v1/embeddings")},
    (INFINITY, "/embeddings_image"): {"model": "clip", "input": [_PIXEL]},
    (INFINITY, "/embeddings_audio"): {"model": "clap", "input": [_SILENCE]},
    **{(COHERE, path): _RANK for path in ("/v1/rerank", "/v2/rerank")},
    **{(VLLM, path): _RANK for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    (JINA, "/v1/rerank"): _RANK,
    **{(INFINITY, path): _RANK | {"return_documents": True} for path in ("/rerank", "/v1/rerank")},
    (VOYAGE, "/v1/rerank"): {name: value for name, value in _RANK.items() if name != "top_n"} | {"top_k": 1},
    (VLLM, "/score"): _SCORE,
    (VLLM, "/v1/score"): _SCORE,
    (VLLM, "/classify"): _CLASSIFY,
    (INFINITY, "/classify"): _CLASSIFY | {"raw_scores": False},
    (INFINITY, "/v1/classify"): _CLASSIFY,
    (COHERE, "/v1/classify"): {"model": "classifier", "inputs": _TEXTS},
    (VLLM, "/pooling"): _EMBED | {"encoding_format": "float"},
    (VLLM, "/tokenize"): {"model": "mini", "prompt": _TEXTS[0]},
    (VLLM, "/detokenize"): {"model": "mini", "tokens": _IDS},
    (COHERE, "/v1/tokenize"): {"model": "mini", "text": _TEXTS[0]},
    (COHERE, "/v1/detokenize"): {"model": "mini", "tokens": _IDS},
    (WEAVIATE, "/vectors"): {"text": _TEXTS[0], "config": {"pooling_strategy": "masked_mean", "task_type": "query"}},
    (WEAVIATE, "/rerank"): {"query": _TEXTS[0], "documents": _TEXTS},
    (OLLAMA, "/api/embed"): _EMBED | {"keep_alive": "5m"},
    (OLLAMA, "/api/embeddings"): {"model": "mini", "prompt": _TEXTS[0]},
    (SIE, "/v1/encode"): {"items": _ITEMS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    (SIE, "/v1/score"): {"query": {"text": "What is deep learning?"}, "items": _ITEMS},
    (SIE, "/v1/extract"): {"items": _ITEMS, "params": {"options": {"threshold": 0.5}}},
    (TEI, "/embed"): {"inputs": _TEXTS, "normalize": True},
    (TEI, "/embed_all"): {"inputs": _TEXTS},
    (TEI, "/embed_sparse"): {"inputs": _TEXTS},
    (TEI, "/predict"): {"inputs": _TEXTS[0]},
    (TEI, "/rerank"): {"query": "What is deep learning?", "texts": _TEXTS},
    (TEI, "/similarity"): {"inputs": {"source_sentence": "What is deep learning?", "sentences": _TEXTS}},
    (TEI, "/tokenize"): {"inputs": _TEXTS},
    (TEI, "/decode"): {"ids": _IDS},
    (TEI, "/vertex"): {"instances": [{"inputs": _TEXTS[0]}]},
    (TEI_OPENAI, "/v1/embeddings"): {"input": _TEXTS},
}
