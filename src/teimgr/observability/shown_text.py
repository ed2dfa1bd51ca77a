"""Text for display: control characters that callers may have put into it are shown, not obeyed; pydantic's messages in
our words.

Otherwise an escape sequence in a model's id, a tag, a reason or a log line would move the operator's cursor, or change
the title or the clipboard; a bidirectional override would show a name as another one.
"""

from __future__ import annotations

import re

_LINES = "\n\t"
# C0 and C1 controls, DEL, marks and overrides of direction, separators of lines, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def one_line(text: str) -> str:
    """The text with every control character as an escape, such as `\\x1b`, line feeds as `\\n`; tabs stay."""
    return text if _UNSAFE.search(text) is None else _UNSAFE.sub(lambda found: _shown(found[0], "\t"), text)


def several_lines(text: str) -> str:
    """Like `one_line`, but line feeds stay."""
    return text if _UNSAFE.search(text) is None else _UNSAFE.sub(lambda found: _shown(found[0], _LINES), text)


def has_controls(text: str, allowed: str = "") -> bool:
    """True if the text has a control character that is not in `allowed`."""
    return any(found[0] not in allowed for found in _UNSAFE.finditer(text))


def _shown(character: str, kept: str) -> str:
    if character in kept:
        return character
    if character == "\n":
        return "\\n"
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def in_own_words(message: str) -> str:
    """Return a message of pydantic, or of typer, in the words of the other messages."""
    for theirs, ours in _WORDS:
        message = theirs.sub(ours, message, count=1)
    return message


_WORDS = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"^Value error, ", ""),
        (r"^(Input|List|String|Dictionary|Tuple|Value) should (be|have)", r"must \2"),
        (r"must be a valid dictionary.*", "must be an object"),
        (r"must be a valid list.*", "must be a list"),
        (r", unable to (parse|interpret) .*", ""),
        (r", got a number with a fractional part", ""),
        (r" after validation, not (\d+)", r", not \1"),
        (r"^Field required$", "is missing"),
    )
)
