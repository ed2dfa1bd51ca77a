"""What tenants have used: totals by key and model, added up from the counters of workers, each exactly once.

Pure: totals and rows in, totals out. A worker's counters are remembered as they were last seen, and are moved to the
totals when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from teimgr.wire.tenants.table import Counter, RowCounts

_NONE = (0,) * len(Counter)


class UsageKey(NamedTuple):
    """Whose calls, and of what: the name of an API key, "" without one, instance and model."""

    key: str
    instance: str
    model: str


Counts = tuple[int, ...]
"""By `Counter`."""


@dataclass(slots=True)
class UsageTotals:
    """`ended` has the counts of workers that have ended, `running` by generation those of live workers, and
    `moved` the generations of which the row was not yet cleared."""

    ended: dict[UsageKey, Counts] = field(default_factory=dict)
    running: dict[int, dict[UsageKey, Counts]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def see(self, rows: Iterable[tuple[RowCounts, bool]], names: Mapping[int, str]) -> None:
        """Take the counters of all rows; those of workers that have ended, True, are moved to the totals.

        `names` are those of the tenants by number. A worker whose row is gone has ended too.
        """
        present = {row.generation: (row, has_ended) for row, has_ended in rows}
        self.moved &= present.keys()
        for generation, (row, has_ended) in present.items():
            if generation in self.moved:
                continue
            self.running[generation] = {
                UsageKey(names.get(tenant, ""), row.instance, row.model): counts
                for tenant, counts in row.counts.items()
            }
            if has_ended:
                self._move(generation)
                self.moved.add(generation)
        for generation in self.running.keys() - present.keys():
            self._move(generation)

    def by_key(self) -> dict[UsageKey, Counts]:
        """The totals up to now."""
        found = dict(self.ended)
        for counts in self.running.values():
            _add(found, counts)
        return found

    def _move(self, generation: int) -> None:
        _add(self.ended, self.running.pop(generation))

    def to_dict(self) -> dict[str, Any]:
        return {
            "ended": _rows(self.ended),
            "running": {str(generation): _rows(counts) for generation, counts in self.running.items()},
            "moved": sorted(self.moved),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UsageTotals:
        """The inverse of `to_dict`; raises KeyError, TypeError, ValueError for anything else."""
        running = {int(generation): _of_rows(rows) for generation, rows in values["running"].items()}
        return cls(_of_rows(values["ended"]), running, {int(generation) for generation in values["moved"]})


def _add(totals: dict[UsageKey, Counts], more: Mapping[UsageKey, Counts]) -> None:
    for key, counts in more.items():
        totals[key] = tuple(a + b for a, b in zip(totals.get(key, _NONE), counts, strict=True))


def _rows(counts: Mapping[UsageKey, Counts]) -> list[list[Any]]:
    return [[*key, *numbers] for key, numbers in counts.items()]


def _of_rows(rows: Iterable[list[Any]]) -> dict[UsageKey, Counts]:
    width = len(UsageKey._fields)
    found = {}
    for row in rows:
        if len(row) != width + len(Counter):
            raise ValueError(f"a row of {len(row)} values")
        found[UsageKey(*map(str, row[:width]))] = tuple(map(int, row[width:]))
    return found
