"""What a model of sounds reads: mel spectrograms as the library's feature extractor makes them, of windows at fixed
places, where it takes them at random.

A sound that fits a window is one, repeated and padded as the extractor does. Of a longer one, a model without fusion
reads windows one behind the other, the last of which ends with the sound; a model with fusion reads the whole, shrunk,
with windows at its beginning, in its middle and at its end.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from teimgr.models.layout import SoundSteps

Spectrograms = NDArray[np.float32]
"""Spectrograms of a sound: [windows, 1, frames, mels]; with fusion [1, 1, frames, mels], or [1, 4, …] of a long one."""
_FRAMES_AT_ONCE = 512
_MIN_POWER = 1e-10


def windows_of(steps: SoundSteps, seconds: float) -> int:
    """Return the number of windows that a sound of this length is charged for."""
    return max(1, math.ceil(seconds * steps.rate / steps.window))


def prepare(samples: NDArray[np.float32], steps: SoundSteps) -> Spectrograms:
    """Compute the spectrograms of a sound."""
    filters = _filters(steps)
    if len(samples) <= steps.window:
        return _mels(_padded(samples, steps), steps, filters)[None, None]
    if steps.fuses:
        return _fused(_mels(samples, steps, filters), steps)
    last = len(samples) - steps.window
    places = [*range(0, last, steps.window), last]
    return np.stack([_mels(samples[at : at + steps.window], steps, filters)[None] for at in places])


def _padded(samples: NDArray[np.float32], steps: SoundSteps) -> NDArray[np.float32]:
    missing = steps.window - len(samples)
    if missing and steps.padding == "repeat":
        return np.resize(samples, steps.window)
    if missing and steps.padding == "repeatpad":
        samples = np.tile(samples, steps.window // len(samples))
    return np.pad(samples, (0, steps.window - len(samples)))


def _fused(mels: Spectrograms, steps: SoundSteps) -> Spectrograms:
    frames, total = steps.window // steps.hop + 1, len(mels)
    if total == frames:  # longer by less than a hop
        return mels[None, None]
    front, middle, back = (list(each) or [0] for each in np.array_split(np.arange(total - frames + 1), 3))
    places = (front[0], middle[len(middle) // 2], back[-1])
    return np.stack([_shrunk(mels, frames), *(mels[at : at + frames] for at in places)])[None]


def _shrunk(mels: Spectrograms, frames: int) -> Spectrograms:
    """Shrink to this many frames, interpolated linearly like torch's `interpolate`."""
    places = np.maximum((np.arange(frames, dtype=np.float32) + 0.5) * np.float32(len(mels) / frames) - 0.5, 0)
    before = places.astype(np.intp)
    part = (places - before)[:, None].astype(np.float32)
    behind = np.minimum(before + 1, len(mels) - 1)
    return np.asarray(mels[before] * (1 - part) + mels[behind] * part, np.float32)


def _mels(samples: NDArray[np.float32], steps: SoundSteps, filters: NDArray[np.float64]) -> Spectrograms:
    """In decibels, float32 [frames, mels]; some frames at a time, as each takes 16 kB."""
    half = steps.fft // 2
    padded = np.pad(samples, (half, half), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, steps.fft)[:: steps.hop]
    shape = np.hanning(steps.fft + 1)[:-1]
    found = np.empty((len(frames), filters.shape[1]), np.float32)
    for at in range(0, len(frames), _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(frames[at : at + _FRAMES_AT_ONCE] * shape).astype(np.complex64)
        power = np.abs(spectrum, dtype=np.float64) ** 2
        found[at : at + _FRAMES_AT_ONCE] = 10 * np.log10(np.maximum(power @ filters, _MIN_POWER))
    return found


def _filters(steps: SoundSteps) -> NDArray[np.float64]:
    """Return the library's filters: torchaudio's kind for fusion, librosa's without, like the authors' own code."""
    from transformers.audio_utils import mel_filter_bank

    norm, scale = (None, "htk") if steps.fuses else ("slaney", "slaney")
    found = mel_filter_bank(
        num_frequency_bins=steps.fft // 2 + 1,
        num_mel_filters=steps.mels,
        min_frequency=steps.least_hz,
        max_frequency=steps.most_hz,
        sampling_rate=steps.rate,
        norm=norm,
        mel_scale=scale,
    )
    return np.asarray(found, np.float64)
