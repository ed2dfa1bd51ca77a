"""Rerankers and classifiers: a transformer with a head, or a language model that answers yes or no."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from sentence_transformers import CrossEncoder
from tests.support.models.encoders import IDENTITY, save_encoder, write_dense, write_layer_norm
from tests.support.models.families import FAMILIES, MAX_LENGTH, WIDTH, widened
from tests.support.models.files import chat, edit, judging, pad_and_truncate, write, write_modules
from tests.support.models.further import family_of

LABELS = ("anger", "joy", "surprise")


def build_classifier(
    family: str,
    folder: Path,
    *,
    labels: tuple[str, ...] = LABELS,
    multi_label: bool = False,
    classifier_pooling: str | None = None,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write a sequence classifier as transformers saves it. `classifier_pooling` is ModernBERT's "cls" or "mean"."""
    settings: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if multi_label:
        settings["problem_type"] = "multi_label_classification"
    if classifier_pooling:
        settings["classifier_pooling"] = classifier_pooling
    torch.manual_seed(seed)
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    tokenizer.model_max_length = max_length
    model = kind.headed(transformers.AutoModelForSequenceClassification, len(tokenizer), **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    return folder


def build_cross_encoder(
    family: str,
    folder: Path,
    *,
    layout: Literal["plain", "version-4", "saved"] = "plain",
    activation: str | None = None,
    labels: int = 1,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write a cross-encoder: as transformers saves it, as CrossEncoder 4 to 5.3 did, or as CrossEncoder saves it now.

    `activation` is a dotted class name in config.json; None leaves it to the reader.
    """
    names = tuple(f"LABEL_{index}" for index in range(labels))
    build_classifier(family, folder, labels=names, max_length=max_length, seed=seed)
    if layout == "plain":
        if activation:  # where CrossEncoder kept it before version 4
            edit(folder / "config.json", sbert_ce_default_activation_function=activation)
        return folder
    edit(
        folder / "config.json",
        sentence_transformers={"activation_fn": activation or IDENTITY},
    )
    if layout == "saved":
        CrossEncoder(str(folder), device="cpu", local_files_only=True).save_pretrained(str(folder))
    return folder


def build_modular_cross_encoder(family: str, folder: Path, *, labels: int = 1, seed: int = 0) -> Path:
    """Write a cross-encoder of modules, as cross-encoder/ettin-reranker-*: Pooling, Dense, LayerNorm, and a Dense that
    gives the scores.
    """
    torch.manual_seed(seed)
    save_encoder(family, folder)
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": forward},
            "module_output_name": "token_embeddings",
        },
    )
    pooling = {"embedding_dimension": WIDTH, "pooling_mode": "cls", "include_prompt": True}
    write(folder / "1_Pooling" / "config.json", pooling)
    write_dense(folder / "2_Dense", WIDTH, WIDTH, "torch.nn.modules.activation.GELU", bias=False)
    write_layer_norm(folder / "3_LayerNorm", WIDTH)
    gives = {"module_input_name": "sentence_embedding", "module_output_name": "scores"}
    write_dense(folder / "4_Dense", WIDTH, labels, IDENTITY, **gives)
    base, own = "sentence_transformers.base.modules", "sentence_transformers.sentence_transformer.modules"
    write_modules(
        folder,
        f"{base}.transformer.Transformer",
        f"{own}.pooling.Pooling",
        f"{base}.dense.Dense",
        f"{own}.layer_norm.LayerNorm",
        f"{base}.dense.Dense",
    )
    saved = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None, "activation_fn": IDENTITY}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def build_yes_no_reranker(
    folder: Path, *, layout: Literal["plain", "saved", "classifier"] = "plain", max_length: int = 256, seed: int = 0
) -> Path:
    """Write a Qwen3-Reranker: as its authors published it, with the files of sentence-transformers 5.4 and later, or as
    a classifier of sequences with these files ("classifier").
    """
    torch.manual_seed(seed)
    tokenizer = chat()
    tokenizer.model_max_length = max_length
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0}
    config = FAMILIES["qwen3"].config(len(tokenizer))
    for name, value in {**ids, "max_position_embeddings": 512, "tie_word_embeddings": True}.items():
        setattr(config, name, value)
    auto: Any = transformers.AutoModelForCausalLM
    if layout == "classifier":
        auto, config.num_labels = transformers.AutoModelForSequenceClassification, 1
    widened(auto.from_config(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if layout == "plain":
        (folder / "README.md").write_text(
            "---\nlicense: apache-2.0\npipeline_tag: text-ranking\n---\n\n# Qwen3-Reranker-0.6B\n"
        )
        return folder
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    is_classifier = layout == "classifier"
    write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "sequence-classification" if is_classifier else "text-generation",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": message},
            "module_output_name": "scores" if is_classifier else "causal_logits",
        },
    )
    modules = ["sentence_transformers.base.modules.transformer.Transformer"]
    if not is_classifier:
        yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
        write(folder / "1_LogitScore" / "config.json", {"true_token_id": yes, "false_token_id": no})
        modules.append("sentence_transformers.cross_encoder.modules.logit_score.LogitScore")
    write_modules(folder, *modules)
    write(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "activation_fn": IDENTITY,
            "prompts": {"query": "Find what answers the query"},
            "default_prompt_name": "query",
        },
    )
    return folder


def build_prompted_reranker(
    folder: Path, family: Literal["qwen2", "gemma"], *, card: str | None = None, max_length: int = 512, seed: int = 0
) -> Path:
    """Write a language model as mxbai-rerank-v2 ("qwen2") or bge-reranker-v2-gemma have it: the prompt is in their
    authors' code alone. `card` is the text of the model card, None for that of the hub.
    """
    torch.manual_seed(seed)
    tokenizer = judging(begins=family == "gemma")
    tokenizer.model_max_length = max_length
    settings = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": max_length,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    kind = {"qwen2": transformers.Qwen2Config, "gemma": transformers.GemmaConfig}[family]
    widened(transformers.AutoModelForCausalLM.from_config(kind(**settings))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tag, name = {
        "qwen2": ("text-ranking", "mixedbread-ai/mxbai-rerank-base-v2"),
        "gemma": ("text-classification", "BAAI/bge-reranker-v2-gemma"),
    }[family]
    front = f"---\nlibrary_name: transformers\nlicense: apache-2.0\npipeline_tag: {tag}\n---\n"
    (folder / "README.md").write_text(front + (f"\n# {name}\n" if card is None else card))
    return folder


_CHAT_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document answers the Query. Say yes or no.<|im_end|>\n"
    "<|im_start|>user\n"
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def build_token_classifier(family: str, folder: Path, *, max_length: int = MAX_LENGTH, seed: int = 0) -> Path:
    """Write a classifier of tokens as transformers saves it: labels by the scheme of B- and I-."""
    names = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    torch.manual_seed(seed)
    kind = FAMILIES[family]
    tokenizer = kind.tokenizer()
    tokenizer.model_max_length = max_length
    settings = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    model = kind.headed(transformers.AutoModelForTokenClassification, len(tokenizer), **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    return folder
