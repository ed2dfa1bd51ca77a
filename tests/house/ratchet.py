"""Figures of the structure that may fall and must not rise: `limits.json` has the highest value of each.

A change that needs more of one raises it in that file, and its commit gives the reason.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.house.assignments import assignments_from_outside
from tests.house.figures import PACKAGE, imported_by_one_sibling, modules
from tests.house.words import matches

LIMITS = Path(__file__).with_name("limits.json")
_PROTOCOLS = re.compile(r"^## \d+\. Internal protocols$(.*?)^## ", re.MULTILINE | re.DOTALL)


def bounded(root: Path) -> dict[str, int]:
    """The present figures of a checkout."""
    found = modules(root)
    design = (root / "DESIGN.md").read_text()
    return {
        "lines": sum(module.lines for module in found),
        "modules": sum(not module.is_package for module in found),
        "entries": sum(not path.name.startswith(("_", "py.typed")) for path in (root / "src" / PACKAGE).iterdir()),
        "import layers": len(_layers(root)),
        "modules imported by one sibling alone": len(imported_by_one_sibling(found)),
        "assignments from outside": len(assignments_from_outside(found)),
        "internal protocols": _rows(design),
        "words that read as translated": sum(1 for _ in matches(root)),
        "words of DESIGN.md": len(design.split()),
        "lines of DESIGN.md over 120 characters": sum(len(line) > 120 for line in design.splitlines()),
        "modules of tests/support": len([*(root / "tests" / "support").rglob("*.py")]),
    }


def limits() -> dict[str, int]:
    """The highest values that the repository allows."""
    found: dict[str, int] = json.loads(LIMITS.read_text())
    return found


def risen(now: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """A sentence for each figure that is above its limit, or that has none."""
    return [
        f"{name}: {value}, at most {allowed.get(name, 0)} allowed ({LIMITS.name})"
        for name, value in now.items()
        if value > allowed.get(name, 0)
    ]


def lower(now: Mapping[str, int]) -> None:
    """Make the present figures the limits, where they are below them."""
    before = limits()
    kept = {name: min(value, before.get(name, value)) for name, value in now.items()}
    LIMITS.write_text(json.dumps(kept, indent=2) + "\n")


def _layers(root: Path) -> list[str]:
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers: list[str] = next(each["layers"] for each in contracts if each["type"] == "layers")
    return layers


def _rows(design: str) -> int:
    """The rows of the table of internal protocols, less its two lines of header."""
    section = _PROTOCOLS.search(design)
    return len(re.findall(r"^\|", section[1], re.MULTILINE)) - 2 if section else 0
