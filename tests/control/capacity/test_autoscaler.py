"""The autoscaler's task: measured rates are kept across restarts, for the same model on the same device alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from teimgr.control.background import KeptFile
from teimgr.control.capacity import autoscaler
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.spec import Incident, InstanceSpec, InstanceView, State, WorkerView


@dataclass
class Counters:
    instance: str
    incarnation: str
    counters: Mapping[str, Any]


class Busy:
    """An instance `a` whose replicas compute 500 tokens a second together, with work waiting.

    `nodes` and `cards` have the host and the GPU of each replica by a letter; without them all are on one CPU host.
    """

    def __init__(self, nodes: str | None = None, cards: str = "") -> None:
        self.spec = InstanceSpec(name="a", model_id="m", replicas=1, max_replicas=4)
        self.nodes, self.cards = nodes or [None] * 4, cards or [None] * 4
        self.time_s = 0.0
        self.silent: set[str] = set()
        self.asked: list[int] = []
        self.notes: list[Incident] = []

    def list(self) -> list[InstanceView]:
        count = int(self.spec.replicas)
        workers = [
            WorkerView(replica=i, role="serving", state=State.RUNNING, node=node, gpu=card, incarnation=str(i))
            for i, node, card in zip(range(count), self.nodes, self.cards, strict=False)
        ]
        return [InstanceView(spec=self.spec, state=State.RUNNING, workers=tuple(workers))]

    scaled = list

    async def update(self, name: str, changes: Mapping[str, Any]) -> InstanceView:
        self.asked.append(changes["replicas"])
        self.spec = replace(self.spec, **changes)
        return self.list()[0]

    def note(self, name: str, incident: Incident) -> None:
        self.notes.append(incident)

    async def stats(self, names: Collection[str] | None) -> list[Counters]:
        each = {"tokens": 500 * self.time_s / int(self.spec.replicas), "queued_tokens": 9000, "busy_s": self.time_s}
        found = [Counters("a", str(i), each) for i in range(int(self.spec.replicas))]
        return [each for each in found if each.incarnation not in self.silent]


async def steps(fleet: Busy, scaler: Autoscaler, count: int) -> None:
    """Readings a tenth of a millisecond apart: with the loop's own clock the rates would be those of a busy host."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        with mock.patch.object(loop, "time", return_value=fleet.time_s):
            await scaler.step()
        fleet.time_s += 1e-4


async def test_measured_rates_are_kept_across_restarts(tmp_path: Path) -> None:
    path, fleet = tmp_path / "state.capacity.json", Busy()
    kept = KeptFile(path)
    await steps(fleet, Autoscaler(fleet, fleet.stats, kept), 8)
    assert fleet.asked[:1] == [2]  # once one replica was measured
    await kept.close()

    kept = KeptFile(path)
    kept.load()
    again = Busy()
    scaler = Autoscaler(again, again.stats, kept)
    scaler.restore()
    await steps(again, scaler, 2)  # the first reading gives none yet
    assert again.asked == [2]
    assert "one replica computes" in again.notes[0].reason

    other = Busy()
    other.spec = replace(other.spec, model_id="another")
    scaler = Autoscaler(other, other.stats, kept)
    scaler.restore()
    await steps(other, scaler, 2)
    assert other.asked == []  # nothing is known of it


@pytest.mark.parametrize(("nodes", "cards", "asked"), [(None, "", []), ("xyzx", "", [2]), (None, "ABCA", [2])])
async def test_a_replica_on_another_host_or_card_waits_for_no_measurement_of_the_first(
    nodes: str | None, cards: str, asked: list[int]
) -> None:
    fleet = Busy(nodes, cards)
    await steps(fleet, Autoscaler(fleet, fleet.stats), 3)
    assert fleet.asked == asked


async def test_a_replica_that_shares_a_card_and_computes_no_more_is_taken_back_and_not_tried_again() -> None:
    fleet = Busy(cards="AAAA")
    await steps(fleet, Autoscaler(fleet, fleet.stats), 30)
    assert fleet.asked == [2, 3, 2]
    assert "replica 3 does not pay" in fleet.notes[-1].reason


async def test_a_worker_that_does_not_answer_counts_by_its_last_figures_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Busy()
    scaler = Autoscaler(fleet, fleet.stats)
    fleet.spec = replace(fleet.spec, replicas=3)
    fleet.silent = {"2"}  # has never answered
    found = (await scaler.figures())["a"]
    assert (found.queued_tokens, found.replicas, found.silent_replicas) == (18_000, 3, 1)
    fleet.silent = {"1", "2"}
    found = (await scaler.figures())["a"]
    assert (found.queued_tokens, found.silent_replicas) == (18_000, 2)
    assert found.queued_tokens == (await scaler.figures())["a"].queued_tokens
    monkeypatch.setattr(autoscaler, "KNOWN_FOR_S", -1.0)
    found = (await scaler.figures())["a"]
    assert (found.queued_tokens, found.silent_replicas) == (9000, 2)
    monkeypatch.undo()
    fleet.spec = replace(fleet.spec, replicas=1)
    await scaler.figures()
    fleet.spec = replace(fleet.spec, replicas=3)
    assert (await scaler.figures())["a"].queued_tokens == 9000  # those that have ended are forgotten
