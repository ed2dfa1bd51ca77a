"""A case measured: the engine on one side, in random batches and alone, the reference on the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Input, Job, Lane, Output
from tests.fidelity.figures import LIMITS, Distance, Figures, Limits, Matrix, between_scores, between_vectors

_WAIT_S = 120.0
_LARGEST_JOB = 24


def measure(
    path: Path,
    inputs: Sequence[Input],
    theirs: Sequence[Matrix],
    output: Output,
    *,
    dtype: str = "float32",
    limits: Limits = LIMITS["float32"],
    engine_options: dict[str, Any] | None = None,
    infer_options: dict[str, Any] | None = None,
    seed: int = 0,
) -> Figures:
    """Serve `path` in `dtype` and compare its `output` for `inputs` with `theirs`, one matrix per input.

    Raises:
        InvalidConfig, ModelLoadFailed: the model is not served in `dtype`.
    """
    asker = Asker(path, {"dtype": dtype, **(engine_options or {})}, width=theirs[0].shape[-1])
    try:
        options = InferOptions(outputs=frozenset({output}), **(infer_options or {}))
        before = asker.engine.stats()
        together = asker.in_random_jobs(inputs, options, random.Random(seed))
        after = asker.engine.stats()
        alone = [row for item in inputs for row in asker.ask([item], options)]
        forward = asker.engine.info.forward
        between = between_scores if output is Output.SCORES else between_vectors
        return Figures(
            inputs=len(inputs),
            tokens=after.tokens - before.tokens,
            batches=after.batches - before.batches,
            batching=asker.engine.info.batching,
            reference=between(together, theirs),
            alone=between_scores(together, alone) if output is Output.SCORES else _apart(together, alone),
            forward=forward,
            limits=(forward == "library" and limits.by_library) or limits,
        )
    finally:
        asker.engine.close(1.0)


def _apart(together: Sequence[Matrix], alone: Sequence[Matrix]) -> Distance:
    """The largest difference of a row."""
    return Distance(None, max(_difference(a, b) for a, b in zip(together, alone, strict=True)))


def _difference(ours: Matrix, theirs: Matrix) -> float:
    """The largest one, as a part of the largest number where that is above 1: hidden states have no length of 1."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max(initial=0.0) / max(1.0, np.abs(theirs).max(initial=0.0)))


class Asker:
    """An engine and the jobs it delivered. `width`: the number of entries of a sparse vector."""

    def __init__(self, path: Path, options: dict[str, Any], width: int) -> None:
        self.width = width
        self._arrived = threading.Condition()
        self._delivered: set[Job] = set()
        self.engine = Engine.load(EngineOptions(path=path, model_id=path.name, threads=1, **options), self._take)

    def ask(self, inputs: Sequence[Input], options: InferOptions) -> list[Matrix]:
        return self._results(self._send(inputs, options, Lane.INTERACTIVE))

    def answer(self, inputs: Sequence[Input], options: InferOptions) -> Job:
        """The finished job, whatever its errors."""
        return self._finished(self._send(inputs, options, Lane.INTERACTIVE))

    def in_random_jobs(self, inputs: Sequence[Input], options: InferOptions, dice: random.Random) -> list[Matrix]:
        """All at once, in jobs of random sizes and lanes whose rows come in random order."""
        order = list(range(len(inputs)))
        dice.shuffle(order)
        jobs: list[tuple[list[int], Job]] = []
        while order:
            rows = [order.pop() for _ in range(min(len(order), dice.randint(1, _LARGEST_JOB)))]
            jobs.append((rows, self._send([inputs[row] for row in rows], options, dice.choice(list(Lane)))))
        results: dict[int, Matrix] = {}
        for rows, job in jobs:
            results.update(zip(rows, self._results(job), strict=True))
        return [results[row] for row in range(len(inputs))]

    def _send(self, inputs: Sequence[Input], options: InferOptions, lane: Lane) -> Job:
        job = Job(inputs, options, lane)
        self.engine.submit(job)
        return job

    def _finished(self, job: Job) -> Job:
        with self._arrived:
            assert self._arrived.wait_for(lambda: job in self._delivered, _WAIT_S), "the job was never delivered"
        return job

    def _results(self, job: Job) -> list[Matrix]:
        self._finished(job)
        assert not job.errors, job.errors
        (output,) = job.options.outputs
        if output is Output.DENSE:
            return [row[None, :] for row in job.vectors]
        if output is Output.SCORES:
            return list(job.scores)
        if output is Output.SPARSE:
            return [self._full(vector) for vector in job.sparse]
        ragged = job.tokens_of if output is Output.TOKENS else job.multi_vectors
        return [rows for rows in ragged if rows is not None]

    def _full(self, vector: Any) -> Matrix:
        """A sparse vector with its zeros, [1, vocabulary]."""
        full = np.zeros((1, self.width), dtype=np.float32)
        full[0, vector.indices] = vector.values
        return full

    def _take(self, jobs: list[Job]) -> None:
        with self._arrived:
            self._delivered.update(jobs)
            self._arrived.notify_all()
