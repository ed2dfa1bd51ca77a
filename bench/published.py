"""Published shapes of other kinds than BERT's embeddings, with random weights: they measure speed, never quality."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.weights import copy_tokenizer


@dataclass(frozen=True)
class Published:
    """A shape: the class in transformers, and what its configuration has other than by default.

    `pooling` is the mode of the Pooling module, "" where there is none.
    """

    architecture: str
    configuration: dict[str, Any]
    pooling: str = ""


PUBLISHED = {
    "xlm-r-reranker": Published(
        "XLMRobertaForSequenceClassification",
        {"num_labels": 1, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "splade": Published("BertForMaskedLM", {}),
    "modernbert": Published("ModernBertModel", {"cls_token_id": 101, "sep_token_id": 102}, "mean_tokens"),
    "qwen3": Published(
        "Qwen3Model",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "lasttoken",
    ),
}
"""XLM-RoBERTa-base with one label, BERT-base with its masked-LM head, ModernBERT-base and Qwen3-Embedding-0.6B."""

_LONGEST = 512
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}  # of MiniLM's vocabulary
_WORDS_PER_WEIGHT = 128  # of the vocabulary of the SPLADE model


def random_published(folder: Path, like: Path, shape: str, **smaller: Any) -> Path:
    """A model of one of `PUBLISHED` that takes 512 tokens in `folder`, with the tokenizer of `like`, MiniLM.

    `smaller` replaces numbers of its configuration.
    """
    import torch
    import transformers

    published = PUBLISHED[shape]
    copy_tokenizer(folder, like)
    settings = folder / "tokenizer_config.json"
    # MiniLM's tokenizer gives the second text of a pair another type of token; XLM-RoBERTa has one type, others none.
    untyped = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    _write(settings, json.loads(settings.read_text()) | untyped)
    vocabulary = json.loads((like / "config.json").read_text())["vocab_size"]
    kind = getattr(transformers, published.architecture)
    config = kind.config_class(**{"vocab_size": vocabulary} | _SPECIAL | published.configuration | smaller)
    torch.manual_seed(0)
    model = kind(config)
    if shape == "splade":
        _keep_few_words(model)
        _write_splade(folder, vocabulary)
    elif published.pooling:
        _write_pooling(folder, published.pooling, config.hidden_size)
    model.save_pretrained(folder)
    return folder


def _keep_few_words(model: Any) -> None:
    """Biases that leave one word in `_WORDS_PER_WEIGHT` a weight.

    A trained model gives some hundred words one, random logits would give nearly all of them one.
    """
    bias = model.get_output_embeddings().bias.data
    bias.fill_(-10.0)
    bias[::_WORDS_PER_WEIGHT] = 0.0


def _write_splade(folder: Path, vocabulary: int) -> None:
    modules = "sentence_transformers.sparse_encoder.models"
    _write_modules(folder, f"{modules}.MLMTransformer", f"{modules}.SpladePooling")
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": vocabulary}
    _write(folder / "1_SpladePooling" / "config.json", pooling)
    _write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})


def _write_pooling(folder: Path, mode: str, width: int) -> None:
    modules = "sentence_transformers.models"
    _write_modules(folder, *(f"{modules}.{name}" for name in ("Transformer", "Pooling", "Normalize")))
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "lasttoken")}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width} | modes)


def _write_modules(folder: Path, *types: str) -> None:
    """The list of modules, the first at the root, and the longest input."""
    paths = ["", *(f"{at}_{kind.rpartition('.')[2]}" for at, kind in enumerate(types[1:], 1))]
    rows = [
        {"idx": at, "name": str(at), "path": path, "type": kind}
        for at, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    _write(folder / "modules.json", rows)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": _LONGEST, "do_lower_case": False})


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
