"""Counters of workers are added up exactly once, whenever the daemon ends and whichever worker dies."""

from __future__ import annotations

import random

import pytest

from teimgr.control.sharing.tenants import UsageKey, UsageRow, UsageTotals, tenant_counts
from teimgr.wire.tenants.table import RowCounts

NAMES = {1: "search", 2: "jobs"}


class Table:
    """Rows of workers, as the file has them, and what they counted in all."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.live: dict[int, dict[int, int]] = {}
        self.dead: dict[int, dict[int, int]] = {}
        self.counted = dict.fromkeys(NAMES.values(), 0)

    def step(self) -> None:
        if not self.live or self.draw.random() < 0.2:
            self.live[self.draw.randrange(1, 2**60)] = dict.fromkeys(NAMES, 0)
        generation = self.draw.choice(list(self.live))
        tenant = self.draw.choice(list(NAMES))
        self.live[generation][tenant] += 7
        self.counted[NAMES[tenant]] += 7
        if self.draw.random() < 0.2:
            self.dead[generation] = self.live.pop(generation)

    def rows(self) -> list[tuple[RowCounts, bool]]:
        return [
            (RowCounts(generation, "a", "m", {tenant: (n, 1, 1, 0, 0) for tenant, n in counts.items() if n}), is_dead)
            for rows, is_dead in ((self.live, False), (self.dead, True))
            for generation, counts in rows.items()
        ]


@pytest.mark.parametrize("seed", range(5))
def test_no_count_is_lost_or_taken_twice_where_the_daemon_ends_between_any_two_steps(seed: int) -> None:
    table, totals = Table(seed), UsageTotals()
    saved = totals.to_dict()
    for _ in range(400):
        table.step()
        totals.see(table.rows(), NAMES)
        end = table.draw.random()
        if end < 0.1:  # before the totals are written
            totals = UsageTotals.from_dict(saved)
            continue
        saved = totals.to_dict()
        if end < 0.2:  # after that, and before the rows are cleared
            totals = UsageTotals.from_dict(saved)
            continue
        for generation in totals.moved & table.dead.keys():
            del table.dead[generation]

    totals.see(table.rows(), NAMES)
    found = {key.key: counts[0] for key, counts in totals.by_key().items()}
    assert found == table.counted


def test_a_row_that_is_gone_keeps_what_was_seen_of_it() -> None:
    totals = UsageTotals()
    totals.see([(RowCounts(5, "a", "m", {1: (10, 2, 1, 0, 0)}), False)], NAMES)
    totals = UsageTotals.from_dict(totals.to_dict())
    totals.see([], NAMES)  # the host was started again

    assert totals.by_key() == {UsageKey("search", "a", "m"): (10, 2, 1, 0, 0)}
    assert not totals.running


def test_damaged_totals_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 values"):
        UsageTotals.from_dict({"ended": [["a", 1]], "running": {}, "moved": []})


def test_sums_are_by_what_was_asked_for_the_largest_first() -> None:
    rows = [
        UsageRow("search", "a", "m", 10, 1, 1, 0, 0),
        UsageRow("search", "b", "n", 5, 1, 1, 2, 0),
        UsageRow(None, "a", "m", 40, 4, 4, 0, 1),
    ]
    by_key = tenant_counts(rows, ("key",))
    assert [(each["key"], each["tokens"], each["refused"]) for each in by_key] == [(None, 40, 0), ("search", 15, 2)]
    assert [each["tokens"] for each in tenant_counts(rows, ("model",))] == [50, 5]
    assert set(by_key[0]) == {"key", "tokens", "texts", "calls", "refused", "shadowed"}
