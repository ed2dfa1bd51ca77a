"""Pictures that wait for their batch: decoded ahead within bounds, at once where one is needed, freed if dropped."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from tests.support.models.dual_encoders import build_clip, file_of, noise

from teimgr.engine.images import waiting as module
from teimgr.engine.images.inputs import read_picture
from teimgr.engine.images.waiting import PictureDecoder, WaitingPicture
from teimgr.errors import InvalidInput
from teimgr.models.layout import DualEncoder
from teimgr.models.reading import read_layout

PIXELS = 3 * 32 * 32  # bytes of a picture that waits
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    found = read_layout(build_clip(tmp_path_factory.mktemp("clip"))).dual
    assert found is not None
    return found


def wait_until(decoder: PictureDecoder, met: object) -> None:
    with decoder._changed:
        assert decoder._changed.wait_for(met, LIMIT_S)  # type: ignore[arg-type]


def test_pictures_are_decoded_ahead_until_enough_wait(dual: DualEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 2 * PIXELS)
    decoder = PictureDecoder(dual, 1)
    expected = decoder.expect([read_picture(file_of(noise(40, 40, seed)), dual) for seed in range(6)])
    decoder.start()
    wait_until(decoder, lambda: decoder._held_bytes == 2 * PIXELS)
    last = expected[-1].take()  # needed before its turn: on this thread
    assert isinstance(last, np.ndarray)
    assert last.shape == (3, 32, 32)
    assert decoder._held_bytes == 2 * PIXELS
    for one in expected[:2]:
        one.take()
    wait_until(decoder, lambda: decoder._held_bytes == 2 * PIXELS)
    del one
    expected.clear()  # cancelled: what was held for them is free
    gc.collect()
    wait_until(decoder, lambda: not decoder._held_bytes)
    decoder.close()


def test_pixels_in_flight_are_bounded_and_one_of_any_size_has_its_turn(
    dual: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PictureDecoder, "most", 100 * 100)
    most, now, lock = [0], [0], threading.Lock()
    decode = module.decode

    def counted(data: bytes) -> object:
        size = 100 * 100 if len(data) > 20_000 else 50 * 50
        with lock:
            now[0] += size
            most[0] = max(most[0], now[0])
        try:
            return decode(data)
        finally:
            with lock:
                now[0] -= size

    monkeypatch.setattr(module, "decode", counted)
    decoder = PictureDecoder(dual, 4)
    files = [file_of(noise(*((100, 100) if seed % 3 == 0 else (50, 50)), seed)) for seed in range(12)]
    expected = decoder.expect([read_picture(data, dual) for data in files])
    decoder.start()
    assert all(isinstance(one.take(), np.ndarray) for one in expected)
    assert most[0] <= 100 * 100
    decoder.close()


def test_a_picture_that_cannot_be_decoded_says_why_each_time(dual: DualEncoder) -> None:
    decoder = PictureDecoder(dual, 1)
    picture = read_picture(file_of(noise(40, 40))[:-300], dual)
    [waiting] = decoder.expect([picture])
    assert isinstance(waiting, WaitingPicture)
    for _ in range(2):
        found = waiting.take()
        assert isinstance(found, InvalidInput)
        assert "truncated or broken" in found.message
