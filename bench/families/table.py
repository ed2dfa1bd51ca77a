"""All rows of the catalogue."""

from __future__ import annotations

from bench.families import decoders, encoders, others, own_code, scoring, senses, sounds, trusted
from bench.families.row import Row

ROWS: tuple[Row, ...] = (
    *encoders.ROWS,
    *decoders.ROWS,
    *own_code.ROWS,
    *others.ROWS,
    *senses.ROWS,
    *sounds.ROWS,
    *scoring.ROWS,
    *trusted.ROWS,
)

IN_OTHER_TYPES = frozenset(
    {
        *("bert-minilm", "xlmr-me5", "modernbert-gte", "distilbert-multi-qa", "mistral-sfr", "gte-qwen2-1.5b"),
        *("nomic-v1.5", "gte-multilingual", "jina-v2-base", "jina-v2-code", "qwen3-embedding-0.6b", "embeddinggemma"),
        *("nomic-v2-moe", "jina-v3-retrieval-query", "gpt2", "mpnet-all", "sentence-t5", "deberta-v3", "gemma2-bge"),
        *("t5gemma", "lfm2", "splade-v3", "sparse-router-root-document", "colbert-pylate-document", "bge-m3-sparse"),
        *("static-mrl", "rerank-bge-v2-m3", "rerank-qwen3-card", "rerank-mxbai-v1", "classify-go-emotions"),
        *("tokens-bert", "clip"),
    }
)
"""Keys of the rows that are measured in bfloat16 and int8 too: one or more of each kind of forward and of each head."""
