"""A change of the space or of the vectors of a model of any kind is in CHANGELOG.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.golden import FILE, MAKERS, digest, golden

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
TOLERANCE = 1e-3  # far above what a CPU's order of additions changes, far below another vector


def known() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(FILE.read_text())
    return found


@pytest.mark.parametrize("kind", MAKERS)
def test_a_fixed_model_has_the_golden_space_and_vectors(kind: str) -> None:
    found, expected = golden(kind), known()[kind]
    assert found.pop("space") == expected.pop("space"), "python -m tests.engine.golden, and say it in CHANGELOG.md"
    assert found.keys() == expected.keys()
    for output, numbers in found.items():
        assert numbers == pytest.approx(expected[output], abs=TOLERANCE), output


def test_the_changelog_names_the_golden_spaces() -> None:
    assert set(known()) == set(MAKERS)
    assert digest(known()) in CHANGELOG.read_text(), "the golden spaces have changed: say in CHANGELOG.md what for whom"
