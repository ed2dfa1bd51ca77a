"""Both halves of a model of texts and sounds: the library's modules, and their heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ClapTextModel

from teimgr.engine.backbone import Transformer
from teimgr.engine.heads.pooling import DenseHead
from teimgr.engine.images.model import DualModel
from teimgr.engine.job import Output
from teimgr.engine.library_model import load_module
from teimgr.engine.sounds.files import SoundDecoder, Spectrograms, known_samples, prepare
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Layout

_WINDOWS_AT_ONCE = 8  # each takes some 100 MB within the model
_SPECTROGRAMS = 4  # of a long sound, for a model with fusion
_KNOWN = (0.3, 1.0, 1.7)  # lengths of the known sounds in windows


class UnitLength(nn.Module):
    """Scales rows to length 1, like the library's own vectors of both halves."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors.float(), dim=-1)


class TextHalf(ClapTextModel):  # type: ignore[no-untyped-call]
    """The library's text half without its pooler, which is computed in float32 after the pooling, like projections."""

    def __init__(self, own: ClapTextModel) -> None:
        with torch.device("meta"):
            super().__init__(own.config, add_pooling_layer=False)
        self.embeddings, self.encoder = own.embeddings, own.encoder

    def warn_if_padding_and_no_attention_mask(self, *_: Any) -> None:
        """Nothing is padded here; the library's looks at ids, so that no forward could be traced."""


class SoundTower(nn.Module):
    """The sound half: N sounds → float32 [N, vector width], the means over their windows, of length 1."""

    def __init__(self, audio: Any, projection: nn.Module) -> None:
        super().__init__()
        self.audio = audio
        self.projection = projection
        self._fuses = bool(audio.config.enable_fusion)

    def forward(self, sounds: Sequence[Spectrograms]) -> Tensor:
        """The vectors."""
        single = [each for sound in sounds for each in sound]
        found: list[Tensor | None] = [None] * len(single)
        for places in _alike(single):
            given = torch.stack([torch.from_numpy(single[at]) for at in places])
            for at, vector in zip(places, self._of_windows(given), strict=True):
                found[at] = vector
        windows = torch.stack([one for one in found if one is not None])
        lengths = [len(sound) for sound in sounds]
        return functional.normalize(torch.stack([each.mean(dim=0) for each in torch.split(windows, lengths)]), dim=-1)

    def _of_windows(self, spectrograms: Tensor) -> Tensor:
        """Compute vectors of length 1: float32 [windows, spectrograms, frames, mels] → float32 [windows, vector
        width]."""
        parameter = next(self.audio.parameters())
        given = spectrograms.to(parameter.device, parameter.dtype)
        is_longer = torch.full((len(given), 1), given.shape[1] == _SPECTROGRAMS, device=given.device)
        if self._fuses:
            given = given.expand(-1, _SPECTROGRAMS, -1, -1)
        pooled = self.audio(input_features=given, is_longer=is_longer).pooler_output
        return functional.normalize(self.projection(pooled).float(), dim=-1)


class SoundModel(DualModel):
    """A model of texts and sounds in one space."""

    files = "sounds"


def _alike(spectrograms: Sequence[Spectrograms]) -> Iterable[list[int]]:
    """Places of those of one shape, a few at a time."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for at, each in enumerate(spectrograms):
        by_shape.setdefault(each.shape, []).append(at)
    for places in by_shape.values():
        yield from (places[at : at + _WINDOWS_AT_ONCE] for at in range(0, len(places), _WINDOWS_AT_ONCE))


def load_sound_model(layout: Layout, device: torch.device, threads: int) -> SoundModel:
    """Load a model of texts and sounds in float32.

    Raises:
        ModelLoadFailed: weights are missing, of another shape, or do not fit the feature extractor.
    """
    sound = layout.sound
    assert sound is not None
    module: Any = load_module(layout, device)
    texts: nn.Module = TextHalf(module.text_model)
    pooler = module.text_model.pooler
    transformer = Transformer(texts.eval(), layout.position_offset, device)
    layers = nn.Sequential(pooler.dense, pooler.activation, module.text_projection, UnitLength())
    width = int(module.text_projection.linear2.out_features)
    head = DenseHead(layout.poolings, layers, width)
    tower = SoundTower(module.audio_model, module.audio_projection).eval()
    known = [prepare(known_samples(sound.steps, long, at), sound.steps) for at, long in enumerate(_KNOWN)]
    model = SoundModel(transformer, {Output.DENSE: head}, tower, SoundDecoder(sound, threads), known)
    try:
        given = model.vectors(model.known[:1])
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelLoadFailed(f"the sound half of the model fails for a known sound: {error}") from error
    if given.shape[1] != width:
        raise ModelLoadFailed(f"the vectors of sounds have {given.shape[1]} numbers, and those of texts {width}")
    return model
