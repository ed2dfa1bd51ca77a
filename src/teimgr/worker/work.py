"""What a call gives the engine: one job, or several where its inputs differ in their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from teimgr.engine.job import InferOptions, Input, Job
from teimgr.worker.calls import Call, Reply, Unwritten

Encode = Callable[[Job], Reply | Unwritten]


class Part(NamedTuple):
    """Inputs that share their options, and their rows in the call."""

    rows: Sequence[int]
    inputs: Sequence[Input]
    options: InferOptions


class Work:
    """The jobs of `call`; `encode` makes its answer of them. Several parts are for scores alone.

    `complete` is for the finisher thread, the rest for the loop's.
    """

    __slots__ = ("_parts", "_unfinished", "call", "encode", "jobs")

    def __init__(self, call: Call, parts: Sequence[Part], encode: Encode) -> None:
        self.call = call
        self.encode = encode
        self.jobs = [Job(part.inputs, part.options, call.lane, call.deadline, context=self) for part in parts]
        self._parts = parts
        self._unfinished = len(parts)

    def cancel(self) -> None:
        """What has not started will not."""
        for job in self.jobs:
            job.cancel()

    def complete(self) -> Job | None:
        """One more job is finished; after the last one, a job with the results of all."""
        self._unfinished -= 1
        if self._unfinished:
            return None
        # Jobs know their work: if it went on knowing them, tables would stay until the cycle collector comes by.
        jobs, self.jobs = self.jobs, []
        return jobs[0] if len(jobs) == 1 else _joined(self._parts, jobs)


def parts_of(inputs: Sequence[Input], options: Sequence[InferOptions]) -> list[Part]:
    """As few parts as there are different options; `options` has one for each input."""
    rows_of: dict[InferOptions, list[int]] = {}
    for row, option in enumerate(options):
        rows_of.setdefault(option, []).append(row)
    return [Part(rows, [inputs[row] for row in rows], option) for option, rows in rows_of.items()]


def _joined(parts: Sequence[Part], jobs: Sequence[Job]) -> Job:
    inputs: list[Input] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        for row, item in zip(part.rows, part.inputs, strict=True):
            inputs[row] = item
    whole = Job(inputs, parts[0].options, jobs[0].lane)
    whole.scores = np.zeros((len(inputs), jobs[0].scores.shape[1]), np.float32)
    for part, job in zip(parts, jobs, strict=True):
        whole.scores[part.rows] = job.scores
        whole.errors |= {part.rows[row]: error for row, error in job.errors.items()}
        served = len(job.inputs) - len(job.errors)
        whole.tokens += job.tokens
        whole.tokenization_ns += job.tokenization_ns * served
        whole.queue_ns += job.queue_ns * served
        whole.inference_ns += job.inference_ns * served
    whole.average_times()
    return whole
