"""The site builds without a warning, leaves no page out, and asks no other host for anything, search included."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.api.page.chromium import CHROMIUM, OPTIONS, missing
from tests.docsite.pages import ROOT

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
_LIMIT_S = 60
# Attributes that make a browser fetch something; a link to follow is none.
_FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}

pytestmark = pytest.mark.skipif(not MKDOCS.exists(), reason="no .venv-docs: `dev.py docs` makes it")


class Page(HTMLParser):
    """What a page fetches, and where it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in _FETCHED and value:
                self.fetched.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    environ.pop("PYTHONPATH", None)
    command = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, env=environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_docs_is_in_the_navigation(site: Path) -> None:
    home = Page(site / "index.html")
    shown = {path.split("#")[0] for path in home.links}
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(wanted - shown - {"index.html"}) == []


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Page]) -> None:
    foreign = {url for page in pages.values() for url in page.fetched if re.match(r"(https?:)?//", url)}
    assert foreign == set()


def test_links_and_anchors_of_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.links
        if "://" not in link and not link.startswith("mailto:") and not leads(path, link, pages)
    ]
    assert broken == []


def leads(page: Path, link: str, pages: dict[Path, Page]) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if target.is_dir():
        target /= "index.html"
    return target.exists() and (not anchor or target not in pages or anchor in pages[target].anchors)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "there")
def test_it_reads_and_searches_from_files_in_a_browser_without_a_network(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS) as browser:
        page = browser.new_page()
        requests: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto((site / "troubleshooting.html").as_uri() + "#overloaded")
        page.goto((site / "explanation" / "performance.html").as_uri())
        page.goto((site / "index.html").as_uri())
        page.fill("input[name=query]", "max_queue_wait_secs")
        page.wait_for_selector(".md-search-result__item")
    assert faults == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
