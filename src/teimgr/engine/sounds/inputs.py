"""Sounds beside texts on their way to the model: its tokenizer, and their decoding ahead of a batch."""

from __future__ import annotations

import hashlib
import io
import math

import numpy as np
import soundfile
from numpy.typing import NDArray

from teimgr.engine.images.inputs import FileTokenizer
from teimgr.engine.images.waiting import FileDecoder
from teimgr.engine.job import MediaFile, Sound
from teimgr.engine.sounds.files import MAX_SECONDS, decode, read_header
from teimgr.engine.sounds.spectrograms import Spectrograms, prepare, windows_of
from teimgr.models.layout import Layout, SoundEncoder, SoundSteps


class SoundTokenizer(FileTokenizer):
    """The tokenizer of a model of texts and sounds."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        super().__init__(layout, max_length)
        assert layout.sound is not None
        self._sound = layout.sound

    def sound(self, data: bytes) -> Sound:
        """A sound file as an input of the model, by its header.

        Raises:
            InvalidInput: its format is not allowed, it is empty, broken at its beginning, or too long.
        """
        return read_sound(data, self._sound)

    def known_picture(self) -> MediaFile:
        """For self-tests."""
        return self.sound(known_file(self._sound.steps))


def read_sound(data: bytes, sound: SoundEncoder) -> Sound:
    """Like `SoundTokenizer.sound`."""
    header = read_header(data)
    tokens = windows_of(sound.steps, header.seconds) * sound.window_tokens
    digest = hashlib.sha256(data).digest()
    return Sound(data=data, format=header.format, tokens=tokens, digest=digest, seconds=header.seconds)


def known_samples(steps: SoundSteps, windows: float, seed: int) -> NDArray[np.float32]:
    """A tone that rises over noise, which every load makes alike."""
    at = np.arange(int(windows * steps.window), dtype=np.float64) / steps.rate
    noise = np.random.default_rng(seed).standard_normal(len(at))
    return (0.5 * np.sin(2 * np.pi * (200 + 50 * at) * at) + 0.05 * noise).astype(np.float32)


def known_file(steps: SoundSteps) -> bytes:
    """A file that every load makes alike, longer than a window."""
    written = io.BytesIO()
    soundfile.write(written, known_samples(steps, 1.5, 0), steps.rate, format="WAV", subtype="PCM_16")
    return written.getvalue()


class SoundDecoder(FileDecoder):
    """Decodes sounds: seconds of `MAX_SECONDS` at a time."""

    most = MAX_SECONDS

    def __init__(self, sound: SoundEncoder, threads: int) -> None:
        super().__init__(threads)
        self._steps = sound.steps

    def size_of(self, file: Sound) -> int:
        """Its seconds begun."""
        return math.ceil(file.seconds)

    def prepared(self, file: Sound) -> Spectrograms:
        """Its spectrograms; raises InvalidInput."""
        return prepare(decode(file.data, self._steps.rate), self._steps)
