"""Broken PDF documents: each page is an image within the limits or a refusal, whatever becomes of PDFium's process.

`python -m tests.fuzz.documents CASES SEED FILE` is the process that has them rendered, as of `tests.fuzz.images`.
"""

from __future__ import annotations

import io
import json
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from teimgr.errors import InvalidInput
from teimgr.wire.pdf_pages import MAX_PIXELS, pages
from tests.fuzz.images import outcomes_of
from tests.fuzz.mutation import Mutator
from tests.support.models.dual_encoders import pdf_of

_PAGES = 4  # of a document that are looked at
_TOKENS = (
    *(b"/Kids", b"/Count", b"/MediaBox", b"/Length", b"/Parent", b"/Contents", b"/Resources", b"/Rotate 90"),
    *(b"/Encrypt", b"/UserUnit", b"/Filter /FlateDecode", b"endobj", b"stream", b"xref", b"startxref", b" 0 R"),
    *(b"99999999", b"-1", b"BT /F1 12 Tf (a) Tj ET", b"q 1e9 0 0 1e9 0 0 cm", b"sh", b"Do"),
)


def seeds() -> list[bytes]:
    """Small documents."""
    drawn = "1 0 0 rg 0 0 30 36 re f q 1 0 0 1 5 5 cm 0 0 m 9 9 l S Q"
    return [pdf_of((72, 36, drawn)), pdf_of((72, 36, drawn), (10, 300, "0 0 1 RG 0 0 m 9 99 200 0 50 50 c S"))]


def structured(chance: random.Random, raw: bytes) -> bytes:
    """A document with another number in the place of one."""
    digits = [at for at, byte in enumerate(raw) if byte in b"0123456789"]
    if not digits:
        return raw
    at = chance.choice(digits)
    return raw[:at] + chance.choice((b"0", b"-", b"1e9", b"99999", b".", b"3 0 R")) + raw[at + 1 :]


def outcome_of(case: bytes) -> str:
    """What came of a document.

    Raises:
        AssertionError: an image is not what the limits promise.
    """
    outcome = "rendered"
    try:
        for found in islice(pages(case), _PAGES):
            if isinstance(found, InvalidInput):
                outcome = "a page failed"
                assert found.message.startswith("Input validation error: page "), found.message
            else:
                image = Image.open(io.BytesIO(found))
                assert image.mode == "RGB"
                assert 0 < image.width * image.height <= MAX_PIXELS + image.width + image.height
    except InvalidInput as error:
        assert error.message.startswith("Input validation error: the PDF "), error.message
        return "refused"
    return outcome


def read_cases(cases: int, seed: int, place: Path) -> dict[str, Any]:
    """Outcomes and failures of so many documents."""
    return outcomes_of(Mutator(seed, seeds(), _TOKENS, structured), outcome_of, cases, place)


if __name__ == "__main__":
    print(json.dumps(read_cases(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
