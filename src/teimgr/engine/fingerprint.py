"""What a model makes of known inputs, in a form in which two ways of running it can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from teimgr.engine.batch import Encoded, pack
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import Model

# Of one input, float32 [rows, width] for every output: a vector, the logits, all weights of a vocabulary, or a row for
# each token.
Fingerprint = dict[Output, Tensor]


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far results are from the truth.

    `mean_cosine` and `min_cosine` are over the inputs; that of an input with several rows is their mean, since what
    is made of them adds them up. Hidden states are left out of both: what is made of them counts. `difference` is the
    largest of any two numbers of rows that are scaled to length 1, `score_difference` that of logits, in units of the
    largest true one where that is above 1.
    """

    mean_cosine: float
    min_cosine: float
    difference: float
    score_difference: float


def plainly(model: Model, encoded: Encoded) -> Fingerprint:
    """Of one input, through the library's own forward."""
    return _taken_apart(model.run_plainly(encoded), model.widths, 1)[0]


def together(model: Model, inputs: Sequence[Encoded]) -> list[Fingerprint]:
    """Of all inputs, in one batch."""
    batch = pack(inputs)
    found = _taken_apart(model.run(batch, model.outputs), model.widths, len(inputs))
    at = {source: place for place, source in enumerate(batch.order.tolist())}
    return [found[at[i]] for i in range(len(inputs))]


def compare(results: Sequence[Fingerprint], truth: Sequence[Fingerprint]) -> Closeness:
    """Results that are no numbers are as far off as can be.

    Raises:
        ValueError: an output has another number of rows than it truly has.
    """
    cosines: list[float] = [1.0]
    differences, score_differences = [0.0], [0.0]
    largest_score = max((float(t[Output.SCORES].abs().max()) for t in truth if Output.SCORES in t), default=1.0)
    for ours, theirs in zip(results, truth, strict=True):
        for output, there in theirs.items():
            here = ours[output]
            if here.shape != there.shape:
                raise ValueError(f"{output.value}: {tuple(here.shape)} instead of {tuple(there.shape)}")
            if output is Output.SCORES:
                score_differences.append(_largest(here - there) / max(1.0, largest_score))
            elif len(there):
                unit, true_unit = functional.normalize(here), functional.normalize(there)
                differences.append(_largest(unit - true_unit))
                if output is not Output.TOKENS:
                    cosine = functional.cosine_similarity(here.double(), there.double())
                    cosine = cosine.masked_fill((here == there).all(dim=1), 1.0)  # two of zeros, too
                    cosines.append(float(cosine.nan_to_num(-1.0).mean()))
    known = cosines[1:] or cosines
    return Closeness(sum(known) / len(known), min(known), max(differences), max(score_differences))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(torch.inf).max())


def _taken_apart(rows: dict[Output, Rows], widths: dict[Output, int], inputs: int) -> list[Fingerprint]:
    """A batch's results by input, in the batch's order."""
    return [{output: _one(of, i, widths[output]) for output, of in rows.items()} for i in range(inputs)]


def _one(rows: Rows, i: int, width: int) -> Tensor:
    if rows.offsets is None:
        return rows.values[i : i + 1].float()
    begin, stop = int(rows.offsets[i]), int(rows.offsets[i + 1])
    if rows.indices is None:
        return rows.values[begin:stop].float()
    weights = torch.zeros(1, width, device=rows.values.device)
    weights[0, rows.indices[begin:stop]] = rows.values[begin:stop].float()
    return weights
