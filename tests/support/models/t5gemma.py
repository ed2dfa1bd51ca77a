"""T5Gemma as an embedder: its encoder as sentence-transformers saves it, or the whole as google/ has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from .dense import build
from .families import MAX_LENGTH, WIDTH, widened
from .files import write

_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def build_t5gemma(folder: Path, *, whole: bool = False, max_length: int = MAX_LENGTH) -> Path:
    """Write the model to `folder`; `whole`: with its decoder, and all weights below `model.`."""
    build("gemma2", folder, pooling="mean", modules=(), max_length=max_length)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = max(len(tokenizer["model"]["vocab"]), *(token["id"] + 1 for token in tokenizer["added_tokens"]))
    shape: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "attn_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention"],
        **_IDS,
    }
    torch.manual_seed(1)
    config = transformers.T5GemmaConfig(encoder=shape, decoder=shape, vocab_size=size, initializer_range=0.2, **_IDS)
    model = widened(transformers.T5GemmaForConditionalGeneration(config))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if "lm_head" not in name}
    written = config.to_dict() | {"architectures": ["T5GemmaForConditionalGeneration"]}
    if not whole:
        weights = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.encoder.")}
        written |= {"is_encoder_decoder": False, "architectures": ["T5GemmaEncoderModel"]}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", written)
    return folder
