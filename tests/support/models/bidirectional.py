"""Decoders whose tokens attend both ways by their own code: voyage-4-nano, pplx-embed-v1, llama-nemotron-rerank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .families import FAMILIES, WIDTH
from .files import edit, pad_and_truncate, read, write
from .own_code import build_decoder, drawn

WIDER = 2 * WIDTH
VOYAGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "num_labels": WIDER,
    "use_bidirectional_attention": True,
}
PPLX = {
    "architectures": ["PPLXQwen3Model"],
    "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
    "use_cache": False,
}


def build_voyage(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    extra = {"linear.weight": drawn()(WIDER, WIDTH)}
    weights, config = build_decoder("qwen3", folder, pooling="mean", extra=extra, **VOYAGE | changes)
    return weights | extra, config


def build_pplx(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = build_decoder("qwen3", folder, pooling="mean", **PPLX)
    rows = read(folder / "modules.json")[:2]
    own = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    (folder / "modules.json").unlink()
    write(folder / "modules.json", [*rows, own])
    return found


NEMOTRON_CLASSES = {
    "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
    "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    "AutoModelForSequenceClassification": "llama_bidirectional_model.LlamaBidirectionalForSequenceClassification",
}
NEMOTRON = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "auto_map": NEMOTRON_CLASSES,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 1.0,
}


def build_nemotron(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Gives the weights, without `model.`, and config.json."""
    torch.manual_seed(0)
    kind = FAMILIES["llama"]
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    weights = load_file(folder / "model.safetensors")
    score = {"score.weight": drawn()(1, WIDTH)}
    saved = {f"model.{name}": tensor for name, tensor in weights.items()} | score
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", **NEMOTRON | changes)
    return weights | score, read(folder / "config.json")
