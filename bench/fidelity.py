"""How far every kind of model is from the library it was made with: no speed, only numbers."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.fidelity.cases import CASES, Case
from tests.fidelity.figures import MAX_ALONE_DIFFERENCE, MAX_DIFFERENCE, MAX_SCORE_DIFFERENCE, MIN_COSINE, Figures

from bench import report
from bench.progress import partial, say

HEADER = ("kind: model", "inputs", "tokens", "batches", "batching", "lowest cosine", "difference", "alone", "holds")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this scenario."""
    parser.add_argument("--texts", type=int, default=200, help="inputs per case, of 1 to more than the longest length")
    parser.add_argument("--only", default="", help="only cases whose kind or name has this in it")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 where a case does not hold."""
    found: list[tuple[Case, Figures]] = []
    with partial():
        for case in (case for case in CASES if options.only in f"{case.row}: {case.name}"):
            found.append((case, _measured(case, options.texts)))
            say(f"{case.row}: {case.name}: {'holds' if found[-1][1].pass_ else 'DOES NOT HOLD'}")
    facts = {
        "reference": "sentence-transformers or transformers on the same files, float32",
        "difference": f"largest absolute one, of unit vectors (limit {MAX_DIFFERENCE}) or of scores (limit "
        f"{MAX_SCORE_DIFFERENCE}); lowest cosine at least {MIN_COSINE}",
        "alone": f"the same input by itself against its random batches, as a part of the largest number where that is "
        f"above 1 (limit {MAX_ALONE_DIFFERENCE})",
        "command": f"python -m bench fidelity --texts {options.texts}",
    }
    data = {"cases": [_record(case, figures) for case, figures in found]}
    report.publish("fidelity", facts, HEADER, [_line(case, figures) for case, figures in found], data)
    return 0 if all(figures.pass_ for _, figures in found) else 1


def _measured(case: Case, texts: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return case.figures(Path(folder) / "model", texts)


def _line(case: Case, figures: Figures) -> list[Any]:
    cosine = figures.reference.cosine
    return [
        f"{case.row}: {case.name}",
        figures.inputs,
        figures.tokens,
        figures.batches,
        figures.batching,
        None if cosine is None else f"{cosine:.8f}",
        f"{figures.reference.difference:.1e}",
        f"{figures.alone.difference:.1e}",
        "yes" if figures.pass_ else "NO",
    ]


def _record(case: Case, figures: Figures) -> dict[str, Any]:
    return {
        "kind": case.row,
        "model": case.name,
        "inputs": figures.inputs,
        "tokens": figures.tokens,
        "batches": figures.batches,
        "batching": figures.batching,
        "lowest_cosine": figures.reference.cosine,
        "difference": figures.reference.difference,
        "difference_alone": figures.alone.difference,
        "holds": figures.pass_,
    }
