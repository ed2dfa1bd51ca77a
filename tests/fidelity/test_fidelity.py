"""Every row of the table holds, with fewer texts than the table is made with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fidelity.cases import CASES, Case

TEXTS = 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.name}")
def test_the_numbers_are_the_models_numbers(case: Case, tmp_path: Path) -> None:
    figures = case.figures(tmp_path / "model", TEXTS)

    assert figures.pass_, figures
    assert figures.batches < figures.inputs, "every input was a batch of its own, so nothing was shown of batches"
