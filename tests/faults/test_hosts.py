"""The simulation of many hosts, in small."""

from __future__ import annotations

import pytest

from tests.faults import hosts


async def test_a_few_hosts_are_filled_fed_and_survive_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "IDLE_S", 0.1)

    found = await hosts.measure(4)

    assert found["workers"] == 40
    assert found["most_per_host"] <= 16  # spread over the cards with the most free memory
    assert found["snapshot_kib"] > 1
    assert found["worker_events_per_s"] > 0
