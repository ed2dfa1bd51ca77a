"""Broken files of images: each is refused with a reason, or decoded to what its header promises and cut for a model.

`python -m tests.fuzz.images CASES SEED FILE` is the process that reads them; the case it is at is in FILE, so that a
crash or a hang is known by its bytes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from PIL import Image

from teimgr.engine.images.files import FORMATS, MAX_PIXELS, decode, read_size
from teimgr.engine.images.pixels import prepare, resized_shape
from teimgr.errors import InvalidInput
from teimgr.models.layout import PatchSteps, PixelSteps
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Report
from tests.fuzz.target import SEED
from tests.support.models.dual_encoders import file_of, noise

ROOT = Path(__file__).resolve().parents[2]
_PROCESS_S = 3600.0
_CASE_S = 30.0  # of a file of 50 million pixels on a busy machine some seconds
_GROWTH_MIB = 64.0
_STEPS = (
    PixelSteps(shortest=32, resample=3, crop=(32, 32), factor=1 / 255, mean=None, deviation=None),
    PatchSteps(resample=3, factor=1 / 255, mean=None, deviation=None, unit=28, patch=14, least=3136, most=12544),
)
_PNG = b"\x89PNG\r\n\x1a\n"
_TOKENS = (
    b"\xff\xd8\xff",
    b"\xff\xda",
    b"\xff\xc0",
    b"IHDR",
    b"IDAT",
    b"IEND",
    b"tRNS",
    b"acTL",
    b"eXIf",
    b"VP8X",
    b"ANMF",
)


def seeds() -> list[bytes]:
    """Small files of every format and kind of pixel that is read."""
    plain = noise(40, 30)
    alpha = plain.copy()
    alpha.putalpha(noise(40, 30, 1).convert("L"))
    frames = {"save_all": True, "append_images": [noise(40, 30, 2)]}
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        *(file_of(plain.convert(mode)) for mode in ("1", "L", "P", "RGB")),
        file_of(plain.convert("L").convert("I;16")),
        *(file_of(each) for each in (alpha, alpha.convert("LA"), alpha.quantize(16))),
        *(file_of(plain.convert(mode), "JPEG") for mode in ("L", "RGB", "CMYK")),
        file_of(plain, "JPEG", progressive=True, exif=turned),
        *(file_of(each, "WEBP", lossless=lossless) for each in (plain, alpha) for lossless in (False, True)),
        file_of(plain, "WEBP", **frames),
        *(file_of(plain.convert("P"), "GIF", **more) for more in ({}, frames, {"transparency": 3})),
    ]


def structured(chance: random.Random, raw: bytes) -> bytes:
    """A file whose parts are changed, gone, twice or elsewhere, with sums and lengths that fit."""
    if raw.startswith(_PNG):
        return _PNG + b"".join(
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
            for kind, data in _changed(chance, _png_parts(raw))
        )
    if raw[:4] == b"RIFF":
        parts = b"".join(
            kind + len(data).to_bytes(4, "little") + data + b"\0" * (len(data) % 2)
            for kind, data in _changed(chance, _riff_parts(raw))
        )
        return b"RIFF" + (len(parts) + 4).to_bytes(4, "little") + b"WEBP" + parts
    return raw


def _png_parts(raw: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 12 <= len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        found.append((raw[at + 4 : at + 8], raw[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def _riff_parts(raw: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 12
    while at + 8 <= len(raw):
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        found.append((raw[at : at + 4], raw[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    return found


def _changed(chance: random.Random, parts: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    if not parts:
        return parts
    at = chance.randrange(len(parts))
    kind, data = parts[at]
    match chance.randrange(4):
        case 0 if data:
            content = bytearray(data)
            for _ in range(chance.randint(1, 3)):
                content[chance.randrange(len(content))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
            parts[at] = (kind, bytes(content))
        case 1:
            del parts[at]
        case 2:
            parts.insert(chance.randint(0, len(parts)), parts[at])
        case _:
            parts[at] = (kind, data[: chance.randint(0, len(data))])
    return parts


def outcome_of(case: bytes) -> str:
    """What came of a file.

    Raises:
        AssertionError: the image is not what its header and the limits promise.
    """
    try:
        size = read_size(case)
        image = decode(case)
    except InvalidInput as error:
        assert error.message.startswith("Input validation error: "), error.message
        return "refused"
    assert size.format in FORMATS
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= MAX_PIXELS
    for steps in _STEPS:
        try:
            across, down = resized_shape(steps, *image.size)
            pixels = prepare(image, steps)
        except InvalidInput:
            return f"{size.format} too long"
        assert pixels.shape == (3, *(steps.crop or (down, across))), pixels.shape
    return size.format


def read_cases(cases: int, seed: int, place: Path) -> dict[str, Any]:
    """Outcomes and failures of so many cases of images."""
    return outcomes_of(Mutator(seed, seeds(), _TOKENS, structured), outcome_of, cases, place)


def outcomes_of(mutator: Mutator, outcome_of: Callable[[bytes], str], cases: int, place: Path) -> dict[str, Any]:
    """Outcomes and failures of so many cases, and the memory of this process after a tenth of them and after all."""
    outcomes: Counter[str] = Counter()
    failures, memory = [], []
    for number, case in enumerate(mutator.cases(cases)):
        place.write_bytes(case)
        began = time.monotonic()
        try:
            outcomes[outcome_of(case)] += 1
        except Exception as error:  # of any kind: it is what is looked for
            outcomes["failed"] += 1
            failures.append((repr(error)[:300], case[:2000].hex()))
        if (taken := time.monotonic() - began) > _CASE_S:
            failures.append((f"it took {taken:.0f} s", case[:2000].hex()))
        if number in (cases // 10, cases - 1):
            memory.append(psutil.Process().memory_info().rss / 2**20)
    return {"outcomes": outcomes, "failures": failures[:10], "grown_mib": memory[-1] - memory[0] if memory else 0.0}


def run(cases: int, report: Report, module: str = "tests.fuzz.images") -> None:
    """So many files, read in a process of their own, which `module` is."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / "case"
        command = [sys.executable, "-m", module, str(cases), str(SEED + report.cases), str(place)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=_PROCESS_S, check=False)
        except subprocess.TimeoutExpired:
            report.fail("it hangs", place.read_bytes())
            return
        if done.returncode:
            report.fail(f"exit status {done.returncode}: {done.stderr[-2000:].decode()}", place.read_bytes())
            return
    found = json.loads(done.stdout)
    report.cases += cases
    report.outcomes.update(found["outcomes"])
    for what, case in found["failures"]:
        report.fail(what, bytes.fromhex(case))
    if found["grown_mib"] > _GROWTH_MIB:
        report.fail(f"the process grew by {found['grown_mib']:.0f} MiB")


if __name__ == "__main__":
    print(json.dumps(read_cases(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
