"""Parts of image files that their senders chose to be dear: Pillow is given none of them, and the turn stays."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin
from tests.support.models.dual_encoders import file_of

from teimgr.engine.images import parts
from teimgr.engine.images.files import decode, read_size
from teimgr.errors import InvalidInput

_PIXELS = np.random.default_rng(7).integers(0, 256, (12, 20, 3), dtype=np.uint8)
_IMAGE = Image.fromarray(_PIXELS)
_FILES = {form: file_of(_IMAGE, form) for form in ("JPEG", "PNG", "WEBP", "GIF")}
_MOST_S = 0.25  # of processor time; each took from 0.5 s to a minute


def exif_of(order: str, *entries: tuple[int, int, int, int], more: bytes = b"") -> bytes:
    """A TIFF of one directory: tag, type, count and value of each entry."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, len(entries))
    rows = b"".join(
        struct.pack(f"{order}HHI", tag, kind, count) + struct.pack(f"{order}H2x" if kind == 3 else f"{order}I", value)
        for tag, kind, count, value in entries
    )
    return head + rows + bytes(4) + more


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def in_jpeg(*segments: bytes) -> bytes:
    return b"".join([_FILES["JPEG"][:2], *segments, _FILES["JPEG"][2:]])


def in_png(*chunks: bytes) -> bytes:
    return b"".join([_FILES["PNG"][:33], *chunks, _FILES["PNG"][33:]])


def behind_in_webp(exif: bytes) -> bytes:
    file = bytearray(file_of(_IMAGE, "WEBP", exif=b"II*\0"))
    file = file[: file.index(b"EXIF")] + b"EXIF" + struct.pack("<I", len(exif)) + exif + bytes(len(exif) % 2)
    return bytes(file[:4] + struct.pack("<I", len(file) - 8) + file[8:])


_WITH: dict[str, Callable[[bytes], bytes]] = {
    "JPEG": lambda exif: in_jpeg(segment(0xE1, b"Exif\0\0" + exif)),
    "PNG": lambda exif: in_png(chunk(b"eXIf", exif)),
    "PNG, behind the pixels": lambda exif: _FILES["PNG"][:-12] + chunk(b"eXIf", exif) + _FILES["PNG"][-12:],
    "WEBP": behind_in_webp,
}
_ORIENTATION = 0x0112


@pytest.mark.parametrize("form", _WITH)
@pytest.mark.parametrize("order", "<>")
def test_both_readers_turn_by_the_orientation_alone(form: str, order: str) -> None:
    for value in range(10):
        file = _WITH[form](exif_of(order, (0x010F, 2, 4, 0), (_ORIENTATION, 3, 1, value), (0x011A, 5, 1, 0)))
        is_turned = 5 <= value <= 8
        assert read_size(file)[1:] == ((12, 20) if is_turned else (20, 12))
        assert decode(file).size == read_size(file)[1:]


@pytest.mark.parametrize(
    "exif",
    [
        *(b"", b"II*\0", b"Exif\0\0", exif_of("<"), b"II*\0" + struct.pack("<I", 2**32 - 1)),
        b"II*\0" + struct.pack("<IH", 8, 65_535) + b"\1" * 30,
        exif_of("<", (_ORIENTATION, 3, 2, 6)),
        exif_of("<", (_ORIENTATION, 5, 1, 6)),
        exif_of("<", *[(0x0100, 3, 1, 6)] * 5_600, (_ORIENTATION, 3, 1, 6)),  # beyond 64 KiB
    ],
    ids=lambda exif: f"{len(exif)} bytes",
)
def test_exif_without_an_orientation_turns_nothing(exif: bytes) -> None:
    for form in ("PNG", "WEBP"):
        assert read_size(_WITH[form](exif))[1:] == decode(_WITH[form](exif)).size == (20, 12)


_SAYS_SIX = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
_UPRIGHT = exif_of("<", (_ORIENTATION, 3, 1, 1))


def test_an_orientation_of_another_type_or_in_xmp_turns_as_pillow_does() -> None:
    plain = exif_of("<", (0x010F, 2, 4, 0))
    turned = [make(exif_of(order, (_ORIENTATION, 4, 1, 6))) for make in _WITH.values() for order in "<>"]
    turned += [file_of(_IMAGE, "JPEG", xmp=_SAYS_SIX), file_of(_IMAGE, "WEBP", xmp=_SAYS_SIX)]
    turned += [file_of(_IMAGE, "JPEG", xmp=_SAYS_SIX, exif=plain), file_of(_IMAGE, "WEBP", xmp=_SAYS_SIX, exif=plain)]
    turned += [in_png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + _SAYS_SIX))]
    upright = [file_of(_IMAGE, form, xmp=_SAYS_SIX, exif=_UPRIGHT) for form in ("JPEG", "WEBP")]
    for file in (*turned, *upright):
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        assert read_size(file)[1:] == expected.size == decode(file).size
        assert (np.asarray(decode(file)) == np.asarray(expected.convert("RGB"))).all()
    assert {decode(file).size for file in turned} == {(12, 20)}


def test_markers_in_pixels_are_counted_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_STEP_BYTES", 7)
    scan = segment(0xDA, bytes(6))
    assert read_size(_FILES["JPEG"][:-2] + scan * 60 + b"\xff\xd9").width == 20
    assert read_size(_FILES["JPEG"] + scan * 200).width == 20  # behind the end of the picture
    with pytest.raises(InvalidInput, match="truncated or broken"):
        read_size(_FILES["JPEG"][:-2] + scan * 101 + b"\xff\xd9")


_RATIONAL = exif_of("<", (_ORIENTATION, 5, 300_000, 30), more=b"\1" * 2_400_100)
_SHORTS = exif_of("<", (_ORIENTATION, 3, 9_000_000, 30), more=b"\1" * 18_000_000)
_DEAR = {
    "PNG, a rational": in_png(chunk(b"eXIf", _RATIONAL)),
    "PNG, shorts": in_png(chunk(b"eXIf", _SHORTS)),
    "PNG, profiles": in_png(*[chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(900_000)))] * 500),
    "JPEG, many of EXIF": in_jpeg(*[segment(0xE1, b"Exif\0\0" + bytes(60_000))] * 300),
}


@pytest.mark.parametrize("name", _DEAR)
def test_what_says_nothing_of_pixels_takes_no_time(name: str) -> None:
    file, form = _DEAR[name], name.partition(",")[0]
    began = time.thread_time()
    assert read_size(file)[1:] == (20, 12)
    found = np.asarray(decode(file))
    assert time.thread_time() - began < _MOST_S
    assert (found == np.asarray(decode(_FILES[form]))).all()


_TOO_MANY = {
    "JPEG, EXIF": in_jpeg(*[segment(0xE1, b"Exif\0\0")] * 2_001),
    "JPEG, tables": in_jpeg(*[segment(0xDB, bytes(65))] * 1_999),
    "JPEG, large tables": in_jpeg(*[segment(0xDB, bytes(65_000))] * 3),
    "JPEG, no length": in_jpeg(b"\xff\xe5\0\0"),
    "JPEG, scans": _FILES["JPEG"][:-2] + segment(0xDA, bytes(6)) * 101 + b"\xff\xd9",
    "PNG, pixels": in_png(*[chunk(b"IDAT", b"")] * 3_000),
    "GIF, zeros": _FILES["GIF"][:781] + bytes(5_000) + _FILES["GIF"][781:],
    "GIF, ended": _FILES["GIF"][:781] + b";" + _FILES["GIF"][781:],
    "WEBP, others": _FILES["WEBP"] + b"JUNK\0\0\0\0" * 3_000,
}


@pytest.mark.parametrize("name", _TOO_MANY)
def test_more_parts_than_a_picture_needs_are_refused(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidInput, match="truncated or broken"):
        read_size(_TOO_MANY[name])
    assert time.thread_time() - began < _MOST_S


def test_pictures_of_many_encoders_keep_their_pixels() -> None:
    adobe = _IMAGE.convert("CMYK")
    thumbnail = segment(0xE0, b"JFXX\0\x10" + bytes(60_000))
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "b", zip=True)
    profile = {"icc_profile": bytes(100_000)}
    files = [
        *(file_of(one, "JPEG", progressive=True, comment=b"c", **profile) for one in (_IMAGE, adobe)),
        in_jpeg(thumbnail, segment(0xFE, b"c"), b"\xff" * 20),
        file_of(_IMAGE.quantize(5), "PNG", transparency=2, pnginfo=text, **profile),
        file_of(_IMAGE, "PNG", save_all=True, append_images=[_IMAGE.rotate(180)], duration=9),
        file_of(_IMAGE, "PNG", save_all=True, append_images=[_IMAGE.rotate(180)], duration=9, default_image=True),
        file_of(_IMAGE.quantize(5), "GIF", transparency=2, comment=b"c"),
    ]
    for file in files:
        with Image.open(io.BytesIO(file)) as whole, Image.open(io.BytesIO(file)) as again:
            form = whole.format
            assert form is not None
            kept = parts.read(file, form).pixels
            assert len(kept) < len(file)
            with Image.open(io.BytesIO(kept)) as stripped:
                assert (whole.mode, whole.size) == (stripped.mode, stripped.size)
                assert whole.info.get("transparency") == stripped.info.get("transparency")
                assert (np.asarray(again.convert("RGBA")) == np.asarray(stripped.convert("RGBA"))).all()
