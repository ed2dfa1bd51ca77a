"""Models of texts and sounds in one space: both are asked in the same jobs, and compared with transformers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import soundfile
import torch
from tests.fidelity.figures import Matrix
from tests.support.models.dual_encoders import RATE, build_clap, sound, sound_file

from bench.families.row import TRANSFORMERS, Row

_LONGEST = 90


def sound_files() -> list[bytes]:
    """Files of sounds: shorter than the window of the model, and as long."""
    return [
        sound_file(sound(0.7)),
        sound_file(sound(2.0, 1), "FLAC", "PCM_16"),
        sound_file(sound(1.2, 2), "OGG", "VORBIS"),
    ]


def library(folder: Path, inputs: Sequence[Any]) -> list[Matrix]:
    """The vectors of transformers and its own feature extractor, one input at a time; longer sounds, which it cuts at
    random, are compared in `tests/engine/sounds`.
    """
    from transformers import ClapFeatureExtractor, ClapModel, PreTrainedTokenizerFast

    model: Any = ClapModel.from_pretrained(folder, dtype=torch.float32).eval()
    extractor: Any = ClapFeatureExtractor.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    with torch.inference_mode():
        for one in inputs:
            if isinstance(one, bytes):
                samples, _ = soundfile.read(io.BytesIO(one), dtype="float32")
                read = extractor(samples, sampling_rate=RATE, return_tensors="pt")
                read["is_longer"] = torch.zeros((1, 1), dtype=torch.bool)
                vector = model.get_audio_features(**read).pooler_output
            else:
                read = tokenizer(one, truncation=True, max_length=_LONGEST, return_tensors="pt")
                vector = model.get_text_features(input_ids=read["input_ids"]).pooler_output
            found.append(vector.numpy())
    return found


def _row(key: str, hub: str, *, fuses: bool) -> Row:
    def make(folder: Path) -> None:
        build_clap(folder, fuses=fuses)

    return Row(
        key,
        "CLAP",
        hub,
        make,
        by=TRANSFORMERS,
        reference=library,
        longest=_LONGEST,
        note="texts and sounds of at most a window",
        has_sounds=True,
    )


ROWS = (
    _row("clap", "laion/clap-htsat-unfused, larger_clap_general, larger_clap_music_and_speech", fuses=False),
    _row("clap-fused", "laion/clap-htsat-fused", fuses=True),
)
