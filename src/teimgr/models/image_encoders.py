"""Models of images alone: DINOv2 as transformers saves it, with and without registers."""

from __future__ import annotations

from dataclasses import replace

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.dual_encoders import need_pillow, pixel_steps, processor_settings, whole_number
from teimgr.models.layout import ImageEncoder, Layout
from teimgr.models.library_code import setting
from teimgr.models.metadata import IMAGE_ENCODERS, ModelMetadata

_MAX_SIDE = 4096  # pixels of a picture that the model was trained on; the known ones have 518
_MAX_REGISTERS = 1024  # the known models have 4


def is_image_encoder(metadata: ModelMetadata) -> bool:
    """Whether the model embeds images and no texts."""
    return metadata.config["model_type"] in IMAGE_ENCODERS


def read_image_encoder(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    """The layout of a model of images alone, whose vector is the first token's behind the last normalisation.

    Raises:
        InvalidConfig: `pooling` is another one.
        ModelLoadFailed: its files describe what is not served, or Pillow is missing.
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
