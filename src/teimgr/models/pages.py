"""Reads models of queries and page images with a vector per token, as saved by transformers: ColPali, ColQwen2 and
ColModernVBert.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.dual_encoders import (
    CLIP_DEVIATIONS,
    CLIP_MEANS,
    check_processor,
    need_pillow,
    numbers_of,
    pixel_steps,
    processor_settings,
    whole_number,
)
from teimgr.models.known_keys import KnownKeys
from teimgr.models.layout import DualEncoder, LateInteraction, Layout, PageTexts, PatchSteps, PixelSteps, TileSteps
from teimgr.models.metadata import PAGE_ENCODERS, ModelMetadata

_ADDED_TOKENS = 10  # that processors append to a query
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
    # `default_to_square` applies to a size that is one number; the sizes here name edges.
    harmless=frozenset(("processor_class", "data_format", "input_data_format", "return_tensors", "default_to_square")),
    only={"do_convert_rgb": (True, None), "temporal_patch_size": (2,)},
)
_TILE_KEYS = KnownKeys(
    honoured=(_QWEN_KEYS.honoured - {"min_pixels", "max_pixels", "patch_size", "merge_size"}) | {"max_image_size"},
    harmless=_QWEN_KEYS.harmless | frozenset(("do_pad", "return_row_col_info")),
    only={
        # The library treats null as false.
        **dict.fromkeys(("do_resize", "do_image_splitting", "do_rescale", "do_normalize"), (True,)),
        "do_convert_rgb": (True, None),
    },
)
_TILED_IMAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_MAX_SIDE, _MAX_TILES = 4096, 8  # pixels of the longest side, above which the library scales; squares along it
_QWEN_IMAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
_MAX_PIXELS = 16_777_216  # per image as the model reads it; known models read about a million
_MAX_PROMPT = 1000  # characters


def is_page_encoder(metadata: ModelMetadata) -> bool:
    """True if the model embeds queries, and page images with a vector for each token."""
    return metadata.config["model_type"] in PAGE_ENCODERS


def read_page_encoder(metadata: ModelMetadata, layout: Layout) -> Layout:
    """Return the layout of a model of queries and page images.

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
    found = _READERS[metadata.config["model_type"]]
    dual, pages = found(metadata, named, dict(processor_settings(metadata.transformer_dir)))
    late = LateInteraction((), None, None)
    return replace(layout, dual=dual, pages=pages, late=late, prompts={}, default_prompt_name="query", type_ids=False)


def _colpali(metadata: ModelMetadata, named: dict[str, Any], given: dict[str, Any]) -> tuple[DualEncoder, PageTexts]:
    patches = given.pop("image_seq_length", None)
    steps = pixel_steps(given)
    if steps.size is None or isinstance(patches, bool) or not isinstance(patches, int) or not 1 <= patches <= 1 << 16:
        raise ModelLoadFailed(f"the image processor has image_seq_length = {patches!r} and the size {steps.size}")
    if math.isqrt(patches) ** 2 != patches:
        raise ModelLoadFailed(f"the image processor has image_seq_length = {patches}, which should be a square")
    begin, pad = _token(metadata, "bos_token"), _token(metadata, "pad_token")
    query = begin + _text(named, "query_prefix", "Question: "), pad * _ADDED_TOKENS + "\n"
    image = "", f"{begin}{_text(named, 'visual_prompt_prefix', 'Describe the image.')}\n"
    height, width = steps.size
    return DualEncoder(patches, height, width, steps), PageTexts("<image>", image, query)


def _colqwen2(metadata: ModelMetadata, named: dict[str, Any], given: dict[str, Any]) -> tuple[DualEncoder, PageTexts]:
    steps = patch_steps(given, "ColQwen2")
    image = _around(_text(named, "visual_prompt_prefix", _QWEN_IMAGE), "<|image_pad|>")
    query = _text(named, "query_prefix", "Query: "), _token(metadata, "pad_token") * _ADDED_TOKENS + "\n"
    side = steps.unit
    while side * side < steps.least:
        side += steps.unit
    return DualEncoder(0, side, side, steps), PageTexts("<|image_pad|>", image, query)


def _colmodernvbert(
    metadata: ModelMetadata, named: dict[str, Any], given: dict[str, Any]
) -> tuple[DualEncoder, PageTexts]:
    steps = _tile_steps(given)
    whole = {"model_type": "modernvbert", **metadata.config["vlm_config"]}
    vision = {"model_type": "siglip_vision_model", **(whole.get("vision_config") or {})}
    if (whole["model_type"], vision["model_type"]) != ("modernvbert", "siglip_vision_model"):
        raise ModelLoadFailed(f"config.json has a {whole['model_type']} of {vision['model_type']}, not a ModernVBERT")
    side = whole_number(vision, "image_size")
    tokens = (side // whole_number(vision, "patch_size")) ** 2 // whole_number(whole, "pixel_shuffle_factor") ** 2
    given_tokens = named.get("image_seq_len", 64)
    if (steps.tile, given_tokens) != (side, tokens):
        raise ModelLoadFailed(
            f"the processor makes squares of {steps.tile} pixels and {str(given_tokens)[:20]} tokens (image_seq_len), "
            f"and the model reads {side} pixels as {tokens} tokens"
        )
    before, behind = metadata.tokens.frame()
    image = _around(_text(named, "visual_prompt_prefix", _TILED_IMAGE), "<image>")
    query = before + _text(named, "query_prefix", ""), "<end_of_utterance>" * _ADDED_TOKENS + behind
    pages = PageTexts("<image>", (before + image[0], image[1] + behind), query)
    return DualEncoder(tokens, 2 * side, 2 * side, steps), pages


_READERS = {"colpali": _colpali, "colqwen2": _colqwen2, "colmodernvbert": _colmodernvbert}


def _around(prompt: str, token: str) -> tuple[str, str]:
    """Return the text before and after the one place of an image in a prompt."""
    before, found, behind = prompt.partition(token)
    if not found or token in behind:
        raise ModelLoadFailed(f"visual_prompt_prefix of processor_config.json has no place for one image: {prompt!r}")
    return before, behind


def _tile_steps(given: dict[str, Any]) -> TileSteps:
    """Return the steps of Idefics3's image processor with these settings.

    Raises:
        ModelLoadFailed: it is another processor, or does something else besides.
    """
    own = "Idefics3ImageProcessor"
    check_processor(given, own, _TILE_KEYS, f"for ColModernVBert, whose own is {own}")
    sizes = [given.get("size", {"longest_edge": 4 * 364}), given.get("max_image_size", {"longest_edge": 364})]
    if any(not isinstance(size, dict) or set(size) != {"longest_edge"} for size in sizes):
        raise ModelLoadFailed(f"preprocessor_config.json has the sizes {str(sizes)[:160]}, each should be longest_edge")
    longest, tile = (_whole(size["longest_edge"], "longest_edge", _MAX_SIDE) for size in sizes)
    if not tile <= longest <= _MAX_TILES * tile:
        raise ModelLoadFailed(
            f"preprocessor_config.json has images of {longest} pixels in squares of {tile}; 1 to {_MAX_TILES} along a "
            "side are served"
        )
    steps = TileSteps(
        resample=_whole(given.get("resample", 1), "resample", 5),
        **numbers_of(given, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        longest=longest,
        tile=tile,
    )
    if _has_colour_of_padding(steps):
        raise ModelLoadFailed(
            f"preprocessor_config.json has image_mean = {steps.mean}, the colour of a pixel: the model would take a "
            "square of it for padding"
        )
    return steps


def _has_colour_of_padding(steps: PixelSteps) -> bool:
    """True if a colour becomes 0 in all three numbers, of which the library makes what pads a batch."""
    assert steps.mean is not None
    assert steps.factor is not None
    return all(abs(mean / steps.factor - round(mean / steps.factor)) < 1e-3 for mean in steps.mean)


def patch_steps(given: dict[str, Any], family: str) -> PatchSteps:
    """Return the steps of Qwen2-VL's image processor with these settings, for a model of `family`.

    Raises:
        ModelLoadFailed: it is another processor, or does something else besides.
    """
    own = "Qwen2VLImageProcessor"
    check_processor(given, own, _QWEN_KEYS, f"for {family}, whose own is {own}")
    size = given.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if not isinstance(size, dict) or not given.get("do_resize", True):
        raise ModelLoadFailed("preprocessor_config.json resizes no image to what the model reads")
    least = _whole(given.get("min_pixels") or size.get("shortest_edge"), "shortest_edge", _MAX_PIXELS)
    most = _whole(given.get("max_pixels") or size.get("longest_edge"), "longest_edge", _MAX_PIXELS)
    patch = _whole(given.get("patch_size", 14), "patch_size", 1024)
    unit = patch * _whole(given.get("merge_size", 2), "merge_size", 16)
    if not unit * unit <= least <= most:
        raise ModelLoadFailed(f"preprocessor_config.json has images of {least} to {most} pixels, in squares of {unit}")
    return PatchSteps(
        resample=_whole(given.get("resample", 3), "resample", 5),
        **numbers_of(given, CLIP_MEANS, CLIP_DEVIATIONS),
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
