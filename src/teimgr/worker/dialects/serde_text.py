"""Values as the faults of serde_json show them; long texts in pieces."""

from __future__ import annotations

import unicodedata
from typing import Any

# Characters that one call joins, which holds the GIL.
_SHOWN_AT_ONCE = 4096


def shown(value: Any) -> str:
    """A value as serde_json's faults show it: `integer `1``, `string "a"`, `map`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f"string {_quoted(value)}"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{_float(value)}`"
    return "sequence" if isinstance(value, list) else "map"


def _float(value: float) -> str:
    """The form that ryu prints: without a plus or leading zeros in the exponent, which begins at 1e16 and at 1e-6."""
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text
    if exponent == "-05":
        digits = mantissa.replace(".", "").lstrip("-")
        return f"{'-' if value < 0 else ''}0.0000{digits}"
    return f"{mantissa}e{int(exponent)}"


_NAMED_ESCAPES = {"\0": "\\0", "\t": "\\t", "\n": "\\n", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def _quoted(text: str) -> str:
    """A string as Rust's `{:?}` writes it."""
    pieces = [
        "".join([_shown_char(char, not place) for place, char in enumerate(text[at : at + _SHOWN_AT_ONCE], at)])
        for at in range(0, len(text), _SHOWN_AT_ONCE)
    ]
    return f'"{"".join(pieces)}"'


def _shown_char(char: str, is_first: bool) -> str:
    if char in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[char]
    extends = is_first and unicodedata.category(char) in ("Mn", "Me")
    return char if char.isprintable() and not extends else f"\\u{{{ord(char):x}}}"
