"""Parts of generated Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MADE_BY = "<!-- Made by `python -m docsite`; a test checks that it is up to date. -->"
"""For who edits the file; a reader of the page sees nothing of it."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; bars in cells are escaped."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]


def cell(text: str) -> str:
    """Text in one line without a bar of its own."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: object) -> str:
    """Text in code style; a dash for nothing."""
    return f"`{text}`" if text not in ("", None) else "–"


def document(lines: Iterable[str]) -> str:
    """The lines as a file."""
    return "\n".join(lines).rstrip() + "\n"
