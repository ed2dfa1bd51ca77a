"""Generated pages and plots are what `python -m docsite` writes now."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from docsite.__main__ import DOCS, PAGES, stale_pages
from tests.docsite.pages import anchors

from teimgr.config.settings import Settings
from teimgr.errors import Code
from teimgr.spec import KEYS


def test_they_are_up_to_date() -> None:
    assert stale_pages() == [], "run: python -m docsite"


def test_every_key_is_in_the_reference_of_settings() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    keys = {*Settings.__slots__, *(name for name, key in KEYS.items() if key.in_config)}
    assert [key for key in sorted(keys) if f"\n| `{key}`" not in text] == []


def test_every_error_code_has_an_anchor() -> None:
    assert {code.name.lower() for code in Code} <= anchors(DOCS / "troubleshooting.md")


def test_plots_are_pictures_with_a_title_a_description_and_their_source() -> None:
    for name in PAGES:
        if name.endswith(".svg"):
            root = ElementTree.fromstring((DOCS / name).read_text())
            found = {element.tag.rpartition("}")[2]: element.text for element in root}
            assert found["title"], name
            assert found["desc"], name
            assert found["text"].startswith("bench/results/"), name
