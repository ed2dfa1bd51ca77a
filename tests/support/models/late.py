"""Late interaction: a vector for every token. The layouts of sentence-transformers 6, PyLate and Stanford's ColBERT."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from .dense import IDENTITY, write_dense
from .families import FAMILIES, WIDTH, Family
from .files import edit, pad_and_truncate, write, write_modules
from .further import family_of
from .vocabularies import with_marks, word_piece

TOKEN_WIDTH = 16
_ON_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


def build_multi_vector(
    family: str,
    folder: Path,
    *,
    layout: Literal["saved", "pylate", "stanford"] = "saved",
    query_length: int = 12,
    document_length: int = 40,
    expand: bool = True,
    attend: bool = False,
    skip_words: tuple[str, ...] = tuple(string.punctuation),
    prompts: dict[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """Write a late-interaction model of `family`; Stanford's layout is BERT's alone.

    `prompts` are those of sentence-transformers' own layout; PyLate's has the tokens "[Q] " and "[D] ", Stanford's
    the ordinary vocabulary entries [unused0] and [unused1].
    """
    torch.manual_seed(seed)
    if layout == "stanford":
        return _stanford(folder, query_length, document_length, attend)
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    if layout == "pylate":
        with_marks(tokenizer, "[Q] ", "[D] ")
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    if layout == "pylate":
        return _pylate(folder, query_length, document_length, expand, attend, skip_words)
    expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": query_length}
    lengths: dict[str, Any] = {"max_seq_length": 96, "do_lower_case": False, "document_length": document_length}
    lengths |= {"query_expansion": expansion} if expand else {"query_length": query_length}
    write(folder / "sentence_bert_config.json", lengths)
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, IDENTITY, bias=False, **_ON_TOKENS)
    write(folder / "2_MultiVectorMask" / "config.json", {"skiplist_words": list(skip_words)})
    write(folder / "3_Normalize" / "config.json", _ON_TOKENS)
    write_modules(
        folder,
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.base.modules.dense.Dense",
        "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        "sentence_transformers.base.modules.normalize.Normalize",
    )
    write(
        folder / "config_sentence_transformers.json",
        {"model_type": "MultiVectorEncoder", "prompts": prompts or {}, "similarity_fn_name": "maxsim"},
    )
    return folder


def _pylate(
    folder: Path, query_length: int, document_length: int, expand: bool, attend: bool, skip_words: tuple[str, ...]
) -> Path:
    write(folder / "sentence_bert_config.json", {"max_seq_length": 96, "do_lower_case": False})
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, IDENTITY, bias=False)
    write_modules(folder, "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    write(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "prompts": {},
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": query_length,
            "document_length": document_length,
            "do_query_expansion": expand,
            "attend_to_expansion_tokens": attend,
            "skiplist_words": list(skip_words),
        },
    )
    return folder


def _stanford(folder: Path, query_length: int, document_length: int, attend: bool) -> Path:
    """One file of weights: the encoder's under "bert.", and the projection's beside them."""
    family = Family(word_piece(unused=4), FAMILIES["bert"].config)
    tokenizer = family.tokenizer()
    family.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(TOKEN_WIDTH, WIDTH)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    write(
        folder / "artifact.metadata",
        {
            "query_token_id": "[unused0]",
            "doc_token_id": "[unused1]",
            "query_maxlen": query_length,
            "doc_maxlen": document_length,
            "mask_punctuation": True,
            "attend_to_mask_tokens": attend,
            "dim": TOKEN_WIDTH,
        },
    )
    return folder
