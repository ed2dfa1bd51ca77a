"""One row measured, in the process that calls it."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.fidelity.figures import Matrix, between_scores, between_vectors
from tests.fidelity.measure import Asker

from bench.families.lists import LISTS, scores
from bench.families.probes import probes
from bench.families.references import st_dense
from bench.families.row import Reference, Row
from bench.families.senses import picture_files, taken
from bench.families.sounds import sound_files
from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Output
from teimgr.errors import EmptyInput, TeimgrError

MIN_COSINE = {"float32": 0.99999, "bfloat16": 0.99, "int8": 0.98}
"""By precision; of those below float32 what the gate at load allows of a type that a request names."""
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.1}
"""Of scores, relative to the largest where that is above 1; between a text alone and in a batch, 1e-5."""
_MAX_ALONE = 1e-5
_PROMPT = "query: "


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found of a row: `state` is "exact" ("near" below float32), "wrong", "refused" or "failed", `how` one of
    "native", "packed", "torch" and "table", `reason` why it is neither. `auto` is the type that `auto` takes, where
    bfloat16 is asked for.
    """

    state: str
    how: str = ""
    cosine: float | None = None
    difference: float | None = None
    alone: float | None = None
    inputs: int = 0
    reason: str = ""
    auto: str = ""


def tried(row: Row, folder: Path, dtype: str = "float32") -> Outcome:
    """Make the model in `folder`, serve it in `dtype`, and compare; never raises."""
    import torch

    torch.set_num_threads(1)
    try:
        reference = row.make(folder) or row.reference
        assert reference is not None, f"{row.key} has no reference"
        passes = [(row.asked, reference)]
        if row.reference is st_dense and not row.asked:
            passes.append(({"prompt": _PROMPT}, partial(st_dense, prompt=_PROMPT)))
    except Exception:
        return Outcome("failed", reason=f"the layout cannot be made: {traceback.format_exc(limit=-2)}")
    try:
        options = _options(row, dtype)
        Engine.load(EngineOptions(path=folder, model_id=folder.name, threads=1, **options), list).close(1.0)
    except TeimgrError as refusal:
        return Outcome("refused", reason=refusal.message.replace(str(folder), folder.name))
    try:
        outputs = frozenset({row.output})
        found = [_compared(row, folder, dtype, InferOptions(outputs, **asked), truth) for asked, truth in passes]
        return replace(_worst(found), auto=_auto(row, folder) if dtype == "bfloat16" else "")
    except Exception:
        return Outcome("failed", reason=traceback.format_exc(limit=-3))


def _options(row: Row, dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, **row.engine_options}


def _auto(row: Row, folder: Path) -> str:
    engine = Engine.load(EngineOptions(path=folder, model_id=folder.name, threads=1, **_options(row, "auto")), list)
    try:
        return engine.info.dtype
    finally:
        engine.close(1.0)


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    """That which is wrong, or farthest off."""
    return max(outcomes, key=lambda outcome: (outcome.state == "wrong", outcome.difference or 0.0))


def _compared(row: Row, folder: Path, dtype: str, options: InferOptions, reference: Reference) -> Outcome:
    inputs: Sequence[Any] = LISTS if row.reads_lists else probes(row.longest, row.takes_pairs)
    if row.has_images or row.only_images:
        inputs = [*picture_files(), *([] if row.only_images else inputs)]
    if row.has_sounds:
        inputs = [*sound_files(), *inputs]
    inputs = [*row.also, *inputs]
    theirs = reference(folder, inputs)
    asker = Asker(folder, _options(row, dtype), width=theirs[0].shape[-1])
    engine = asker.engine
    if row.has_sounds:
        inputs = [engine.sound(one) if isinstance(one, bytes) else one for one in inputs]
    else:
        inputs = [taken(engine, one) for one in inputs]
    try:
        if row.reads_lists:
            together, alone = scores(asker, inputs), [found for one in inputs for found in scores(asker, [one])]
        else:
            if isinstance(asker.answer(inputs[-1:], options).errors.get(0), EmptyInput):
                inputs, theirs = inputs[:-1], theirs[:-1]  # no token: refused as an empty input, never served
            together = asker.in_random_jobs(inputs, options, random.Random(0))
            alone = [found for item in inputs for found in asker.ask([item], options)]
        how = _how(asker)
    finally:
        asker.engine.close(1.0)
    cosine, difference = _distance(row, together, theirs)
    is_close = difference <= MAX_DIFFERENCE[dtype] if cosine is None else cosine >= MIN_COSINE[dtype]
    apart = max(_apart(one, other) for one, other in zip(together, alone, strict=True))
    words = "" if is_close else "differs from its reference"
    if apart > _MAX_ALONE:
        words = f"a text alone differs from itself in a batch by {apart:.1e}"
    right = "exact" if dtype == "float32" else "near"
    return Outcome("wrong" if words else right, how, cosine, difference, apart, len(inputs), words)


def _distance(row: Row, ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[float | None, float]:
    """The lowest cosine and the largest difference of vectors; None, and that of scores."""
    found = (between_scores if row.output is Output.SCORES else between_vectors)(ours, theirs)
    return found.cosine, found.difference


def _how(asker: Asker) -> str:
    info = asker.engine.info
    if info.attention == "none":
        return "table"
    if info.forward == "native":
        return "native"
    return "packed" if info.batching == "packed" else "torch"


def _apart(ours: Matrix, theirs: Matrix) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max(initial=0.0) / max(1.0, np.abs(theirs).max(initial=0.0)))
