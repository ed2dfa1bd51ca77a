"""The limit of workers' resident memory (`max_rss_mib`): decides when a replica above it is replaced.

A pure function of readings and time. A replica is replaced after `READINGS` readings in a row above the limit, and not
again within `PAUSE_S`. A replica above it right after its start is not replaced, since the next would be as large.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from teimgr.control.ledger.system_memory import mib

READINGS = 3
"""Readings in a row, taken with the health probes: a peak of one large batch is not a leak."""
PAUSE_S = 600.0
"""Seconds between two replacements of a replica: each loads a model, and takes memory for two."""
_MIB = 2**20


class Verdict(Enum):
    """The decision about a replica."""

    REPLACE = auto()
    TOO_LARGE = auto()  # an alarm: its model alone takes more


@dataclass(slots=True)
class _Replica:
    above: int = 0  # readings in a row
    problem: str | None = None  # while it is too large
    not_before: float = float("-inf")


class MemoryLimit:
    """Judges the replicas of one instance, by their numbers."""

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}

    def read(self, number: int, resident_bytes: int, limit_mib: int, now: float, *, fresh: bool) -> Verdict | None:
        """Judge a reading of a replica's resident memory; `fresh`: the worker has just passed its first self-test.

        REPLACE is repeated at each reading until `begin_pause`; TOO_LARGE is returned once per worker.
        """
        replica = self._replicas.setdefault(number, _Replica())
        if fresh:
            replica.above, replica.problem = 0, None
        if resident_bytes <= limit_mib * _MIB:
            replica.above, replica.problem = 0, None
            return None
        replica.above += 1
        if fresh:
            replica.problem = f"{mib(resident_bytes)} right after its start, more than max_rss_mib = {limit_mib}"
            return Verdict.TOO_LARGE
        is_due = replica.above >= READINGS and replica.problem is None and now >= replica.not_before
        return Verdict.REPLACE if is_due else None

    def begin_pause(self, number: int, now: float) -> None:
        """Note that the replica is being replaced."""
        self._replicas[number].not_before = now + PAUSE_S

    def problems(self, numbers: Collection[int]) -> list[str]:
        """Return sentences about those of these replicas whose model alone is too large."""
        found = ((number, self._replicas[number].problem) for number in numbers if number in self._replicas)
        return [
            f"replica {number} has {problem}: it is not replaced, as the next one would be as large"
            for number, problem in found
            if problem
        ]
