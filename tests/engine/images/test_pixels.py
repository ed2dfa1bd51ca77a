"""Large images are resized in steps, bit for bit as Pillow does at once; between them queries have the core."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.card import StandInCard
from tests.support.models.dual_encoders import build_clip, file_of, noise

from teimgr.engine import gpu
from teimgr.engine.batching import pinned_ring
from teimgr.engine.images import pixels
from teimgr.engine.images.inputs import read_picture
from teimgr.engine.images.waiting import PictureDecoder
from teimgr.engine.native_library import native_library
from teimgr.models.layout import PixelSteps
from teimgr.models.reading import read_layout

LIMIT_S = 60.0


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS])
def test_resizing_in_strips_gives_pillows_bits(resample: Image.Resampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "_STRIP_PIXELS", 2**11)
    chance, strips = np.random.default_rng(0), list[object]()
    own = pixels.memory.strips

    def counted(*given: Any) -> list[tuple[int, int]]:
        strips.append(given)
        return own(*given)

    monkeypatch.setattr(pixels.memory, "strips", counted)
    for _ in range(80):
        (width, height), (across, down) = chance.integers(20, 300, 2).tolist(), chance.integers(4, 300, 2).tolist()
        for size in ((across, down), (across, max(1, across * height // width))):
            image = noise(width, height)
            found = pixels._resized(image, size, resample)
            assert found.tobytes() == image.resize(size, resample).tobytes(), (image.size, size)
    assert len(strips) > 40


def test_a_card_gets_the_bytes_of_pictures_and_makes_the_same_numbers(card: StandInCard) -> None:
    """Of a quarter of the size of the numbers, from pinned memory."""
    steps = PixelSteps(
        shortest=None, size=None, resample=3, crop=None, factor=1 / 255, mean=(0.4, 0.5, 0.6), deviation=(0.2, 0.3, 0.4)
    )
    pictures = [np.random.default_rng(seed).integers(0, 256, (3, 20, 30), np.uint8) for seed in range(3)]
    sent, own = list[int](), pinned_ring.INPUTS.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_ring.INPUTS, "take", lambda size: sent.append(size) or own(size))
        there = pixels.PixelTable(steps).numbers(pictures, torch.device("cpu"))
        patch.setattr(gpu, "is_gpu", lambda device: False)
        here = pixels.PixelTable(steps).numbers(pictures, torch.device("cpu"))
    assert there.dtype is here.dtype is torch.float32
    assert torch.equal(there, here)
    assert sent == [3 * 3 * 20 * 30, 3 * 256 * 4]


def test_a_photograph_is_decoded_in_steps_that_wait_for_queries(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native_library()
    if library is None or not library.gives_way:
        pytest.skip("the native library gives way on Linux alone")
    dual = read_layout(build_clip(tmp_path_factory.mktemp("clip"))).dual
    assert dual is not None
    urgent = ctypes.c_uint.in_dll(ctypes.CDLL(library.path), "urgent")
    waits, own = list[int](), library.wait_for_foreground

    def waited() -> None:
        waits.append(urgent.value)
        own()

    monkeypatch.setattr(library, "wait_for_foreground", waited)
    picture = read_picture(file_of(noise(640, 480)), dual)
    decoder = PictureDecoder(dual, 1)
    [ahead, at_once] = decoder.expect([picture, picture])
    waits.clear()
    urgent.value = 1  # a query's forward that does not end
    try:
        assert isinstance(at_once.take(), np.ndarray)  # a thread that may not wait
        steps = len(waits)
        assert steps > 4
        decoder.start()
        taken = list[object]()
        reader = threading.Thread(target=lambda: taken.append(ahead.take()))
        reader.start()
        reader.join(LIMIT_S)  # it may wait no longer, though the query goes on
        assert isinstance(taken[0], np.ndarray)
        assert len(waits) >= 2 * steps
        assert waits.count(1) == len(waits)
    finally:
        urgent.value = 0
        decoder.close()
