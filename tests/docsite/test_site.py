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

# Tables that a reader has to scroll sideways: wider than the column of the text.
_OVER = """() => [...document.querySelectorAll(".md-content table")].flatMap((table) => {
  const room = table.closest(".md-content__inner").clientWidth;
  const fits = table.scrollWidth <= Math.min(room, table.clientWidth) + 1;
  return fits ? [] : [`${table.scrollWidth} px in ${room}: ${table.innerText.slice(0, 40)}`];
})"""

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


def test_every_page_of_docs_is_in_the_navigation_but_the_results_which_pages_link_to(
    site: Path, pages: dict[Path, Page]
) -> None:
    home = Page(site / "index.html")
    shown = {path.split("#")[0] for path in home.links}
    every = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    results = {path for path in every if path.startswith("results/")}
    assert sorted(every - results - shown - {"index.html"}) == []
    assert [path for path in shown if "results/" in path] == []
    named = {(path.parent / link.split("#")[0]).resolve() for path, page in pages.items() for link in page.links}
    assert [path for path in sorted(results) if site / path not in named] == []


def test_the_tabs_are_those_of_the_navigation_and_the_logo_is_the_pages(site: Path) -> None:
    home = (site / "index.html").read_text()
    [tabs] = re.findall('(?s)<ul class="md-tabs__list">(.*?)</ul>', home)
    titles = ["Home", "Tutorial", "How-to", "Operations", "Reference", "Explanation"]
    assert [each.strip() for each in re.findall("(?s)<a [^>]*>(.*?)</a>", tabs)] == titles
    logo = ROOT / "src/teimgr/api/page/static/icon.svg"
    assert (site / "assets" / "icon.svg").read_bytes() == logo.read_bytes()


def test_who_made_a_page_is_said_to_those_who_edit_it_alone(site: Path) -> None:
    made = re.compile("(Made|Written|Generated) by <code>python")
    assert [path.name for path in site.rglob("*.html") if made.search(path.read_text())] == []


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "there")
def test_tables_fit_a_window_of_1280_pixels(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    pages = [
        path for path in sorted(site.rglob("*.html")) if "results" not in path.parts and "<table" in path.read_text()
    ]
    wide: list[str] = []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, **OPTIONS) as browser:
        window = browser.new_page(viewport={"width": 1280, "height": 800}, java_script_enabled=False)
        for path in pages:
            window.goto(path.as_uri(), wait_until="domcontentloaded")
            over = window.evaluate(_OVER)
            wide += [f"{path.relative_to(site)}: {each}" for each in over]
    assert wide == []


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
