"""What pages name exists: the targets of their links, files, commands in sentences."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.docsite.pages import PAGES, ROOT, anchors, links, name_of, without_blocks

from teimgr.cli.main import COMMANDS, GROUPS


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
    known = [each for each in named if not each.startswith("build/")]  # what the verbs make
    missing = [each for each in known if not any((base / each).exists() for base in (ROOT, ROOT / "src" / "teimgr"))]
    assert missing == []


def test_commands_that_sentences_name_exist() -> None:
    """Inline `teimgr COMMAND`, `dev.py VERB` and `python -m MODULE` of every page, and the flags of the first."""
    verbs = set(re.findall(r'^        "(\w+)": ', (ROOT / "dev.py").read_text(), re.MULTILINE))
    reference = (ROOT / "docs" / "cli.md").read_text() + "--help"
    faults = []
    for page in PAGES:
        if name_of(page) == "CHANGELOG.md":
            continue  # it names what is no more
        for code in re.findall(r"`([^`\n]+)`", without_blocks(page)):
            command = re.match(r"(?:\.venv/bin/)?teimgr ([a-z]+)(?: ([a-z]+))?", code)
            flags = re.findall(r"(?<= )--[a-z-]+", code) if command else []
            names = {command[1], f"{command[1]} {command[2]}"} if command else set()
            if command and (not names & {*COMMANDS, *GROUPS} or any(flag not in reference for flag in flags)):
                faults.append(f"{name_of(page)}: {code}")
            if (verb := re.search(r"dev\.py ([a-z]+)", code)) and verb[1] not in verbs:
                faults.append(f"{name_of(page)}: {code}")
            if (module := re.match(r"(?:\.venv/bin/)?python -m ([\w.]+)", code)) and not is_module(module[1]):
                faults.append(f"{name_of(page)}: {code}")
    assert faults == []


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    source = ROOT.joinpath("src", *name.split("."))
    return any(each.with_suffix(".py").exists() or (each / "__main__.py").exists() for each in (place, source))
