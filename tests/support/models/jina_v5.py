"""jina-embeddings-v5-text as the hub has it: Qwen3 (small) or EuroBERT (nano), and a LoRA adapter of PEFT by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .families import FAMILIES
from .files import edit, pad_and_truncate, read, write
from .own_code import drawn

TASKS = ("retrieval", "text-matching", "clustering", "classification")
ADAPTED = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
RANK, ALPHA = 4, 8
_LONGEST = 192
_OF_NANO = {
    "is_decoder": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "mask_token": "<mask>",
    "mask_token_id": 4,
    "hidden_dropout": 0.0,
    "rope_scaling": None,
    "rope_theta": 5000,
    "torch_dtype": "float32",
}


def build_jina_v5(folder: Path, *, nano: bool = False) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Gives the merged weights by task, and config.json."""
    torch.manual_seed(0)
    kind = FAMILIES["eurobert" if nano else "qwen3"]
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    edit(
        folder / "config.json",
        architectures=["JinaEmbeddingsV5Model"],
        task_names=list(TASKS),
        auto_map={
            "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
            "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
        },
        model_type="jina_embeddings_v5",
        max_position_embeddings=_LONGEST,
        **({**_OF_NANO, "rope_parameters": None} if nano else {}),
    )
    if nano:
        write(folder / "config.json", {key: v for key, v in read(folder / "config.json").items() if v is not None})
    row = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    write(folder / "modules.json", [{**row, "kwargs": ["task", "truncate_dim"]}])
    saved = {"prompts": {"query": "Query: ", "document": "Document: "}, "default_prompt_name": "document"}
    write(folder / "config_sentence_transformers.json", {**saved, "similarity_fn_name": "cosine"})
    weights = load_file(folder / "model.safetensors")
    return _adapters(folder, weights), read(folder / "config.json")


def _adapters(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    make = drawn(0.3)
    merged = {}
    for task in TASKS:
        saved, changed = {}, dict(weights)
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            if layer.endswith(ADAPTED):
                a, b = make(RANK, weight.shape[1]), make(weight.shape[0], RANK)
                saved |= {f"base_model.model.{layer}.lora_{half}.weight": w for half, w in (("A", a), ("B", b))}
                changed[name] = weight + ALPHA / RANK * b @ a
        own = folder / "adapters" / task
        own.mkdir(parents=True)
        save_file(saved, own / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "base_model_name_or_path": "jinaai/jina-embeddings-v5-text", "r": RANK}
        config |= {"lora_alpha": ALPHA, "init_lora_weights": "gaussian", "bias": "none", "inference_mode": True}
        write(own / "adapter_config.json", {**config, "target_modules": list(ADAPTED), "use_rslora": False})
        merged[task] = changed
    return merged
