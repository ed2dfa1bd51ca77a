"""How far every kind of model is from the library it was made with, in each precision: no speed, only numbers."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fidelity.cases import CASES, Case
from tests.fidelity.figures import LIMITS, REAL_WEIGHTS_LIMITS, Figures

from bench import report
from bench.families import command
from bench.progress import partial, say
from teimgr.errors import TeimgrError

HEADER = (
    *("kind: model", "dtype", "forward", "inputs", "tokens", "batches", "batching", "lowest cosine", "mean"),
    *("difference", "alone", "bit for bit", "holds"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this scenario."""
    parser.add_argument("--texts", type=int, default=200, help="inputs per case, of 1 to more than the longest length")
    parser.add_argument("--only", default="", help="only cases whose kind or name has this in it")
    parser.add_argument(
        "--families",
        action="store_true",
        help="the catalogue of families instead, each layout as the hub has it; writes docs/models.md (some five "
        "minutes); --only is of a row's key",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(LIMITS),
        default=["float32"],
        help="precisions to serve each case in (float32); one that this CPU or the model does not have is in the "
        "result with the reason",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 where a case does not hold."""
    if options.families:
        return command.run(options.only, options.dtype)
    found: list[tuple[Case, str, Figures | TeimgrError]] = []
    with partial():
        for case in (case for case in CASES if options.only in f"{case.row}: {case.name}"):
            found += [(case, *figures) for figures in _measured(case, options.texts, options.dtype)]
            say(f"{case.row}: {case.name}: {_summary(found, case)}")
    measured = [(case, dtype, figures) for case, dtype, figures in found if isinstance(figures, Figures)]
    facts = {
        "reference": "sentence-transformers or transformers on the same files, float32, whatever dtype is measured",
        "difference": "largest absolute one, of unit vectors or of scores",
        "alone": "the same input by itself against its random batches in the same dtype, as a part of the largest "
        "number where that is above 1; bit for bit where that is 0",
        **{f"limits of {dtype}": _limits(dtype) for dtype in options.dtype},
        **{f"not bit for bit in {dtype}": _not_bit_for_bit(measured, dtype) for dtype in options.dtype},
        **{f"not served in {dtype}": refused for dtype in options.dtype if (refused := _refused(found, dtype))},
        "command": f"python -m bench fidelity --texts {options.texts} --dtype {' '.join(options.dtype)}",
    }
    data = {"cases": [_record(*each) for each in found]}
    report.publish("fidelity", facts, HEADER, [_line(*each) for each in measured], data)
    return 0 if measured and all(figures.pass_ for _, _, figures in measured) else 1


def _measured(case: Case, texts: int, dtypes: Sequence[str]) -> list[tuple[str, Figures | TeimgrError]]:
    with tempfile.TemporaryDirectory() as folder:
        return list(case.figures(Path(folder) / "model", texts, dtypes=dtypes).items())


def _summary(found: Sequence[tuple[Case, str, Figures | TeimgrError]], case: Case) -> str:
    words = []
    for dtype, figures in ((dtype, figures) for of, dtype, figures in found if of is case):
        if isinstance(figures, Figures):
            words.append(f"{dtype} {'holds' if figures.pass_ else 'DOES NOT HOLD'}")
        else:
            words.append(f"{dtype} is refused")
    return ", ".join(words)


def _limits(dtype: str) -> str:
    of, real = LIMITS[dtype], REAL_WEIGHTS_LIMITS[dtype]
    words = f"lowest cosine {of.cosine}"
    if real.cosine != of.cosine or real.mean_cosine != of.mean_cosine:
        words += f" (real weights: lowest {real.cosine}, mean {real.mean_cosine})"
    if of.difference < 1:
        words += f", difference of unit vectors {of.difference:g}"
    words += f", of scores {of.score_difference:g}, alone {of.alone:g}"
    if of.by_library is not None:
        words += f"; where the forward is the model's own code in torch, lowest cosine {of.by_library.cosine}"
        words += f", scores {of.by_library.score_difference:g}, as the gate allows a type that is asked for"
    return words


def _not_bit_for_bit(measured: Sequence[tuple[Case, str, Figures]], dtype: str) -> str:
    """The cases of a dtype whose numbers alone differ from those in a batch, with the largest difference."""
    differ = [
        f"{case.row}, {case.name} ({figures.forward} forward): {figures.alone.difference:.1e}"
        for case, of, figures in measured
        if of == dtype and not figures.is_bit_for_bit
    ]
    count = sum(of == dtype for _, of, _ in measured)
    return f"{len(differ)} of {count}" + ("" if not differ else f": {'; '.join(differ)}")


def _refused(found: Sequence[tuple[Case, str, Figures | TeimgrError]], dtype: str) -> str:
    return "; ".join(
        f"{case.row}, {case.name}: {refusal}"
        for case, of, refusal in found
        if of == dtype and not isinstance(refusal, Figures)
    )


def _line(case: Case, dtype: str, figures: Figures) -> list[Any]:
    cosine, mean = figures.reference.cosine, figures.reference.mean_cosine
    return [
        f"{case.row}: {case.name}",
        dtype,
        figures.forward,
        figures.inputs,
        figures.tokens,
        figures.batches,
        figures.batching,
        None if cosine is None else f"{cosine:.8f}",
        None if mean is None else f"{mean:.8f}",
        f"{figures.reference.difference:.1e}",
        f"{figures.alone.difference:.1e}",
        "yes" if figures.is_bit_for_bit else "no",
        "yes" if figures.pass_ else "NO",
    ]


def _record(case: Case, dtype: str, figures: Figures | TeimgrError) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": case.row, "model": case.name, "dtype": dtype}
    if not isinstance(figures, Figures):
        return record | {"refused": str(figures)}
    return record | {
        "forward": figures.forward,
        "inputs": figures.inputs,
        "tokens": figures.tokens,
        "batches": figures.batches,
        "batching": figures.batching,
        "lowest_cosine": figures.reference.cosine,
        "mean_cosine": figures.reference.mean_cosine,
        "difference": figures.reference.difference,
        "difference_alone": figures.alone.difference,
        "bit_for_bit": figures.is_bit_for_bit,
        "holds": figures.pass_,
    }
