"""Models of queries and page images with a vector for each token: ColPali and ColQwen2 as transformers saves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.dual_encoders import (
    CLIP_DEVIATIONS,
    CLIP_MEANS,
    colours,
    need_pillow,
    pixel_steps,
    processor_settings,
)
from teimgr.models.known_keys import KnownKeys
from teimgr.models.layout import DualEncoder, LateInteraction, Layout, PageTexts, PatchSteps
from teimgr.models.metadata import PAGE_ENCODERS, ModelMetadata

_ADDED_TOKENS = 10  # behind a query, by both processors
_QWEN_KEYS = KnownKeys(
    honoured=frozenset(
        (
            *(
                "do_normalize",
                "do_rescale",
                "do_resize",
                "image_mean",
                "image_std",
                "resample",
                "rescale_factor",
                "size",
            ),
            *("min_pixels", "max_pixels", "patch_size", "merge_size", "image_processor_type"),
        )
    ),
    harmless=frozenset(("processor_class", "data_format", "input_data_format", "return_tensors")),
    only={"do_convert_rgb": (True, None), "temporal_patch_size": (2,), "default_to_square": (False, None)},
)
_QWEN_IMAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_MAX_PIXELS = 16_777_216  # that a model reads of an image; the known ones read about a million
_MAX_PROMPT = 1000  # characters


def is_page_encoder(metadata: ModelMetadata) -> bool:
    """Whether the model embeds queries, and page images with a vector for each token."""
    return metadata.config["model_type"] in PAGE_ENCODERS


def read_page_encoder(metadata: ModelMetadata, layout: Layout) -> Layout:
    """The layout of a model of queries and page images.

    Raises:
        ModelLoadFailed: its files describe what is not served, or Pillow is missing.
    """
    need_pillow()
    if metadata.chain.modules:
        raise ModelLoadFailed(
            f"a model of page images in the layout of sentence-transformers ({metadata.chain}) is not served: use the "
            "one that transformers saved"
        )
    named = read_object(metadata.transformer_dir / "processor_config.json") or {}
    found = _colpali if metadata.config["model_type"] == "colpali" else _colqwen2
    dual, pages = found(metadata, named, dict(processor_settings(metadata.transformer_dir)))
    late = LateInteraction((), None, None)
    return replace(layout, dual=dual, pages=pages, late=late, prompts={}, default_prompt_name="query", type_ids=False)


def _colpali(metadata: ModelMetadata, named: dict[str, Any], given: dict[str, Any]) -> tuple[DualEncoder, PageTexts]:
    patches = given.pop("image_seq_length", None)
    steps = pixel_steps(given)
    if steps.size is None or isinstance(patches, bool) or not isinstance(patches, int) or not 1 <= patches <= 1 << 16:
        raise ModelLoadFailed(f"the image processor has image_seq_length = {patches!r} and the size {steps.size}")
    begin, pad = _token(metadata, "bos_token"), _token(metadata, "pad_token")
    query = begin + _text(named, "query_prefix", "Question: "), pad * _ADDED_TOKENS + "\n"
    image = "", f"{begin}{_text(named, 'visual_prompt_prefix', 'Describe the image.')}\n"
    height, width = steps.size
    return DualEncoder(patches, height, width, steps), PageTexts("<image>", image, query)


def _colqwen2(metadata: ModelMetadata, named: dict[str, Any], given: dict[str, Any]) -> tuple[DualEncoder, PageTexts]:
    steps = patch_steps(given, "ColQwen2")
    prompt = _text(named, "visual_prompt_prefix", _QWEN_IMAGE)
    before, found, behind = prompt.partition("<|image_pad|>")
    if not found or "<|image_pad|>" in behind:
        raise ModelLoadFailed(f"visual_prompt_prefix of processor_config.json has no place for one image: {prompt!r}")
    query = _text(named, "query_prefix", "Query: "), _token(metadata, "pad_token") * _ADDED_TOKENS + "\n"
    side = steps.unit
    while side * side < steps.least:
        side += steps.unit
    return DualEncoder(0, side, side, steps), PageTexts("<|image_pad|>", (before, behind), query)


def patch_steps(given: dict[str, Any], family: str) -> PatchSteps:
    """What Qwen2-VL's image processor of these settings does, of a model of `family`.

    Raises:
        ModelLoadFailed: it is another processor, or does something else besides.
    """
    named = str(given.get("image_processor_type"))
    if named.removesuffix("Fast").removesuffix("Pil") != "Qwen2VLImageProcessor":
        raise ModelLoadFailed(
            f"the image processor {named} is not served for {family}, whose own is Qwen2VLImageProcessor"
        )
    if unknown := _QWEN_KEYS.warnings("preprocessor_config.json", given):
        raise ModelLoadFailed(unknown[0])
    size = given.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if not isinstance(size, dict) or not given.get("do_resize", True):
        raise ModelLoadFailed("preprocessor_config.json resizes no image to what the model reads")
    least = _whole(given.get("min_pixels") or size.get("shortest_edge"), "shortest_edge", _MAX_PIXELS)
    most = _whole(given.get("max_pixels") or size.get("longest_edge"), "longest_edge", _MAX_PIXELS)
    patch = _whole(given.get("patch_size", 14), "patch_size", 1024)
    unit = patch * _whole(given.get("merge_size", 2), "merge_size", 16)
    if not unit * unit <= least <= most:
        raise ModelLoadFailed(f"preprocessor_config.json has images of {least} to {most} pixels, in squares of {unit}")
    normalizes = given.get("do_normalize", True)
    return PatchSteps(
        shortest=None,
        size=None,
        resample=_whole(given.get("resample", 3), "resample", 5),
        crop=None,
        factor=float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else None,
        mean=colours(given, "image_mean", CLIP_MEANS) if normalizes else None,
        deviation=colours(given, "image_std", CLIP_DEVIATIONS) if normalizes else None,
        unit=unit,
        patch=patch,
        least=least,
        most=most,
    )


def _whole(value: Any, key: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelLoadFailed(
            f"preprocessor_config.json has {key} = {str(value)[:80]}, which should be a whole number of 1 to {most}"
        )
    return value


def _text(named: dict[str, Any], key: str, default: str) -> str:
    value = named.get(key) or default
    if not isinstance(value, str) or len(value) > _MAX_PROMPT:
        raise ModelLoadFailed(f"processor_config.json has {key} = {str(value)[:80]!r}, which should be a short text")
    return value


def _token(metadata: ModelMetadata, role: str) -> str:
    token = metadata.tokens.text(role)
    if not token:
        raise ModelLoadFailed(f"the tokenizer has no {role}, which the model reads around a query")
    return token
