"""The fingerprint of a space in replies and requests: names of headers and metadata, and the check of an expected one.

A fingerprint is the space, 64 hex digits, optionally with the lowest accepted precision class: `<space>/fp32`.
"""

from __future__ import annotations

import re

from teimgr.errors import InvalidInput, SpaceDiffers

# HTTP headers of a reply, keys of gRPC's initial metadata and of an Arrow schema's metadata.
SPACE_KEY = "x-teimgr-space"
PRECISION_KEY = "x-teimgr-precision"
# HTTP header or gRPC metadata of a request, and the field of a JSON body.
EXPECT_KEY = "x-teimgr-expect-fingerprint"
EXPECT_FIELD = "expect_fingerprint"
PRECISIONS = ("int8", "16-bit", "fp32")
"""From the coarsest to the finest."""

_FINGERPRINT = re.compile(rf"([0-9a-f]{{64}})(?:/({'|'.join(PRECISIONS)}))?")
_SHOWN = 100

Marks = tuple[tuple[bytes, bytes], ...]


def fingerprint(space: str, precision: str) -> str:
    """Return space and precision class in one word, as a request may expect it."""
    return f"{space}/{precision}"


def reply_headers(space: str, precision: str) -> dict[str, str]:
    """Return the headers that describe a reply's vectors; nothing if the space is unknown."""
    return {SPACE_KEY: space, PRECISION_KEY: precision} if space else {}


def reply_marks(space: str, precision: str) -> Marks:
    """Return `reply_headers` in the form of gRPC's metadata."""
    return tuple((name.encode(), value.encode()) for name, value in reply_headers(space, precision).items())


def meets(expected: str, space: str, precision: str) -> bool:
    """True if vectors are of the expected space, in at least the expected precision.

    Raises:
        InvalidInput: `expected` is not a fingerprint.
    """
    found = _FINGERPRINT.fullmatch(expected)
    if found is None:
        raise InvalidInput(
            f"`{EXPECT_FIELD}` must be a space of 64 hex digits, or <space>/<precision> with one of "
            f"{', '.join(PRECISIONS)} (got {expected[:_SHOWN]!r})"
        )
    least = found[2] or PRECISIONS[0]
    return found[1] == space and precision in PRECISIONS[PRECISIONS.index(least) :]


def check_expected(expected: str, space: str, precision: str, instance: str) -> None:
    """Refuse a request whose expected fingerprint differs from that of the model that would answer it.

    Raises:
        InvalidInput: see `meets`.
        SpaceDiffers: has both fingerprints.
    """
    if not meets(expected, space, precision):
        raise SpaceDiffers(instance, fingerprint(space, precision) if space else "unknown", expected)
