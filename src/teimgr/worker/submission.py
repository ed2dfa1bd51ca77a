"""The engine jobs of one call of a worker, one for each set of options of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from teimgr.engine.job import Account, InferOptions, Input, Job, Lane
from teimgr.worker.calls import CallReply, DeferredReply, WorkerCall

Encode = Callable[[Job], CallReply | DeferredReply]


class Part(NamedTuple):
    """Inputs that share their options, and their rows in the call."""

    rows: Sequence[int]
    inputs: Sequence[Input]
    options: InferOptions


def parts_of(inputs: Sequence[Input], options: Sequence[InferOptions]) -> list[Part]:
    """One part for each different set of options; `options` has one for each input."""
    rows_of: dict[InferOptions, list[int]] = {}
    for row, option in enumerate(options):
        rows_of.setdefault(option, []).append(row)
    return [Part(rows, [inputs[row] for row in rows], option) for option, rows in rows_of.items()]


class Submission:
    """The engine jobs of one call, one per part. `complete` runs where the engine finishes, all else on the loop.

    Several parts are supported only for the SCORES output. `has_waited`: it queued for admission, or its inputs
    were read, after its wait was estimated, so that this is estimated again. `result_bytes`: of what the jobs keep
    until they are answered, None if it is to be estimated from their inputs.
    """

    __slots__ = ("_unfinished", "accounts", "call", "encode", "has_waited", "jobs", "parts", "result_bytes")

    def __init__(self, call: WorkerCall, parts: Sequence[Part], encode: Encode, *, has_waited: bool = False) -> None:
        self.call = call
        self.encode = encode
        self.has_waited = has_waited
        self.result_bytes: int | None = None
        self.jobs = [
            Job(part.inputs, part.options, call.lane, call.deadline, context=self, tenant=call.tenant) for part in parts
        ]
        self.accounts: tuple[Account, ...] = ()
        self.parts = parts
        self._unfinished = len(parts)

    def wait(self) -> None:
        self.has_waited = True

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    def charge_to(self, job: Job, account: Account) -> None:
        """Charge one of its jobs."""
        self.accounts += (account,)
        job.charge_to(account)

    def settle(self) -> None:
        """The call is over: what was not taken into a batch is refunded."""
        for account in self.accounts:
            account.settle(None)

    def complete(self) -> Job | None:
        """Count one finished job; after the last one, a job with the results of all."""
        self._unfinished -= 1
        if self._unfinished:
            return None
        # A job refers to its submission: a cycle would keep results in memory until the next garbage collection.
        jobs, self.jobs = self.jobs, []
        return jobs[0] if len(jobs) == 1 else _joined(self.parts, jobs)


def job_of(parts: Sequence[Part], lane: Lane) -> Job:
    """A job with all inputs of a call, in their rows, to be filled with results."""
    inputs: list[Input] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        for row, item in zip(part.rows, part.inputs, strict=True):
            inputs[row] = item
    return Job(inputs, parts[0].options, lane)


def _joined(parts: Sequence[Part], jobs: Sequence[Job]) -> Job:
    whole = job_of(parts, jobs[0].lane)
    for part, job in zip(parts, jobs, strict=True):
        whole.take_scores(job, part.rows)
    whole.average_times()
    return whole
