"""mkdocs hooks: files of the repository as pages of the site, and links to files that are no pages.

A link out of `docs/` leads to the page of that file if it is in `PUBLISHED`, else to a copy of it below `files/`; the
name of a directory becomes plain text. So the site works without the repository, and its Markdown on any other viewer.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED: Mapping[str, str] = {
    "DESIGN.md": "repository/architecture.md",
    "CHANGELOG.md": "repository/changelog.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "SECURITY.md": "repository/security.md",
    "deploy/README.md": "repository/deployments.md",
    "bench/README.md": "repository/benchmarks.md",
    "proto/README.md": "repository/proto.md",
    **{
        path.relative_to(ROOT).as_posix(): f"repository/results/{path.name}"
        for path in sorted((ROOT / "bench" / "results").glob("*.md"))
    },
    "README.md": "index.md",
}
"""Pages of the site by the path of their file in the repository."""
_FILES = "files"
_LOGO = "src/teimgr/api/page/static/icon.svg"
_RECORDS = ("results/", "repository/results/", "contract.md", "conformance.md")
_LINK = re.compile(r"(?<!`)(!?)\[([^\]]*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the published files, and copies of the files that pages link to."""
    for source, page in PUBLISHED.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ROOT / _LOGO)))
    linked = {
        target
        for file in files.documentation_pages()
        for target in _targets(_source(file.src_uri), file.content_string)
        if (ROOT / target).is_file() and not target.startswith("docs/") and target not in PUBLISHED
    }
    for target in sorted(linked):
        path = str(ROOT / target)
        files.append(
            File.generated(config, f"{_FILES}/{target}", abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them; records are left out of the search, where they would come first."""
    if page.file.src_uri.startswith(_RECORDS):
        page.meta["search"] = {"exclude": True}
    source = _source(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        return _rewritten(found, source, page.file.src_uri)

    return _outside_fences(markdown, lambda text: _LINK.sub(link, text))


def _rewritten(found: re.Match[str], source: str, page: str) -> str:
    picture, label, url = found.groups()
    path, hash_, anchor = url.partition("#")
    if not path or "://" in url or url.startswith(("mailto:", "/")):
        return found[0]
    target = _resolved(source, path)
    if (ROOT / target).is_dir():
        return f"{label} (`{target}/`)" if label.strip("`/") != target else label
    place = PUBLISHED.get(target) or (
        target.removeprefix("docs/") if target.startswith("docs/") else f"{_FILES}/{target}"
    )
    return f"{picture}[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{hash_}{anchor})"


def _targets(source: str, markdown: str) -> Iterator[str]:
    for _, _, url in _LINK.findall(_FENCE.sub("", markdown)):
        if "://" not in url and not url.startswith(("#", "mailto:", "/")):
            yield _resolved(source, url.partition("#")[0])


def _resolved(source: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _source(page: str) -> str:
    """The path in the repository of a page's file."""
    return next((source for source, place in PUBLISHED.items() if place == page != "index.md"), f"docs/{page}")


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
