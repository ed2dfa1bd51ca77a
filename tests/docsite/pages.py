"""The Markdown pages of the repository: their fenced blocks with marks, their headings and their links.

A mark is a comment in the line above a block:

    <!-- not run: REASON -->        the test checks its syntax alone
    <!-- runs in: .venv-clients --> in the environment of outside clients
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "bench/**/*.md", "proto/*.md", "packaging/**/*.md")
    for path in ROOT.glob(pattern)
)
TESTED_ELSEWHERE = {
    "README.md": "tests/end_to_end/test_readme.py",
    "docs/api-keys.md": "tests/end_to_end/test_auth_docs.py",
    "docs/batches.md": "tests/end_to_end/test_batches.py",
    "docs/mtls.md": "tests/end_to_end/test_auth_docs.py",
    "proto/README.md": "tests/end_to_end/test_first_incident.py",
    **{
        f"docs/moving/from-{product}.md": "tests/docsite/test_moving.py"
        for product in ("infinity", "ollama", "openai", "sie", "tei", "tei-manager")
    },
}
"""Pages whose blocks need a daemon of their own kind, and the test that runs them."""

_BLOCK = re.compile(r"^(?:<!-- (not run|runs in): (.+?) -->\n)?```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `reason` is why it is not run, `environment` where it runs if not in that of the tests."""

    page: str
    line: int
    language: str
    code: str
    reason: str = ""
    environment: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """The path of a page below the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        mark, value, language, code = found.groups()
        line = text.count("\n", 0, found.start(3)) + 1
        reason, environment = (value if mark == "not run" else ""), (value if mark == "runs in" else "")
        yield Block(name_of(page), line, language, code, reason or "", environment or "")


def without_blocks(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """The targets of the page's links, outside of code."""
    text = without_blocks(page)
    return _LINK.findall(re.sub(r"\[`[^`\n]+`\]", "[code]", text))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(without_blocks(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found
