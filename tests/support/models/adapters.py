"""PEFT adapters as PEFT and sentence-transformers save them, and the same model with the adapter merged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from .files import write

RANK = 4
LORA = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": RANK,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["query", "value"],
    "task_type": "FEATURE_EXTRACTION",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
ADAPTED = ("attention.self.query", "attention.self.value", "q_proj", "v_proj")
Variant = Literal["plain", "rslora", "dora", "patterns", "table", "saved-whole", "lora-bias"]


def build_adapter(
    base: Path, folder: Path, merged: Path, *, variant: Variant = "plain", named: str | None = None, **changes: Any
) -> None:
    """Write an adapter of the model at `base` to `folder`, and the model with it merged to `merged`.

    The modules behind the transformer and the tokenizer are in `folder`, as sentence-transformers saves them; `named`
    is how the adapter names its base, its directory if None.
    """
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    config = LORA | {"base_model_name_or_path": str(base) if named is None else named}
    config |= {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}.get(variant, {})
    config |= {"patterns": {"alpha_pattern": {"layer.1.attention.self.value": 20}, "rank_pattern": {"value": 2}}}.get(
        variant, {}
    )
    saved: dict[str, torch.Tensor] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    for name in sorted(weights):
        layer = name.removesuffix(".weight")
        if not layer.endswith(ADAPTED) or layer == name:
            continue
        own, out, into = f"base_model.model.{layer}", *weights[name].shape
        rank = 2 if variant == "patterns" and layer.endswith("value") else RANK
        alpha = 20 if variant == "patterns" and layer.endswith("layer.1.attention.self.value") else 8
        a, b = drawn(rank, into), drawn(out, rank)
        saved |= {f"{own}.lora_A.weight": a, f"{own}.lora_B.weight": b}
        scale = alpha / (rank**0.5 if variant == "rslora" else rank)
        changed = weights[name] + scale * b @ a
        if variant == "dora":
            length = saved[f"{own}.lora_magnitude_vector"] = 1 + drawn(out).abs()
            changed = length[:, None] * changed / changed.norm(dim=1, keepdim=True)
        if variant == "lora-bias":
            bias = saved[f"{own}.lora_B.bias"] = drawn(out)
            weights[f"{layer}.bias"] = weights[f"{layer}.bias"] + scale * bias
        weights[name] = changed
    if variant == "table":
        table = "embeddings.word_embeddings"
        rows, width = weights[f"{table}.weight"].shape
        a, b = drawn(RANK, rows), drawn(width, RANK)
        saved |= {f"base_model.model.{table}.lora_embedding_A": a, f"base_model.model.{table}.lora_embedding_B": b}
        weights[f"{table}.weight"] = weights[f"{table}.weight"] + 2 * (b @ a).T
    if variant == "saved-whole":
        for name in ("encoder.layer.1.output.dense.weight", "encoder.layer.0.attention.self.query.bias"):
            called = name.replace("query.bias", "query.base_layer.bias")  # as PEFT has it with `bias` = "lora_only"
            saved[f"base_model.model.{called}"] = weights[name] = drawn(*weights[name].shape)
    for place in (folder, merged):
        shutil.copytree(base, place, dirs_exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    write(folder / "adapter_config.json", config | changes)
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
