"""Broken files of sounds: each is refused with a reason, or decoded to what its header promises.

`python -m tests.fuzz.sounds CASES SEED FILE` is the process that reads them, as of `tests.fuzz.images`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from teimgr.engine.sounds.files import FORMATS, MAX_SECONDS, decode, prepare, read_header
from teimgr.errors import InvalidInput
from teimgr.models.layout import SoundSteps
from tests.fuzz.images import outcomes_of
from tests.fuzz.mutation import Mutator
from tests.support.models.dual_encoders import sound, sound_file

_RATE = 16_000
_STEPS = SoundSteps(_RATE, _RATE, 160, 512, 16, 0.0, 8000.0, "repeatpad", True)
_TOKENS = (
    b"RIFF",
    b"WAVE",
    b"fmt ",
    b"data",
    b"fact",
    b"LIST",
    b"fLaC",
    b"OggS",
    b"OpusHead",
    b"vorbis",
    b"ID3",
    b"Xing",
)


def seeds() -> list[bytes]:
    """Small files of every format."""
    mono, stereo = sound(0.2, rate=_RATE), sound(0.1, 1, _RATE, 2)
    return [
        *(
            sound_file(mono, "WAV", kind, _RATE)
            for kind in ("PCM_16", "PCM_24", "FLOAT", "PCM_U8", "ULAW", "IMA_ADPCM")
        ),
        sound_file(stereo, "WAV", "PCM_16", _RATE),
        *(sound_file(each, "FLAC", "PCM_16", _RATE) for each in (mono, stereo)),
        *(sound_file(mono, "OGG", kind, _RATE) for kind in ("VORBIS", "OPUS")),
        *(sound_file(each, "MP3", "MPEG_LAYER_III", _RATE) for each in (mono, stereo)),
    ]


def structured(chance: random.Random, raw: bytes) -> bytes:
    """A WAV with another value in its header, whose lengths fit; others as they are."""
    if raw[:4] != b"RIFF":
        return raw
    at, changed = chance.randrange(20, 44), bytearray(raw)
    changed[at] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
    return bytes(changed)


def outcome_of(case: bytes) -> str:
    """What came of a file.

    Raises:
        AssertionError: the sound is not what its header and the limits promise.
    """
    try:
        header = read_header(case)
        samples = decode(case, _RATE)
    except InvalidInput as error:
        assert error.message.startswith("Input validation error: "), error.message
        return "refused"
    assert header.format in FORMATS
    assert 0 < header.seconds <= MAX_SECONDS
    assert abs(len(samples) - header.seconds * _RATE) <= 2, (len(samples), header)
    assert np.isfinite(prepare(samples[: 3 * _RATE], _STEPS)).all()
    return header.format


def read_cases(cases: int, seed: int, place: Path) -> dict[str, Any]:
    """Outcomes and failures of so many cases of sounds."""
    return outcomes_of(Mutator(seed, seeds(), _TOKENS, structured), outcome_of, cases, place)


if __name__ == "__main__":
    print(json.dumps(read_cases(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
