"""Awkward image files: each has its answer, and none takes memory that its header does not announce."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from tests.support.models.dual_encoders import file_of, noise

from teimgr.engine.images import files, memory
from teimgr.engine.images.files import MAX_FILE_BYTES, decode, read_size
from teimgr.errors import InvalidInput

_SHAPE = (23, 31, 3)  # height, width
_PIXELS = np.random.default_rng(5).integers(0, 256, _SHAPE, dtype=np.uint8)
_IMAGE = Image.fromarray(_PIXELS)


def rgb(data: bytes) -> np.ndarray:
    read_size(data)
    return np.asarray(decode(data))


def with_orientation(turn: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    return file_of(_IMAGE, "PNG", exif=exif)


# By the value of EXIF's orientation: what makes the stored picture upright.
_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda rows: rows,
    2: lambda rows: rows[:, ::-1],
    3: lambda rows: rows[::-1, ::-1],
    4: lambda rows: rows[::-1],
    5: lambda rows: rows.transpose(1, 0, 2),
    6: lambda rows: np.rot90(rows, -1),
    7: lambda rows: rows.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda rows: np.rot90(rows),
    9: lambda rows: rows,
}


@pytest.mark.parametrize("turn", _UPRIGHT)
def test_a_picture_is_turned_as_its_exif_says(turn: int) -> None:
    assert (rgb(with_orientation(turn)) == _UPRIGHT[turn](_PIXELS)).all()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_size_in_a_header_is_that_of_the_turned_picture(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_size(file_of(_IMAGE, form, exif=exif))[1:] == (23, 31)
    assert read_size(file_of(_IMAGE, form))[1:] == (31, 23)


def test_colour_below_full_transparency_does_not_show() -> None:
    alpha = np.zeros((23, 31, 1), np.uint8)
    alpha[0, 0] = 255
    found = rgb(file_of(Image.fromarray(np.concatenate([_PIXELS, alpha], axis=2))))
    assert (found[0, 0] == _PIXELS[0, 0]).all()
    assert (found.reshape(-1, 3)[1:] == 255).all()


def test_a_palette_with_a_transparent_colour_is_on_white() -> None:
    paletted = Image.new("P", (2, 1))
    paletted.putpalette([10, 20, 30, 200, 0, 0])
    paletted.putpixel((1, 0), 1)
    assert rgb(file_of(paletted, "PNG", transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_grey_of_16_bits_is_scaled_and_not_cut() -> None:
    levels = np.array([[0, 30000, 65535, 257]], np.uint16)
    assert rgb(file_of(Image.fromarray(levels)))[0, :, 0].tolist() == [0, 117, 255, 1]


def test_cmyk_is_converted_as_pillow_does() -> None:
    data = file_of(_IMAGE.convert("CMYK"), "JPEG")
    assert (rgb(data) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_of_an_animation_the_first_frame_counts(form: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = file_of(frames[0], form, save_all=True, append_images=frames[1:], duration=10, **options)
    assert (rgb(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("size", [(1, 1), (2000, 5), (5, 2000)])
def test_small_and_narrow_pictures_are_read(size: tuple[int, int]) -> None:
    assert rgb(file_of(noise(*size))).shape == (size[1], size[0], 3)


def png_of(width: int, height: int) -> bytes:
    """A whole PNG of one colour, 1 bit a pixel."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    packer, row = zlib.compressobj(9), b"\0" * (1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row * 100) for _ in range(height // 100)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def webp_of(width: int, height: int) -> bytes:
    """The head of a WebP with a canvas of this size."""
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + (30).to_bytes(4, "little") + b"WEBPVP8X" + (10).to_bytes(4, "little") + canvas


@pytest.mark.parametrize(
    "data", [png_of(12_000, 12_000), webp_of(16_383, 16_383), png_of(1, 65_600)], ids=["png", "webp", "one column"]
)
def test_a_bomb_is_refused_by_its_header_without_memory(data: bytes) -> None:
    assert len(data) < 20_000
    tracemalloc.start()
    with pytest.raises(InvalidInput, match=r"\d+ x \d+ pixels, and 50,000,000 are allowed, 65,536 on a side"):
        read_size(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000


_PHOTO = file_of(noise(64, 64), "JPEG")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has no bytes"),
        (b"\0" * (MAX_FILE_BYTES + 1), "20,971,520 are allowed"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "but PostScript: send JPEG, PNG, WebP or GIF"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "but SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (file_of(_IMAGE, "BMP"), "but BMP"),
        (file_of(_IMAGE, "TIFF"), "but TIFF"),
        (b"/etc/passwd", "not an image of an allowed format"),
        (_PHOTO[:20], "truncated or broken"),
        (b"\xff\xd8" + b"\xff\xfe\0\2" * 2_500 + _PHOTO[2:], "truncated or broken"),
        (b"\xff\xd8" + b"\xff" * 1_000 + _PHOTO[2:], "truncated or broken"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0teXt\0\0\0\0" * 2_500, "truncated or broken"),
        (b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\0" * 2_500, "truncated or broken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_image_is_refused_with_the_way_out(data: bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_size(data)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused(form: str) -> None:
    whole = file_of(noise(64, 64), form)
    assert rgb(whole).shape == (64, 64, 3)
    with pytest.raises(InvalidInput, match=f"the {form} file is truncated or broken"):
        rgb(whole[: len(whole) * 2 // 3])


_KINDS = {
    "RGB": _IMAGE,
    "L": _IMAGE.convert("L"),
    "P": _IMAGE.quantize(16),
    "RGBA": Image.fromarray(np.dstack([_PIXELS, _PIXELS[:, :, 0]])),
    "1": _IMAGE.convert("1"),
    "I;16": Image.fromarray(_PIXELS[:, :, 0].astype(np.uint16) * 257),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_large_pictures_have_the_same_pixels_in_memory_of_our_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    files = []
    for turn in _UPRIGHT:
        exif[0x0112] = turn
        files.append(file_of(_KINDS[kind], "PNG", exif=exif))
    by_pillow = [rgb(one) for one in files]
    monkeypatch.setattr(memory, "_SMALL_PIXELS", 0)
    monkeypatch.setattr(memory, "_STRIP_PIXELS", 40)
    assert all((rgb(one) == other).all() for one, other in zip(files, by_pillow, strict=True))
    assert by_pillow[0].std() > 10


def test_pixels_of_a_large_picture_take_nothing_of_pillows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(noise(1700, 1300), "JPEG", exif=exif)
    mapped: list[int] = []
    mapping = memory._mapping
    monkeypatch.setattr(memory, "_mapping", lambda size: mapped.append(size) or mapping(size))
    found = decode(data)
    assert found.size == (1300, 1700)
    assert mapped == [1700 * 1300 * 4] * 2
    assert (np.asarray(found) == np.rot90(np.asarray(Image.open(io.BytesIO(data))), -1)).all()


def test_large_webp_images_have_the_same_pixels_by_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = Image.fromarray(np.dstack([_PIXELS, _PIXELS[:, :, 0]]))
    stills = [file_of(one, "WEBP", lossless=way, exif=exif) for one in (_IMAGE, alpha) for way in (False, True)]
    ways = [(one, way) for one in (_IMAGE, alpha) for way in (False, True)]
    moving = [file_of(one, "WEBP", lossless=way, save_all=True, append_images=[one.rotate(90)]) for one, way in ways]
    in_part = [_with_frames_on_a_larger_canvas(one) for one in moving]
    every = [*stills, *moving, *in_part]
    by_pillow = [rgb(one) for one in every]
    monkeypatch.setattr(memory, "_SMALL_PIXELS", 0)
    assert all((rgb(one) == other).all() for one, other in zip(every, by_pillow, strict=True))
    assert all(files.webp_pixels(one, "RGBA", Image.open(io.BytesIO(one)).size) for one in every)
    for one in (stills[0][:-300], moving[0][:200], in_part[1][:150]):
        with pytest.raises(InvalidInput, match="the WEBP file is truncated or broken"):
            decode(one)


def _with_frames_on_a_larger_canvas(moving: bytes) -> bytes:
    """An animation with its frames at (4, 6) of a picture of 20 pixels more on each side."""
    file, canvas = bytearray(moving), moving.index(b"VP8X") + 12
    for at in (canvas, canvas + 3):
        file[at : at + 3] = (int.from_bytes(file[at : at + 3], "little") + 20).to_bytes(3, "little")
    at = -1
    while (at := file.find(b"ANMF", at + 1)) >= 0:
        file[at + 8 : at + 14] = b"\x02\0\0\x03\0\0"
    return bytes(file)
