"""Charges jobs to their accounts between tokenizer and queue, when their tokens are known and not yet computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from teimgr.engine.batching.queue import QueueEntry
from teimgr.engine.job import Account, Job
from teimgr.errors import TeimgrError

FailedRow = tuple[Job, int, TeimgrError]


@dataclass(slots=True)
class _Held:
    """Tokenized rows of a job that has rows to be tokenized."""

    rows_left: int
    entries: list[QueueEntry] = field(default_factory=list)
    failures: list[FailedRow] = field(default_factory=list)


class Charging:
    """Holds back the rows of a job with an account until the last one is tokenized, then charges all of them at once.

    So a job is computed as a whole or not at all. Used by all threads that tokenize. If another host decides, `wake`
    is called once `take_decided` has the rows.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._held: dict[Job, _Held] = {}
        self._asked: dict[Job, _Held] = {}
        self._decided: list[tuple[Job, _Held]] = []

    @property
    def has_decided(self) -> bool:
        return bool(self._decided)

    def take_decided(self) -> tuple[list[QueueEntry], list[FailedRow], list[Job]]:
        """Like the result of `admit`, of jobs on which another host has decided since."""
        with self._lock:
            decided, self._decided = self._decided, []
        admitted = [held for job, held in decided if job.refused is None]
        return (
            [entry for held in admitted for entry in held.entries],
            [failure for held in admitted for failure in held.failures],
            [job for job, _ in decided if job.refused is not None],
        )

    def admit(
        self, jobs: Sequence[Job], entries: Sequence[QueueEntry], failures: Sequence[FailedRow]
    ) -> tuple[list[QueueEntry], list[FailedRow], list[Job]]:
        """Return those of `entries` and `failures`, rows of `jobs`, that may go on, and the jobs that are refused."""
        ready: list[QueueEntry] = []
        parts: list[QueueEntry] = []
        refused: list[Job] = []
        for entry in entries:
            job = entry.job
            if job.account is None:
                ready.append(entry)
            elif entry.texts != len(job.inputs) or job.cancelled or job.account.decides_later:
                parts.append(entry)
            elif _is_charged(job, entry.tokens, refused):
                ready.append(entry)
        if not parts and not failures:
            return ready, [], refused
        failed = self._admit_parts(dict.fromkeys(jobs), parts, failures, ready, refused)
        return ready, failed, refused

    def _admit_parts(
        self,
        jobs: Collection[Job],
        entries: Sequence[QueueEntry],
        failures: Sequence[FailedRow],
        ready: list[QueueEntry],
        refused: list[Job],
    ) -> list[FailedRow]:
        """`admit` for jobs of which no single entry has all rows; what may go on joins `ready` and the result."""
        charged = {entry.job for entry in entries if not entry.job.cancelled}
        charged |= {job for job, _, _ in failures if job.account is not None and not job.cancelled}
        ready += [entry for entry in entries if entry.job not in charged]
        failed = [failure for failure in failures if failure[0] not in charged]
        with self._lock:
            for job in jobs:
                if job.cancelled:
                    self._held.pop(job, None)
            whole = self._held_with(charged, entries, failures)
        for job, held in whole:
            tokens = sum([entry.tokens for entry in held.entries])
            if job.account is not None and job.account.decides_later:
                self._ask(job, job.account, held, tokens)
            elif _is_charged(job, tokens, refused):
                ready += held.entries
                failed += held.failures
        return failed

    def forget(self, job: Job) -> None:
        """Drop the rows of a job that was cancelled before all of them were tokenized."""
        if job.account is not None:
            with self._lock:
                self._held.pop(job, None)

    def drain(self, error: TeimgrError) -> list[FailedRow]:
        """Remove all rows that are held, as failures with `error`."""
        with self._lock:
            left = [*self._held.items(), *self._asked.items(), *self._decided]
            self._held, self._asked, self._decided = {}, {}, []
        return [
            failure
            for job, held in left
            for failure in (
                *held.failures,
                *((job, row, error) for entry in held.entries for row in entry.rows.tolist()),
            )
        ]

    def _held_with(
        self, jobs: Collection[Job], entries: Sequence[QueueEntry], failures: Sequence[FailedRow]
    ) -> list[tuple[Job, _Held]]:
        """Add rows; the jobs that are complete now, which are held no longer."""
        for job in jobs:
            self._held.setdefault(job, _Held(len(job.inputs)))
        for entry in entries:
            if (held := self._held.get(entry.job)) is not None and entry.job in jobs:
                held.entries.append(entry)
                held.rows_left -= entry.texts
        for failure in failures:
            if (held := self._held.get(failure[0])) is not None and failure[0] in jobs:
                held.failures.append(failure)
                held.rows_left -= 1
        return [(job, self._held.pop(job)) for job in jobs if not self._held[job].rows_left]

    def _ask(self, job: Job, account: Account, held: _Held, tokens: int) -> None:
        """Have another host charge a job."""
        with self._lock:
            self._asked[job] = held
        account.charge(tokens, partial(self._decide, job))

    def _decide(self, job: Job, refusal: TeimgrError | None) -> None:
        with self._lock:
            if (held := self._asked.pop(job, None)) is None:  # the engine was closed
                return
            if refusal is not None:
                job.refuse(refusal)
            self._decided.append((job, held))
        self._wake()


def _is_charged(job: Job, tokens: int, refused: list[Job]) -> bool:
    """Charge a whole job; False where that is refused: then it joins `refused`."""
    assert job.account is not None
    if (error := job.account.charge(tokens)) is None:
        return True
    job.refuse(error)
    refused.append(job)
    return False
