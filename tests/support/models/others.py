"""BGE-M3, whose one forward gives three outputs, and static embeddings, which have no forward at all."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import nn

from .dense import build
from .families import WIDTH
from .files import write, write_modules
from .vocabularies import word_piece


def build_m3(folder: Path, *, multi_vector_width: int = WIDTH, seed: int = 0) -> Path:
    """Write a BGE-M3: an XLM-RoBERTa that pools its first token, and its authors' two linear layers beside it."""
    build("xlm_roberta", folder, pooling="cls", seed=seed)
    torch.save(nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(nn.Linear(WIDTH, multi_vector_width).state_dict(), folder / "colbert_linear.pt")
    return folder


def build_static(
    folder: Path,
    *,
    layout: Literal["sentence-transformers", "model2vec"] = "sentence-transformers",
    normalize: bool = True,
    mapped: bool = False,
    seed: int = 0,
) -> Path:
    """Write a static embedding model; `mapped` as Model2Vec's quantised vocabularies, with a weight per token.

    `normalize` is Model2Vec's config.json's.
    """
    torch.manual_seed(seed)
    tokenizer = word_piece()()
    size = len(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "sentence-transformers":
        place = folder / "0_StaticEmbedding"
        place.mkdir()
        save_file({"embedding.weight": torch.randn(size, WIDTH)}, place / "model.safetensors")
        tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
        kind = "sentence_transformers.models.StaticEmbedding"
        write(folder / "modules.json", [{"idx": 0, "name": "0", "path": place.name, "type": kind}])
        write(folder / "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": None})
        return folder
    weights = {"embeddings": torch.randn(size // 2 if mapped else size, WIDTH)}
    if mapped:
        weights |= {"mapping": torch.arange(size) // 2 % (size // 2), "weights": torch.rand(size)}
    save_file(weights, folder / "model.safetensors")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": normalize})
    write_modules(folder, "sentence_transformers.models.StaticEmbedding", "sentence_transformers.models.Normalize")
    return folder
