"""Rows of the table hold, with fewer texts than the table is made with.

`python -m bench fidelity` measures all of them; here are the real model and, of every kind, the cases farthest apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.cases import CASES, Case

TEXTS = 30


def some(cases: tuple[Case, ...]) -> list[Case]:
    """The first, the middle one and the last of every kind, and the real weights."""
    kinds = dict.fromkeys(case.row for case in cases)
    of_kind = [[case for case in cases if case.row == kind] for kind in kinds]
    chosen = [case for found in of_kind for case in (found[0], found[len(found) // 2], found[-1])]
    return list({id(case): case for case in chosen}.values())


@pytest.mark.parametrize("case", some(CASES), ids=lambda case: f"{case.row}: {case.name}")
def test_the_numbers_are_the_models_numbers(case: Case, tmp_path: Path) -> None:
    figures = case.figures(tmp_path / "model", TEXTS)

    assert figures.pass_, figures
    assert figures.batches < figures.inputs, "every input was a batch of its own, so nothing was shown of batches"
