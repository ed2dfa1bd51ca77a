"""Every link of every page leads to a file that exists, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.docsite.pages import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = [
        link for link in links(page) if "://" not in link and not link.startswith("mailto:") and not leads(page, link)
    ]
    assert broken == []


def leads(page: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


def test_headings_become_anchors_as_on_the_site(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `code` – and [a link](x.md)!\n\n## Same\n\n## Same\n\n```bash\n# no heading\n```\n")
    assert anchors(page) == {"a-code--and-a-link", "same", "same-1"}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/how-to/extend.md"])
def test_files_and_folders_that_guides_name_exist(name: str) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", (ROOT / name).read_text())
    assert named
    missing = [each for each in named if not any((base / each).exists() for base in (ROOT, ROOT / "src" / "teimgr"))]
    assert missing == []
