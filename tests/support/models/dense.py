"""Embedding models: a transformer, its pooling, and what comes behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .families import MAX_LENGTH, WIDTH
from .files import pad_and_truncate, write, write_modules
from .further import family_of

TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"

_BOOLEANS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def build(
    family: str,
    folder: Path,
    *,
    pooling: str | None = None,
    include_prompt: bool = True,
    dense: tuple[int, str] | None = None,
    modules: tuple[str, ...] | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write an embedding model of `family` to `folder` in the layout of sentence-transformers 2 to 5.3.

    `pooling` is a name of sentence-transformers ("mean", "cls", "lasttoken", "max", "weightedmean", …) or several
    joined by "+"; `dense` is the output width and the activation's dotted name of a Dense module. `modules` are those
    behind the pooling, in order, where there is more to it: "Dense", "Dense:Tanh", "LayerNorm", "Normalize"; every
    Dense halves the width.
    """
    torch.manual_seed(seed)
    save_encoder(family, folder)
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    named = (pooling or family_of(family).pooling).split("+")
    write(folder / "1_Pooling" / "config.json", _pooling(named, include_prompt))
    behind = modules if modules is not None else (*(["Dense"] if dense else []), "Normalize")
    names = [name.split(":")[0] for name in behind]
    width = WIDTH * len(named)
    for index, name in enumerate(behind, 2):
        place = folder / f"{index}_{names[index - 2]}"
        if name.startswith("Dense"):
            given = dense or (width // 2, TANH if name.endswith(":Tanh") else IDENTITY)
            write_dense(place, width, *given)
            width = given[0]
        elif name == "LayerNorm":
            write_layer_norm(place, width)
    write_modules(folder, *(f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", *names)))
    saved = {"prompts": prompts or {}, "default_prompt_name": default_prompt_name}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def build_embedding_gemma(folder: Path, *, seed: int = 0) -> Path:
    """Write a model laid out as EmbeddingGemma: two Dense modules, then Normalize, and its prompts."""
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    return build("gemma3", folder, modules=("Dense", "Dense", "Normalize"), prompts=prompts, seed=seed)


def save_encoder(family: str, folder: Path) -> None:
    """Write the bare transformer and its tokenizer to `folder`."""
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")


def write_dense(folder: Path, inputs: int, outputs: int, activation: str, bias: bool = True, **keys: Any) -> None:
    """Write a Dense module; `keys` are further ones of its config.json."""
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    write(folder / "config.json", config | keys)
    weights = {"linear.weight": torch.randn(outputs, inputs)}
    save_file(weights | ({"linear.bias": torch.randn(outputs)} if bias else {}), folder / "model.safetensors")


def write_layer_norm(folder: Path, width: int) -> None:
    """Write a LayerNorm module."""
    write(folder / "config.json", {"dimension": width})
    save_file({"norm.weight": torch.randn(width), "norm.bias": torch.randn(width)}, folder / "model.safetensors")


def _pooling(named: list[str], include_prompt: bool) -> dict[str, Any]:
    flags = {key: mode in named for mode, key in _BOOLEANS.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": include_prompt}
