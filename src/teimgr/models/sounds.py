"""Models of texts and sounds in one space: CLAP, as transformers saves it, from its files."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.known_keys import KnownKeys
from teimgr.models.layout import Layout, SoundEncoder, SoundSteps
from teimgr.models.library_code import setting
from teimgr.models.metadata import SOUND_ENCODERS, ModelMetadata

_FILE = "preprocessor_config.json"
_PACKAGES = {"soundfile": "soundfile", "soxr": "soxr", "PIL": "Pillow"}
_PADDINGS = ("repeatpad", "repeat", "pad")
_TRUNCATIONS = {"fusion": True, "rand_trunc": False}
_KEYS = KnownKeys(
    honoured=frozenset(
        (
            *("feature_size", "sampling_rate", "hop_length", "max_length_s", "fft_window_size", "frequency_min"),
            *("frequency_max", "truncation", "padding", "feature_extractor_type"),
        )
    ),
    # The extractor writes what follows from others, and reads nothing of it.
    harmless=frozenset(
        (
            *("processor_class", "return_attention_mask", "padding_side", "chunk_length_s", "n_fft", "n_samples"),
            *("nb_frequency_bins", "nb_max_frames", "nb_max_samples", "top_db"),
        )
    ),
    only={"padding_value": (0, 0.0, None)},
)
_MOST = {"sampling_rate": 192_000, "hop_length": 1 << 16, "max_length_s": 60, "fft_window_size": 1 << 16}
_MAX_BANDS = 1024


def is_sound_encoder(metadata: ModelMetadata) -> bool:
    """Whether the model embeds texts and sounds into one space."""
    return metadata.config["model_type"] in SOUND_ENCODERS


def read_sound_encoder(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """The layout of a model of texts and sounds.

    Raises:
        InvalidConfig: `pooling` is set, and the model has its own.
        ModelLoadFailed: its files describe what is not served, or a package for sounds is missing.
    """
    need_packages()
    if pooling is not None:
        raise InvalidConfig(f"pooling = {pooling!r} is not for a model of texts and sounds, which has its own")
    if metadata.chain.modules:
        raise ModelLoadFailed(
            f"a model of sounds in the layout of sentence-transformers ({metadata.chain}) is not served: use the one "
            "that transformers saved"
        )
    audio = metadata.config.get("audio_config") or {}
    if not isinstance(audio, dict):
        raise ModelLoadFailed(f"config.json has audio_config = {str(audio)[:80]!r}, which should be an object")
    audio = {**audio, "model_type": "clap_audio_model"}
    steps = _steps(metadata)
    if bool(setting(audio, "enable_fusion")) is not steps.fuses:
        raise ModelLoadFailed(
            f"audio_config of config.json has enable_fusion = {setting(audio, 'enable_fusion')!r}, and {_FILE} makes "
            f"spectrograms {'with' if steps.fuses else 'without'} fusion (truncation)"
        )
    if setting(audio, "num_mel_bins") != steps.mels:
        raise ModelLoadFailed(f"{_FILE} makes {steps.mels} bands, and config.json reads {audio.get('num_mel_bins')}")
    return replace(layout, poolings=("cls",), sound=SoundEncoder(_window_tokens(audio), steps))


def need_packages() -> None:
    """Raise ModelLoadFailed where a package for sounds is not installed."""
    if missing := [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]:
        raise ModelLoadFailed(
            f"the model embeds sounds, for which {' and '.join(missing)} is missing: install teimgr with the extra "
            "`audio`"
        )


def _steps(metadata: ModelMetadata) -> SoundSteps:
    inside = (read_object(metadata.transformer_dir / "processor_config.json") or {}).get("feature_extractor")
    given = inside or read_object(metadata.transformer_dir / _FILE)
    if not isinstance(given, dict):
        raise ModelLoadFailed(f"the model embeds sounds, and there is no {_FILE}")
    if (kind := given.get("feature_extractor_type")) != "ClapFeatureExtractor":
        raise ModelLoadFailed(f"the feature extractor {str(kind)[:80]} is not served: of models of sounds CLAP's is")
    if unknown := _KEYS.warnings(_FILE, given):
        raise ModelLoadFailed(unknown[0])
    rate, seconds = _whole(given, "sampling_rate", 48_000), _whole(given, "max_length_s", 10)
    truncation, padding = given.get("truncation", "fusion"), given.get("padding", "repeatpad")
    if truncation not in _TRUNCATIONS or padding not in _PADDINGS:
        raise ModelLoadFailed(f"{_FILE} has truncation {str(truncation)[:80]!r} and padding {str(padding)[:80]!r}")
    least, most = (_number(given, key, default) for key, default in (("frequency_min", 0), ("frequency_max", 14_000)))
    if not 0 <= least < most <= rate / 2:
        raise ModelLoadFailed(f"{_FILE} has bands from {least:g} to {most:g} Hz, of {rate} samples a second")
    bands = _whole(given, "feature_size", 64, _MAX_BANDS)
    hop, fft = _whole(given, "hop_length", 480), _whole(given, "fft_window_size", 1024)
    if fft % 2 or not hop <= rate * seconds or fft >= rate * seconds:
        raise ModelLoadFailed(f"{_FILE} has hop_length = {hop} and fft_window_size = {fft}, for {seconds} s")
    return SoundSteps(rate, rate * seconds, hop, fft, bands, least, most, padding, _TRUNCATIONS[truncation])


def _window_tokens(audio: dict[str, Any]) -> int:
    """The states of the last stage, of which the mean is the vector of a window."""
    stride = setting(audio, "patch_stride")
    stride = stride[0] if isinstance(stride, (list, tuple)) and stride else stride
    side, stages = setting(audio, "spec_size"), setting(audio, "depths")
    are_numbers = all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in (side, stride))
    if not are_numbers or not isinstance(stages, (list, tuple)) or not 1 <= len(stages) <= 16 or side > 1 << 12:
        raise ModelLoadFailed(f"audio_config of config.json has spec_size = {side!r}, patch_stride = {stride!r}")
    return max(1, int(side // stride >> (len(stages) - 1)) ** 2)


def _whole(given: dict[str, Any], key: str, default: int, most: int | None = None) -> int:
    value: int = given.get(key, default)
    most = most or _MOST[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelLoadFailed(f"{_FILE} has {key} = {str(value)[:80]}, which should be a whole number of 1 to {most}")
    return value


def _number(given: dict[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelLoadFailed(f"{_FILE} has {key} = {str(value)[:80]}, which should be a number")
    return float(value)
