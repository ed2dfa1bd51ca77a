"""Reads models for texts and images or sounds in one space, and for images alone (DINOv2), from their files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.known_keys import KnownKeys, setting
from teimgr.models.layout import DualEncoder, FlexibleSteps, ImageEncoder, Layout, PixelSteps, SoundEncoder, SoundSteps
from teimgr.models.metadata import (
    DUAL_ENCODERS,
    IMAGE_ENCODERS,
    PAGE_ENCODERS,
    SOUND_ENCODERS,
    VISION_CHATS,
    ModelMetadata,
)

_PROCESSORS = ("CLIPImageProcessor", "CLIPFeatureExtractor", "BitImageProcessor", "SiglipImageProcessor")
_KEYS = KnownKeys(
    honoured=frozenset(
        (
            *("crop_size", "do_center_crop", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std"),
            *("resample", "rescale_factor", "size", "image_processor_type", "feature_extractor_type"),
        )
    ),
    harmless=frozenset(("processor_class", "data_format", "input_data_format", "return_tensors")),
    only=dict.fromkeys(("do_pad", "default_to_square", "use_square_size"), (False, None))
    | {"do_convert_rgb": (True, None)},
)
_FLEXIBLE_KEYS = KnownKeys(
    honoured=frozenset(
        (
            *("do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample", "rescale_factor"),
            *("max_num_patches", "patch_size", "image_processor_type"),
        )
    ),
    harmless=_KEYS.harmless,
    only={"do_convert_rgb": (True, None), "do_pad": (False, None), "size": (None,), "default_to_square": (True, None)},
)
_PATCHES = 16, 4096  # the limits of patches per image; known models have 256, and 1,024 on request
_MAX_PATCH = 256  # pixels per side
_MAX_SIDE = 4096  # pixels per side of an image as the model reads it; the largest known has 518
_MAX_REGISTERS = 1024  # of an image encoder; known models have 4
_MAX_RESAMPLE = 5  # the last of Pillow's filters
_METHODS = {"text": "get_text_features", "image": "get_image_features"}
_HALVES = (0.5, 0.5, 0.5)
CLIP_MEANS = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATIONS = (0.26862954, 0.26130258, 0.27577711)
_OLD_END = 2  # `eos_token_id` of CLIP's first configurations; it means that the highest id is the end


def is_dual_encoder(metadata: ModelMetadata) -> bool:
    """True if the model embeds texts and images into one space."""
    return metadata.config["model_type"] in DUAL_ENCODERS


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text half: `config` itself except for models of images, pages or sounds."""
    if config["model_type"] in PAGE_ENCODERS:
        whole = config.get("vlm_config")
        if not isinstance(whole, dict) or not isinstance(whole.get("text_config", {}), dict):
            raise ModelLoadFailed(f"config.json has vlm_config = {str(whole)[:80]}, which should have a text_config")
        kind = str(whole.get("model_type"))
        return {"model_type": f"{kind}_text"} | (whole.get("text_config") or whole)
    if config["model_type"] in VISION_CHATS:
        own = _part(config, "text") if config.get("text_config") else config  # Qwen2-VL's hub files have both in one
        return own | {"model_type": f"{config['model_type']}_text"}
    return _part(config, "text") if config["model_type"] in (*DUAL_ENCODERS, *SOUND_ENCODERS) else config


def read_dual_encoder(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """Return the layout of a model of texts and images.

    Raises:
        InvalidConfig: `pooling` is set, but the model has its own.
        ModelLoadFailed: its files describe something unsupported, or Pillow is missing.
    """
    need_pillow()
    if pooling is not None:
        raise InvalidConfig(f"pooling = {pooling!r} is not for a model of texts and images, which has its own")
    behind = [module.name for module in metadata.chain.behind]
    if behind not in ([], ["Normalize"]):
        raise ModelLoadFailed(f"modules after a model of texts and images are not served: {metadata.chain}")
    _check_modalities(metadata.settings.get("modality_config") or {})
    if metadata.config["model_type"] == "siglip2":
        if metadata.chain.modules:  # sentence-transformers masks the padding of texts, which the model reads
            raise ModelLoadFailed(
                f"SigLIP2 NaFlex in the layout of sentence-transformers ({metadata.chain}) is not served: use the one "
                "that transformers saved"
            )
        # The authors and the library's tokenizer lower-case texts.
        return replace(layout, poolings=("last_token",), dual=_of_any_size(metadata), lower_case=True)
    return replace(layout, poolings=("last_token",), dual=_of_one_size(metadata))


def _of_one_size(metadata: ModelMetadata) -> DualEncoder:
    is_clip = metadata.config["model_type"] == "clip"
    of_calls = (metadata.settings.get("processing_kwargs") or {}).get("image") or {}
    if not isinstance(of_calls, dict):
        raise ModelLoadFailed(
            f"processing_kwargs.image of sentence_bert_config.json is {str(of_calls)[:80]!r}, which should be an object"
        )
    steps = pixel_steps(processor_settings(metadata.transformer_dir) | of_calls)
    vision = _part(metadata.config, "vision")
    side, patch = whole_number(vision, "image_size"), whole_number(vision, "patch_size")
    if whole_number(vision, "num_channels") != 3 or not patch <= side <= _MAX_SIDE:
        raise ModelLoadFailed(f"vision_config of config.json makes pictures of {side} pixels in patches of {patch}")
    given = steps.crop or steps.size
    if given != (side, side):
        shown = "pictures of any size" if given is None else f"pictures of {given[0]} x {given[1]} pixels"
        raise ModelLoadFailed(f"the image processor gives {shown}, and the model reads {side} x {side}")
    dual = DualEncoder((side // patch) ** 2 + is_clip, side, side, steps)
    return replace(dual, end_id=_end_id(metadata)) if is_clip else replace(dual, padding_token=_padding(metadata))


def _of_any_size(metadata: ModelMetadata) -> DualEncoder:
    """Return the input steps of SigLIP2 NaFlex; known images are squares with about the most patches."""
    steps = flexible_steps(processor_settings(metadata.transformer_dir))
    vision = _part(metadata.config, "vision")
    patch, positions = whole_number(vision, "patch_size"), whole_number(vision, "num_patches")
    if whole_number(vision, "num_channels") != 3 or patch != steps.patch:
        raise ModelLoadFailed(
            f"the image processor makes patches of {steps.patch} x {steps.patch} pixels, and vision_config of "
            f"config.json reads {patch} x {patch}"
        )
    if positions > _PATCHES[1] or math.isqrt(positions) ** 2 != positions:
        raise ModelLoadFailed(f"vision_config of config.json has num_patches = {positions}, which should be a square")
    side = math.isqrt(steps.patches) * patch
    return DualEncoder(0, side, side, steps, padding_token=_padding(metadata))


def need_pillow() -> None:
    """Raise ModelLoadFailed if Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise ModelLoadFailed(
            "the model embeds images, for which Pillow is missing: install teimgr with the extra `images` "
            "(pip install 'teimgr[images]')"
        )


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    given = config.get(f"{name}_config") or {}
    if not isinstance(given, dict):
        raise ModelLoadFailed(f"config.json has {name}_config = {given!r}, which should be an object")
    return {**given, "model_type": f"{config['model_type']}_{name}_model"}


def whole_number(config: dict[str, Any], key: str) -> int:
    value = setting(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadFailed(f"config.json has {key} = {value!r}, which should be a whole number above 0")
    return value


def _end_id(metadata: ModelMetadata) -> int:
    texts = text_config(metadata.config)
    given = whole_number(texts, "eos_token_id")
    return whole_number(texts, "vocab_size") - 1 if given == _OLD_END else given


def _padding(metadata: ModelMetadata) -> str:
    """Return SigLIP's padding token, which the model was trained to read after a text."""
    if metadata.tokens.config.get("padding_side", "right") != "right":
        raise ModelLoadFailed(
            "tokenizer_config.json pads texts on the left; the model was trained with padding on the right"
        )
    processing = metadata.settings.get("processing_kwargs") or {}
    for how in (processing.get("common") or {}, processing.get("text") or {}):
        if how.get("padding", True) in (False, "do_not_pad"):
            raise ModelLoadFailed(
                f"processing_kwargs of sentence_bert_config.json has padding = {how['padding']!r}; the model was "
                "trained with padded texts, which alone are served: remove the setting"
            )
    by_default = "<pad>" if metadata.config["model_type"] == "siglip2" else "</s>"  # as in the library's tokenizers
    return metadata.tokens.text("pad_token") or by_default


def _check_modalities(modalities: Mapping[str, Any]) -> None:
    """Check that sentence-transformers would use the projected vector of both halves."""
    for name, how in modalities.items():
        method, output = how.get("method"), how.get("method_output_name")
        if name not in _METHODS or method != _METHODS[name] or output not in ("pooler_output", None):
            raise ModelLoadFailed(
                f"sentence_bert_config.json takes {output!r} of {method} for {name}; of a model of texts and images "
                "the projected vector of a text or of an image is served"
            )


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return the image processor's settings: inside processor_config.json, which the library prefers, or in their
    own file."""
    inside = (read_object(folder / "processor_config.json") or {}).get("image_processor")
    found = inside or read_object(folder / "preprocessor_config.json")
    if not isinstance(found, dict):
        raise ModelLoadFailed("the model embeds images, and preprocessor_config.json is missing")
    return found


def pixel_steps(given: dict[str, Any]) -> PixelSteps:
    """Return the steps of the library's image processor with these settings.

    Raises:
        ModelLoadFailed: it is another processor, or has further steps.
    """
    named = str(given.get("image_processor_type") or given.get("feature_extractor_type") or "none")
    kind = named.removesuffix("Fast").removesuffix("Pil")
    if kind not in _PROCESSORS:
        raise ModelLoadFailed(f"the image processor {named} is not served: CLIP's, SigLIP's and DINOv2's are")
    if unknown := _KEYS.warnings("preprocessor_config.json", given):
        raise ModelLoadFailed(unknown[0])
    is_clip = kind != "SiglipImageProcessor"
    shortest = size = None
    if given.get("do_resize", True):
        shortest, size = _size(given.get("size"), 224 if is_clip else (224, 224))
    crop = None
    if given.get("do_center_crop", is_clip):
        square, crop = _size(given.get("crop_size"), (224, 224))
        crop = crop or (square or 0, square or 0)
    resample = given.get("resample", 3)
    if isinstance(resample, bool) or not isinstance(resample, int) or not 0 <= resample <= _MAX_RESAMPLE:
        raise ModelLoadFailed(f"preprocessor_config.json has resample = {resample!r}, which is not a filter of Pillow")
    means, deviations = (CLIP_MEANS, CLIP_DEVIATIONS) if is_clip else (_HALVES, _HALVES)
    return PixelSteps(
        shortest=shortest, size=size, resample=resample, crop=crop, **numbers_of(given, means, deviations)
    )


def check_processor(given: dict[str, Any], own: str, known: KnownKeys, refusal: str) -> None:
    """Check that settings belong to the image processor `own`, and that each of their keys is known.

    Raises:
        ModelLoadFailed: it is another processor, with `refusal` after its name; or a key is not known.
    """
    named = str(given.get("image_processor_type"))
    if named.removesuffix("Fast").removesuffix("Pil") != own:
        raise ModelLoadFailed(f"the image processor {named} is not served {refusal}")
    if unknown := known.warnings("preprocessor_config.json", given):
        raise ModelLoadFailed(unknown[0])


def flexible_steps(given: dict[str, Any]) -> FlexibleSteps:
    """Return the steps of SigLIP2's image processor with these settings.

    Raises:
        ModelLoadFailed: it is another processor, or has further steps.
    """
    check_processor(given, "Siglip2ImageProcessor", _FLEXIBLE_KEYS, "for SigLIP2 NaFlex: its own is")
    if not given.get("do_resize", True):
        raise ModelLoadFailed("preprocessor_config.json resizes no image to what the model reads")
    return FlexibleSteps(
        resample=setting_within(given, "resample", 2, (0, _MAX_RESAMPLE)),
        **numbers_of(given, _HALVES, _HALVES),
        patch=setting_within(given, "patch_size", 16, (1, _MAX_PATCH)),
        patches=setting_within(given, "max_num_patches", 256, _PATCHES),
    )


def setting_within(given: dict[str, Any], key: str, default: int, bounds: tuple[int, int]) -> int:
    value = given.get(key, default)
    least, most = bounds
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = str(value)[:80]
        raise ModelLoadFailed(
            f"preprocessor_config.json has {key} = {shown}, which should be a whole number of {least} to {most}"
        )
    return value


def _size(given: Any, default: int | tuple[int, int]) -> tuple[int | None, tuple[int, int] | None]:
    """Return a size as (shortest side, None) or (None, (height, width))."""
    if given is None:
        return (default, None) if isinstance(default, int) else (None, default)
    found: list[Any] = [given]
    if isinstance(given, dict):
        keys = ("shortest_edge",) if set(given) == {"shortest_edge"} else ("height", "width")
        found = [given.get(key) for key in keys] if set(given) == set(keys) else [None]
    if not all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= _MAX_SIDE for side in found):
        raise ModelLoadFailed(f"preprocessor_config.json has the size {given!r}, which is not served")
    return (found[0], None) if len(found) == 1 else (None, (found[0], found[1]))


def numbers_of(given: dict[str, Any], means: tuple[float, ...], deviations: tuple[float, ...]) -> dict[str, Any]:
    """Return factor, mean and deviation of `PixelSteps`, with these defaults."""
    normalizes = given.get("do_normalize", True)
    return {
        "factor": _factor(given) if given.get("do_rescale", True) else None,
        "mean": colours(given, "image_mean", means) if normalizes else None,
        "deviation": colours(given, "image_std", deviations) if normalizes else None,
    }


def _factor(given: dict[str, Any]) -> float:
    value = given.get("rescale_factor", 1 / 255)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelLoadFailed(
            f"preprocessor_config.json has rescale_factor = {str(value)[:80]!r}, which should be a number"
        )
    return float(value)


def colours(given: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = given.get(key)
    if value is None:
        return default
    is_list = isinstance(value, (list, tuple)) and len(value) == 3
    if not is_list or not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value):
        raise ModelLoadFailed(f"preprocessor_config.json has {key} = {value!r}, which should be three numbers")
    if key == "image_std" and 0 in value:
        raise ModelLoadFailed("preprocessor_config.json has a zero in image_std, by which pixels are divided")
    return tuple(map(float, value))


def is_image_encoder(metadata: ModelMetadata) -> bool:
    """True if the model embeds images and no texts."""
    return metadata.config["model_type"] in IMAGE_ENCODERS


def read_image_encoder(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """Return the layout of an image-only model; its vector is the first token's after the last normalisation.

    Raises:
        InvalidConfig: `pooling` asks for another vector.
        ModelLoadFailed: its files describe something unsupported, or Pillow is missing.
    """
    need_pillow()
    if pooling not in (None, "cls"):
        raise InvalidConfig(f"pooling = {pooling!r} is not for a model of images, whose vector is its first token's")
    if metadata.chain.modules:
        raise ModelLoadFailed(
            f"a model of images in the layout of sentence-transformers ({metadata.chain}) is not served: use the one "
            "that transformers saved"
        )
    if heads := [name for name in metadata.architectures if not name.endswith("Model")]:
        raise ModelLoadFailed(f"{heads[0]} is more than a model of vectors of images, which alone is served")
    config = metadata.config
    side, patch = whole_number(config, "image_size"), whole_number(config, "patch_size")
    if whole_number(config, "num_channels") != 3 or not patch <= side <= _MAX_SIDE:
        raise ModelLoadFailed(f"config.json has pictures of {side} pixels in patches of {patch}")
    registers = setting(config, "num_register_tokens") or 0
    if isinstance(registers, bool) or not isinstance(registers, int) or not 0 <= registers <= _MAX_REGISTERS:
        raise ModelLoadFailed(f"config.json has num_register_tokens = {str(registers)[:80]}")
    steps = pixel_steps(processor_settings(metadata.transformer_dir))
    given = steps.crop or steps.size
    if given is None or min(given) < patch:
        shown = "pictures of any size" if given is None else f"pictures of {given[0]} x {given[1]} pixels"
        raise ModelLoadFailed(f"the image processor gives {shown}, and the model reads patches of {patch}, of one size")
    height, width = given
    tokens = 1 + registers + (height // patch) * (width // patch)
    dual = ImageEncoder(tokens, height, width, steps)
    return replace(layout, poolings=("cls",), dual=dual, max_length=tokens, prompts={}, default_prompt_name=None)


_FILE = "preprocessor_config.json"
_PACKAGES = {"soundfile": "soundfile", "soxr": "soxr", "PIL": "Pillow"}
_PADDINGS = ("repeatpad", "repeat", "pad")
_TRUNCATIONS = {"fusion": True, "rand_trunc": False}
_SOUND_KEYS = KnownKeys(
    honoured=frozenset(
        (
            *("feature_size", "sampling_rate", "hop_length", "max_length_s", "fft_window_size", "frequency_min"),
            *("frequency_max", "truncation", "padding", "feature_extractor_type"),
        )
    ),
    # The extractor writes these derived keys and never reads them.
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
    """True if the model embeds texts and sounds into one space."""
    return metadata.config["model_type"] in SOUND_ENCODERS


def read_sound_encoder(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """Return the layout of a model of texts and sounds.

    Raises:
        InvalidConfig: `pooling` is set, but the model has its own.
        ModelLoadFailed: its files describe something unsupported, or a package for sounds is missing.
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
    """Raise ModelLoadFailed if a package for sounds is not installed."""
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
    if unknown := _SOUND_KEYS.warnings(_FILE, given):
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
    """Return the number of last-stage states, whose mean is the vector of a window."""
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
