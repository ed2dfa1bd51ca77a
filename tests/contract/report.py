"""The table of the contract: every clause, and the tests that are marked with it.

A test is marked with `@pytest.mark.clause("M2.4-null", …)`. The files are parsed and not imported: that needs no
model and no GPU.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.clauses import CLAUSES as CONFORMANCE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "contract.md"
SOURCE = Path(__file__).with_name("clauses.toml")

_HEAD = """\
# The contract of tei-manager, clause by clause

<!-- Written by `python -m tests.contract`, which fails when a clause has no test. -->

The clauses are in `tests/contract/clauses.toml`, and each has a test; a test names those that it proves with
`@pytest.mark.clause`. "decided" marks where teimgr does otherwise than the program it stands in for. Cases are those of
[conformance.md](conformance.md).
"""


@dataclass(frozen=True)
class Section:
    """A part of the contract: its clauses by id."""

    title: str
    clauses: Mapping[str, str]


def sections() -> list[Section]:
    """The contract, in its order."""
    return [Section(each["title"], each["clauses"]) for each in _source()["section"]]


def proofs() -> dict[str, list[str]]:
    """The tests and cases that prove each clause; of an unknown clause too, which is a fault."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        for test, clauses in _marks(ast.parse(source)) if "mark.clause" in source else ():
            for clause in clauses:
                found[clause].append(f"{path.relative_to(ROOT / 'tests')}::{test}")
    for clause, cases in _source()["cases"].items():
        found[clause] += [f"case {case}" for case in cases]
    return found


def faults() -> list[str]:
    """What is wrong with the table; nothing, if all is well."""
    known = [clause for section in sections() for clause in section.clauses]
    proved = proofs()
    cases = {case for each in _source()["cases"].values() for case in each}
    return [
        *(f"{clause}: no test" for clause in known if clause not in proved),
        *(f"{clause}: no such clause, but {proved[clause][0]} proves it" for clause in proved if clause not in known),
        *(f"{clause}: told twice" for clause in sorted(set(known)) if known.count(clause) > 1),
        *(f"{case}: no such clause of tests/conformance" for case in sorted(cases - set(CONFORMANCE))),
    ]


def text() -> str:
    """The Markdown file."""
    proved = proofs()
    return _HEAD + "".join(_table(section, proved) for section in sections())


def _table(section: Section, proved: Mapping[str, Sequence[str]]) -> str:
    rows = (
        f"| {clause} | {says} | {'<br>'.join(f'`{each}`' for each in proved.get(clause, ['none']))} |\n"
        for clause, says in section.clauses.items()
    )
    return f"\n## {section.title}\n\n| Clause | Says | Proved by |\n|---|---|---|\n" + "".join(rows)


def _marks(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each function of a module with the clauses of its decorators."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = (each for decorator in node.decorator_list for each in ast.walk(decorator) if _is_mark(each))
            clauses = [argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)]
            if clauses:
                yield node.name, [str(clause) for clause in clauses]


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.clause"


def _source() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(SOURCE.read_text())
