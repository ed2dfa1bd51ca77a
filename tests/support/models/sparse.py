"""SPLADE: a masked-LM head, and the strongest or summed weight of every word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import transformers

from .families import FAMILIES, MAX_LENGTH
from .files import pad_and_truncate, write, write_modules


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
    kind = FAMILIES[family]
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
