"""SPLADE: a masked-LM head, and the strongest or summed weight of every word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import transformers
from safetensors.torch import save_file

from .families import MAX_LENGTH
from .files import pad_and_truncate, write, write_modules
from .further import family_of


def build_splade(
    family: str,
    folder: Path,
    *,
    layout: Literal["plain", "version-5", "saved"] = "version-5",
    strategy: str = "max",
    activation: str = "relu",
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write a SPLADE model: as naver published them (a bare masked-LM), as SparseEncoder 5.0, or as it saves now."""
    torch.manual_seed(seed)
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    tokenizer.model_max_length = max_length
    kind.headed(transformers.AutoModelForMaskedLM, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    if layout == "plain":
        return folder
    write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})
    lengths: dict[str, object] = {"max_seq_length": max_length, "do_lower_case": False}
    pooling: dict[str, object] = {"pooling_strategy": strategy, "activation_function": activation}
    modules = "sentence_transformers.sparse_encoder.models"
    first = f"{modules}.MLMTransformer"
    if layout == "saved":
        logits = {"text": {"method": "forward", "method_output_name": "logits"}}
        lengths |= {
            "transformer_task": "fill-mask",
            "modality_config": logits,
            "module_output_name": "token_embeddings",
        }
        modules = "sentence_transformers.sparse_encoder.modules.splade_pooling"
        first = "sentence_transformers.base.modules.transformer.Transformer"
        pooling["embedding_dimension"] = len(tokenizer)
    else:
        pooling["word_embedding_dimension"] = len(tokenizer)
    write(folder / "sentence_bert_config.json", lengths)
    write_modules(folder, first, f"{modules}.SpladePooling")
    write(folder / "1_SpladePooling" / "config.json", pooling)
    return folder


def build_routed_sparse(
    folder: Path, *, nested: bool = False, default_route: str | None = "document", activation: str = "log1p_relu"
) -> Path:
    """opensearch-neural-sparse-encoding-doc-v3-*, with the transformer at the root, or `nested` as splade-v3-doc:
    SPLADE for documents, a weight of each token for queries.
    """
    home = folder / "document_0_MLMTransformer" if nested else folder
    build_splade("bert", home, layout="plain")
    lengths = {"max_seq_length": MAX_LENGTH, "do_lower_case": False}
    write(home / "sentence_bert_config.json", lengths)
    table = folder / "query_0_SparseStaticEmbedding"
    table.mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(table)
    weights = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(7)) * 4
    weights[::3] = 0.0
    save_file({"weight": weights}, table / "model.safetensors", metadata={"format": "pt"})
    write(table / "config.json", {"frozen": True})
    pooling = {"pooling_strategy": "max", "activation_function": activation, "word_embedding_dimension": len(tokenizer)}
    write(folder / "document_1_SpladePooling" / "config.json", pooling)
    package = "sentence_transformers.sparse_encoder.models"
    document, query = "document_0_MLMTransformer" if nested else "", table.name
    router = {
        "types": {
            query: f"{package}.SparseStaticEmbedding",
            document: f"{package}.MLMTransformer",
            "document_1_SpladePooling": f"{package}.SpladePooling",
        },
        "structure": {"query": [query], "document": [document, "document_1_SpladePooling"]},
        "parameters": {"default_route": default_route, "allow_empty_key": True},
    }
    write(folder / "router_config.json", router)
    write_modules(folder, "sentence_transformers.models.Router")
    saved = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", saved)
    return folder
