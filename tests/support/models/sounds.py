"""A CLAP as transformers saves it, with and without fusion; and sounds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from tests.support.models.files import CORPUS, _byte_level, pad_and_truncate
from tokenizers import processors

WIDTH = 24
RATE = 48_000


def build_clap(folder: Path, *, fuses: bool = False, seed: int = 0) -> Path:
    """Write a CLAP to `folder`, which reads windows of two seconds."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = _byte_level(names, CORPUS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    ids = {name: tokenizer.token_to_id(name) for name in names}
    texts = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 100}
    texts |= {"pad_token_id": ids["<pad>"], "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    sounds: dict[str, Any] = {"hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1]}
    sounds |= {"num_attention_heads": [2, 2], "spec_size": 256, "window_size": 8, "enable_fusion": fuses}
    sounds |= {"fusion_type": "aff_2d" if fuses else None}
    config = transformers.ClapConfig(text_config=texts, audio_config=sounds, projection_dim=WIDTH)
    torch.manual_seed(seed)
    model: Any = transformers.ClapModel(config)
    with torch.no_grad():  # the library's own statistics are those of no sound
        model.audio_model.audio_encoder.batch_norm.running_mean.fill_(-30.0)
        model.audio_model.audio_encoder.batch_norm.running_var.fill_(200.0)
    model.save_pretrained(folder)
    extractor: Any = transformers.ClapFeatureExtractor(
        max_length_s=2, frequency_min=50, truncation="fusion" if fuses else "rand_trunc"
    )
    extractor.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=90, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    return folder


def sound(seconds: float, seed: int = 0, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """A rising tone over noise, float32 [samples] or [samples, channels]."""
    at = np.arange(int(seconds * rate))[:, None] / rate
    noise = np.random.default_rng(seed).standard_normal((len(at), channels))
    found = 0.4 * np.sin(2 * np.pi * (200 + 100 * seed + 300 * at) * at) + 0.1 * noise
    return np.squeeze(found.astype(np.float32), 1) if channels == 1 else found.astype(np.float32)


def file_of(samples: np.ndarray, form: str = "WAV", subtype: str | None = "FLOAT", rate: int = RATE) -> bytes:
    """The bytes of a sound file."""
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=form, subtype=subtype)
    return written.getvalue()
