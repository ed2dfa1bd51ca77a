"""DESIGN.md, the other documents and the docstrings name files that exist; DESIGN.md's map has every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "teimgr"
DESIGN = (ROOT / "DESIGN.md").read_text()
DOCUMENTS = ("*.md", "docs/**/*.md", "deploy/*.md", "bench/*.md", "proto/*.md", "src/teimgr/**/*.py")
NAMED = sorted(set(re.findall(r"`([\w./-]+?(?:\.py|/))`", DESIGN)))


def test_the_design_is_short() -> None:
    assert len(DESIGN.split()) <= 6000
    assert [line for line in DESIGN.splitlines() if len(line) > 120] == []


def test_design_names_files() -> None:
    assert len(NAMED) > 60


@pytest.mark.parametrize("name", NAMED)
def test_every_named_file_exists(name: str) -> None:
    base = ROOT if name.startswith(("tests/", "bench/", "docs/")) else SOURCE
    assert (base / name).exists() or (ROOT / name).exists()


def test_documents_and_docstrings_name_files_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for pattern in DOCUMENTS
        for path in ROOT.glob(pattern)
        for name in re.findall(r"`((?:[a-z_]+/)+[\w.-]+\.(?:py|toml|service))\b", path.read_text())
        if not name.startswith("state/")  # what a daemon makes
        and not any((base / name).exists() for base in (ROOT, SOURCE, ROOT / "tests"))
    ]
    assert missing == []


def test_every_package_and_module_of_the_top_level_is_on_the_map() -> None:
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    modules = {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    assert packages | modules <= set(NAMED)


def test_every_command_of_a_process_is_a_module() -> None:
    for module in re.findall(r"`python -m teimgr\.([\w.]+)`", DESIGN):
        path = SOURCE.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_every_decision_has_its_parts_and_is_in_the_index() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    index = (ROOT / "docs/decisions/index.md").read_text()
    head = r"# \d{4}\. .+\n\nDate: \d{4}-\d\d-\d\d\n"
    parts = r"\n\*\*Context\.\*\* .+\n\*\*Decision\.\*\* .+\n\*\*Measured\.\*\* .+\n\*\*Revisit when\.\*\* .+"
    shape = re.compile(head + parts, re.DOTALL)

    assert [page.name for page in pages if not shape.fullmatch(page.read_text())] == []
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    assert re.findall(r"\]\((0\d{3}-[\w-]+\.md)\)", index) == [page.name for page in pages]


def test_the_threat_models_findings_have_tests_that_exist() -> None:
    _, section = (ROOT / "docs/threat-model.md").read_text().split("## Attacks that are tested")
    section = section.partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", section)
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| S")]

    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []
    assert {row[0].strip("| ") for row in rows} == {f"S{number}" for number in range(1, 22)}
    assert all("::test_" in row[-1] for row in rows)


def test_a_package_lists_only_modules_that_it_has() -> None:
    """Some packages list their modules in the docstring, with two spaces or more before what each is for."""
    missing = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.glob("**/__init__.py")
        for names in re.findall(r"^ *((?:[a-z_0-9]+/?(?:, )?)+),? {2,}\S", docstring_of(path), re.MULTILINE)
        for name in names.split(", ")
        if not (path.parent / f"{name}.py").exists() and not (path.parent / name).is_dir()
    ]
    assert missing == []


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""
