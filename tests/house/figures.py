"""Static figures of a checkout: modules, functions, names that repeat, tests that mirror the source.

Generated code (`src/teimgr/wire/pb`) does not count. Lines are lines of the file, blank ones and comments among them; a
function's length is from its `def` to its last line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

PACKAGE = "teimgr"


@dataclass(frozen=True)
class SourceModule:
    """One module: its dotted name, its file and its syntax tree."""

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return nodes_of(self.tree)

    @property
    def is_package(self) -> bool:
        """Whether it is a package's `__init__` or `__main__`, which every package may have."""
        return self.path.stem in ("__init__", "__main__")


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """The nodes of a tree in the order of `ast.walk`, which takes three times as long."""
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
    return found


def modules(root: Path) -> list[SourceModule]:
    """All modules below `root`/src/teimgr, generated ones left out."""
    found = []
    for path in sorted((root / "src" / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root / "src")
        if "pb" not in relative.parts:
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text()
            found.append(SourceModule(name, path, len(text.splitlines()), ast.parse(text)))
    return found


def function_lengths(found: list[SourceModule]) -> list[int]:
    """Lines of every function and method."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in found
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def imported_by(found: list[SourceModule]) -> Mapping[str, set[str]]:
    """For each module those that import it or a name of it."""
    names = {module.name for module in found}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in found:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    importers[full if full in names else node.module].add(module.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(module.name)
    return importers


def imported_by_one_sibling(found: list[SourceModule]) -> list[str]:
    """Modules that one module of the same package imports, and no other."""
    importers = imported_by(found)
    alone = []
    for module in found:
        by = importers[module.name]
        if not module.is_package and len(by) == 1:
            package = module.name.rpartition(".")[0]
            importer = next(iter(by))
            if importer == package or importer.rpartition(".")[0] == package:
                alone.append(module.name)
    return alone


def repeated_base_names(found: list[SourceModule]) -> Mapping[str, list[str]]:
    """Base names that several modules have."""
    return _repeated((module.path.stem, module.name) for module in found if not module.is_package)


def repeated_class_names(found: list[SourceModule]) -> Mapping[str, list[str]]:
    """Names that several public classes have."""
    return _repeated(
        (node.name, module.name)
        for module in found
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def _repeated(pairs: Iterator[tuple[str, str]]) -> Mapping[str, list[str]]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, where in pairs:
        by_name[name].append(where)
    return {name: where for name, where in sorted(by_name.items()) if len(where) > 1}


def mirrored(root: Path, found: list[SourceModule]) -> list[str]:
    """Modules with a test at their own path: tests/a/test_b.py for src/teimgr/a/b.py."""
    names = []
    for module in found:
        relative = module.path.relative_to(root / "src" / PACKAGE)
        if (root / "tests" / relative.with_name(f"test_{relative.name}")).exists():
            names.append(module.name)
    return names


def table(root: Path) -> dict[str, str]:
    """All figures, by what they measure."""
    found = modules(root)
    lengths = sorted(function_lengths(found))
    lines = {module.name: module.lines for module in found}
    longest = max(lines, key=lines.__getitem__)
    tests = list((root / "tests").rglob("test_*.py"))
    return {
        "lines of a module, median": f"{median(module.lines for module in found if not module.is_package):.0f}",
        "longest module": f"{lines[longest]} ({longest})",
        "lines of a function, p50 and p95": f"{median(lengths):.0f} and {quantiles(lengths, n=20)[-1]:.0f}",
        "repeated base names": str(len(repeated_base_names(found))),
        "repeated names of public classes": str(len(repeated_class_names(found))),
        "modules with a test at their path": str(len(mirrored(root, found))),
        "test files": str(len(tests)),
    }
