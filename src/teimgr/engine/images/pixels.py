"""Makes the same pixels as the library's image processor with Pillow, bit for bit.

Resized and cropped pictures are kept as bytes, a quarter of the memory of the model's numbers. `PixelTable` converts
them when the batch begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from teimgr.engine import gpu
from teimgr.engine.batching.batch import to_device
from teimgr.engine.images import memory
from teimgr.engine.images.files import MAX_PIXELS
from teimgr.engine.native_library import give_way
from teimgr.errors import InvalidInput
from teimgr.models.layout import DualEncoder, FlexibleSteps, PatchSteps, PixelSteps, SoftSteps, TileSteps

Pixels = NDArray[np.uint8]
"""Pixels of one picture: [3, height, width]. With `TileSteps` the whole image, as one square, follows its squares."""
_SCALE_STEP, _MAX_SCALE = 1e-5, 100.0  # as in SigLIP2's image processor
_STRIP_PIXELS = 2**17  # resized per step, about a millisecond
_MAX_RATIO = 200  # between the sides, as in Qwen2-VL's image processor


def resized_shape(steps: PixelSteps, width: int, height: int) -> tuple[int, int]:
    """Return width and height after resizing.

    Raises:
        InvalidInput: resizing would make too many pixels, since one side is far longer than the other.
    """
    if isinstance(steps, SoftSteps):
        return _soft_shape(steps, width, height)
    if isinstance(steps, PatchSteps):
        return _shape_of_patches(steps, width, height)
    if isinstance(steps, FlexibleSteps):
        return _shape_within(steps, width, height)
    if isinstance(steps, TileSteps):
        return _shapes_of_tiles(steps, width, height)[1]
    if steps.size is not None:
        return steps.size[1], steps.size[0]
    if steps.shortest is None:
        return width, height
    longest = int(steps.shortest * max(width, height) / min(width, height))
    if steps.shortest * longest > MAX_PIXELS:
        raise InvalidInput(
            f"Input validation error: the image has {width} x {height} pixels: with the shortest side scaled to "
            f"{steps.shortest}, as the model has it, it would have more than {MAX_PIXELS:,}: send it cropped"
        )
    return (steps.shortest, longest) if width <= height else (longest, steps.shortest)


def _shape_of_patches(steps: PatchSteps, width: int, height: int) -> tuple[int, int]:
    """Return the size that Qwen2-VL's image processor resizes to, number for number."""
    shown = f"{width} x {height}"
    if steps.first is not None:
        width, height = _first_shape(steps, width, height)
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise InvalidInput(
            f"Input validation error: the image has {shown} pixels, and this model reads none with a side "
            f"more than {_MAX_RATIO} times as long as the other: send it cropped"
        )
    across, down = round(width / steps.unit) * steps.unit, round(height / steps.unit) * steps.unit
    return _within(steps.unit, (steps.least, steps.most), (width, height), (across, down))


def _first_shape(steps: PatchSteps, width: int, height: int) -> tuple[int, int]:
    """Return the size that Qwen's tools resize to before the image processor; no side becomes 0."""
    assert steps.first is not None
    across, down = (max(steps.unit, round(side / steps.unit) * steps.unit) for side in (width, height))
    return _within(steps.unit, steps.first, (width, height), (across, down))


def _within(unit: int, bounds: tuple[int, int], given: tuple[int, int], rounded: tuple[int, int]) -> tuple[int, int]:
    """Return a size in multiples of `unit` whose number of pixels is within `bounds`."""
    (least, most), (width, height), (across, down) = bounds, given, rounded
    if down * across > most:
        scale = math.sqrt((height * width) / most)
        down = max(unit, math.floor(height / scale / unit) * unit)
        across = max(unit, math.floor(width / scale / unit) * unit)
    elif down * across < least:
        scale = math.sqrt(least / (height * width))
        down, across = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return across, down


def _soft_shape(steps: SoftSteps, width: int, height: int) -> tuple[int, int]:
    """Return the size that Gemma 4's image processor resizes to, number for number."""
    factor = math.sqrt(steps.most / (height * width))
    across, down = (math.floor(factor * side / steps.unit) * steps.unit for side in (width, height))
    longest = steps.most // steps.unit
    if not down:
        return min(math.floor(width / height) * steps.unit, longest), steps.unit
    if not across:
        return steps.unit, min(math.floor(height / width) * steps.unit, longest)
    return across, down


def _shape_within(steps: FlexibleSteps, width: int, height: int) -> tuple[int, int]:
    """Return the size that SigLIP2's image processor resizes to, number for number: its scale is found by bisection."""

    def scaled(side: int, scale: float) -> int:
        return max(steps.patch, math.ceil(side * scale / steps.patch) * steps.patch)

    low, high = _SCALE_STEP / 10, _MAX_SCALE
    while high - low >= _SCALE_STEP:
        scale = (low + high) / 2
        if scaled(width, scale) * scaled(height, scale) <= steps.patches * steps.patch**2:
            low = scale
        else:
            high = scale
    return scaled(width, low), scaled(height, low)


def _shapes_of_tiles(steps: TileSteps, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two sizes that Idefics3's image processor resizes to in sequence, number for number."""

    def even(side: int) -> int:
        return max(1, side + side % 2)

    def multiple(side: int) -> int:
        return max(1, math.ceil(side / steps.tile)) * steps.tile

    ratio = width / height
    if width >= height:
        first = steps.longest, even(int(steps.longest / ratio))
    else:
        first = even(int(steps.longest * ratio)), steps.longest
    ratio = first[0] / first[1]
    if first[0] >= first[1]:
        across = multiple(first[0])
        return first, (across, multiple(int(across / ratio)))
    down = multiple(first[1])
    return first, (multiple(int(down * ratio)), down)


def grid_of(steps: TileSteps, across: int, down: int) -> tuple[int, int]:
    """Return the rows and columns of squares in a resized image; zeros if it is one square."""
    rows, columns = down // steps.tile, across // steps.tile
    return (0, 0) if rows * columns == 1 else (rows, columns)


def tokens_of(dual: DualEncoder, width: int, height: int) -> int:
    """Return the tokens that an image of this size takes; raises InvalidInput as `resized_shape`."""
    return tokens_in(dual, *resized_shape(dual.steps, width, height))


def tokens_in(dual: DualEncoder, across: int, down: int) -> int:
    """Return the tokens of an image that was resized to `across` x `down`."""
    steps = dual.steps
    if isinstance(steps, TileSteps):
        rows, columns = grid_of(steps, across, down)
        return (rows * columns + 1) * dual.image_tokens
    if isinstance(steps, FlexibleSteps):
        return across * down // steps.patch**2
    return across * down // steps.unit**2 if isinstance(steps, PatchSteps) else dual.image_tokens


def prepare(image: Image.Image, steps: PixelSteps) -> Pixels:
    """Return the pixels of an RGB image, resized and cropped; raises InvalidInput as `resized_shape`."""
    if isinstance(steps, TileSteps):
        return _squares(image, steps)
    shape = resized_shape(steps, *image.size)
    if isinstance(steps, PatchSteps) and steps.first is not None:
        image = _resized(image, _first_shape(steps, *image.size), Image.Resampling.BICUBIC)
    resizes = steps.size is not None or steps.shortest is not None or isinstance(steps, (PatchSteps, FlexibleSteps))
    found = np.asarray(_resized(image, shape, Image.Resampling(steps.resample)) if resizes else image)
    if steps.crop is not None:
        found = _cropped(found, *steps.crop)
    return np.ascontiguousarray(found.transpose(2, 0, 1))


def _resized(image: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Like `image.resize`, bit for bit; a large image is resized in steps, so that queries run in between.

    Pillow computes columns before rows if that is less work, as for tall images that become much lower.
    """
    (width, height), (across, down) = image.size, size
    is_tall = 2 * height > 3 * width or height * across > width * (down + 1)
    if width * height > _STRIP_PIXELS and across != width and not is_tall:
        narrow = memory.blank("RGB", (across, height))
        for top, bottom in memory.strips(image, _STRIP_PIXELS):
            give_way()
            strip = image.crop((0, top, width, bottom))
            narrow.paste(strip.resize((across, bottom - top), resample), (0, top))
        image = narrow
    give_way()
    return image.resize(size, resample)


def _squares(image: Image.Image, steps: TileSteps) -> Pixels:
    first, shape = _shapes_of_tiles(steps, *image.size)
    filter_, tile = Image.Resampling(steps.resample), steps.tile
    image = _resized(_resized(image, first, filter_), shape, filter_)
    if shape == (tile, tile):
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    found = np.zeros((3, shape[1] + tile, shape[0]), np.uint8)
    found[:, : shape[1]] = np.asarray(image).transpose(2, 0, 1)
    found[:, shape[1] :, :tile] = np.asarray(_resized(image, (tile, tile), filter_)).transpose(2, 0, 1)
    return found


def _cropped(rows: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Crop [H, W, 3] to its middle, with black around a smaller image."""
    given_height, given_width = rows.shape[:2]
    top, left = (given_height - height) // 2, (given_width - width) // 2
    if top >= 0 and left >= 0:
        return rows[top : top + height, left : left + width]
    whole = np.zeros((max(height, given_height), max(width, given_width), 3), np.uint8)
    above, before = -(-(whole.shape[0] - given_height) // 2), -(-(whole.shape[1] - given_width) // 2)
    whole[above : above + given_height, before : before + given_width] = rows
    top, left = top + above, left + before
    return whole[max(0, top) : min(whole.shape[0], top + height), max(0, left) : min(whole.shape[1], left + width)]


class PixelTable:
    """The model's number for each byte of each colour: rescaled and normalised, in float32."""

    def __init__(self, steps: PixelSteps) -> None:
        levels = np.arange(256, dtype=np.float32)
        if steps.factor is not None:
            levels = (np.arange(256, dtype=np.float64) * steps.factor).astype(np.float32)
        self._table = np.tile(levels, (3, 1))
        if steps.mean is not None and steps.deviation is not None:
            mean, deviation = np.array(steps.mean, np.float32), np.array(steps.deviation, np.float32)
            self._table = (self._table - mean[:, None]) / deviation[:, None]

    def numbers(self, pictures: Sequence[Pixels], device: torch.device) -> torch.Tensor:
        """Pictures of one size → float32 [pictures, 3, height, width], on a GPU made there of the bytes."""
        if gpu.is_gpu(device):
            sent, table = to_device(np.stack(pictures), device), to_device(self._table, device)
            return torch.stack([table[colour][sent[:, colour].int()] for colour in range(3)], dim=1)
        found = np.empty((len(pictures), *pictures[0].shape), np.float32)
        for place, pixels in enumerate(pictures):
            for colour in range(3):
                np.take(self._table[colour], pixels[colour], out=found[place, colour], mode="clip")
        return torch.from_numpy(found)
