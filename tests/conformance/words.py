"""Words that cases and models share. What a tiny tokenizer makes of them is in the figures."""

from __future__ import annotations

from typing import Any

WIDTH = 32
TOKEN_WIDTH = 16
MAX_TOKENS = 96  # of every tiny model
MAX_CHARACTERS = 250 * MAX_TOKENS
LABELS = ("anger", "joy", "surprise")

API_KEY = "sesame"
ORIGIN = "https://page.example"
POISON = "[MASK]"

TEXT = "Rain fell on the harbour all night; 东京 and Zürich."
ONE = "%"  # one token, and no other letter beside it changes that: words are cut differently at every training
FULL = f"{ONE} " * (MAX_TOKENS - 2)  # and two special ones: exactly MAX_TOKENS
LONG_TOKENS = 402
LONG = f"{ONE} " * (LONG_TOKENS - 2)
QUERY = "how long does a query wait"
PASSAGES = ["not longer than one small batch", "fog", "rain on the harbour"]

# An instance, a path and a body whose answer has floats, for each kind of them.
WITH_FLOATS: list[tuple[str, str, dict[str, Any]]] = [
    ("embedding", "/embed", {"inputs": TEXT}),
    ("embedding", "/embed_all", {"inputs": TEXT}),
    ("embedding", "/similarity", {"inputs": {"source_sentence": TEXT, "sentences": PASSAGES}}),
    ("embedding", "/v1/embeddings", {"input": TEXT}),
    ("sparse", "/embed_sparse", {"inputs": TEXT}),
    ("classifier", "/predict", {"inputs": TEXT}),
    ("reranker", "/rerank", {"query": QUERY, "texts": PASSAGES}),
]

# TEI's sentences.
EMPTY = "Input validation error: `inputs` cannot be empty"
NOT_EMBEDDING = "Backend error: Model is not an embedding model"
NOT_SPLADE = "Backend error: Model is not an embedding model with SPLADE pooling"
NOT_CLASSIFIER = "Backend error: Model is not a classifier model"
NOT_RERANKER = "Backend error: model is not a re-ranker model"
NO_NORMALIZE = "Backend error: `normalize` is not available for SPLADE models"
NO_EMBED_ALL = "Backend error: `embed_all` is not available for SPLADE models"
# teimgr's own: late interaction is no kind of TEI's.
NO_VECTOR = (
    "Backend error: Model is not an embedding model with one vector per text: `embed_all` gives its vectors per token"
)
NAN_VECTOR = "Backend error: the vector has NaN or infinity in it"


def too_many(count: int, most: int = 32) -> str:
    return f"batch size {count} > maximum allowed batch size {most}"


def too_long(tokens: int, most: int = MAX_TOKENS) -> str:
    return f"Input validation error: `inputs` must have less than {most} tokens. Given: {tokens}"


def too_wide(characters: int) -> str:
    return f"Input validation error: `inputs` must have less than {MAX_CHARACTERS} characters. Given: {characters}"
