"""Tiny models with random weights, written to a directory exactly as their authors' libraries leave them there.

Two layers, width 32, a tokenizer trained on a paragraph: everything about them is small but the file layout.
"""

from tests.support.models.encoders import (
    TOKEN_WIDTH,
    build,
    build_embedding_gemma,
    build_m3,
    build_multi_vector,
    build_routed_dense,
    build_routed_sparse,
    build_splade,
    build_static,
)
from tests.support.models.families import FAMILIES, MAX_LENGTH, WIDTH
from tests.support.models.files import CORPUS, PAIRS, TEXTS, edit, read, write, write_modules
from tests.support.models.scoring import (
    LABELS,
    build_classifier,
    build_cross_encoder,
    build_modular_cross_encoder,
    build_prompted_reranker,
    build_yes_no_reranker,
)

__all__ = [
    "CORPUS",
    "FAMILIES",
    "LABELS",
    "MAX_LENGTH",
    "PAIRS",
    "TEXTS",
    "TOKEN_WIDTH",
    "WIDTH",
    "build",
    "build_classifier",
    "build_cross_encoder",
    "build_embedding_gemma",
    "build_m3",
    "build_modular_cross_encoder",
    "build_multi_vector",
    "build_prompted_reranker",
    "build_routed_dense",
    "build_routed_sparse",
    "build_splade",
    "build_static",
    "build_yes_no_reranker",
    "edit",
    "read",
    "write",
    "write_modules",
]
