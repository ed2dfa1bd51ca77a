"""Turns of phrase that an English engineer would not write, counted by line in all that people read.

Not each match is wrong. `python -m tests.house --words` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_READ = ("src", "docs", "configs", "README.md", "DESIGN.md", "CONTRIBUTING.md")
_KINDS = (".py", ".md", ".toml", ".html", ".c", ".h", ".pyi", ".proto")
_GENERATED = ("pb", "results")  # folders
# What follows "has not" where that is English: "has not been", "has not finished", "has not begun".
_PARTICIPLES = "been|yet|begun|come|seen|gone|taken|given|sent|read|left|run|started"
_PHRASES = {
    "is no X": r"\b(is|are|was|were) no (?!longer\b|more\b|such\b|one\b)[a-z]",
    "None where": r"\bNone where\b",
    "is none": r"\b(is|be|are) none\b",
    "has not": rf"\bhas them not\b|\bha(s|d|ve) not\b(?! (?:{_PARTICIPLES})\b| [a-z]+ed\b)",
    "As X": r'"""As (?!(a|an|the|of)\b)[A-Za-z`]',
    "so many": r"\b(so|of so) (many|much)\b|\bof so\b",
    "anew": r"\banew\b",
    "of late": r"\bof late\b",
    "midst": r"\bmidst\b",
    "by itself": r"\b(by|of) (itself|themselves|(its|their) own)\b",
    "whoever": r"\b[Ww]hoever\b|\b[Ww]ho( is| has| may)? (listened|heard|no)\b",
    "lies in": r"\blies? (in|at|on|under|beside)\b",
    "told": r"\b(told|somebody|nobody)\b|\bsays? (so|that|which|what|why|how)\b",
    "MOST_": r"\b_?(MOST|LEAST)_[A-Z]",
    "wanted": r"\bis wanted\b|\bwanted (state|running|instances?)\b",
    "look-up table": r"\blook-up tables?\b",
    "mend": r"\bmend(s|ed|ing)?\b",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _PHRASES.items()}


def matches(root: Path) -> Iterator[str]:
    """`FILE:LINE: [PHRASE] TEXT` of each match, once for each phrase of a line."""
    for path in _texts(root):
        text = path.read_text(errors="replace")
        found = {
            (text.count("\n", 0, each.start()), name)
            for name, pattern in _PATTERNS.items()
            for each in pattern.finditer(text)
        }
        lines = text.split("\n") if found else []
        for number, name in sorted(found):
            yield f"{path.relative_to(root)}:{number + 1}: [{name}] {lines[number].strip()[:160]}"


def _texts(root: Path) -> Iterator[Path]:
    for name in _READ:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in _KINDS and not set(path.relative_to(root).parts) & set(_GENERATED):
                yield path
