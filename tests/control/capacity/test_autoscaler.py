"""The autoscaler's task: measured rates are kept across restarts, for the same model on the same device alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teimgr.control.capacity import autoscaler as module
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.capacity.kept_file import KeptFile
from teimgr.spec import Incident, InstanceSpec, InstanceView, State, WorkerView


@dataclass
class Counters:
    instance: str
    incarnation: str
    counters: Mapping[str, Any]


class Busy:
    """An instance `a` of two replicas on one CPU host that compute 500 tokens a second together, with work waiting."""

    def __init__(self) -> None:
        self.spec = InstanceSpec(name="a", model_id="m", replicas=2, max_replicas=4)
        self.time_s = 0.0
        self.asked: list[int] = []
        self.notes: list[Incident] = []

    def list(self) -> list[InstanceView]:
        workers = [WorkerView(replica=i, role="serving", state=State.RUNNING) for i in range(int(self.spec.replicas))]
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
        return [Counters("a", str(i), each) for i in range(int(self.spec.replicas))]


async def steps(fleet: Busy, scaler: Autoscaler, count: int) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(count):
        await scaler.step()
        fleet.time_s = loop.time() - began + 1e-6


async def test_measured_rates_are_kept_across_restarts(tmp_path: Path) -> None:
    path, fleet = tmp_path / "state.capacity.json", Busy()
    fleet.spec = replace(fleet.spec, replicas=1)
    kept = KeptFile(path)
    await steps(fleet, Autoscaler(fleet, fleet.stats, kept), 8)
    assert fleet.asked[:1] == [2]  # once one replica was measured
    await kept.close()

    kept = KeptFile(path)
    kept.load()
    again = Busy()
    again.spec = replace(again.spec, replicas=1)
    scaler = Autoscaler(again, again.stats, kept)
    scaler.restore()
    await steps(again, scaler, 2)  # the first reading gives none yet
    assert again.asked == [2]
    assert "a replica computes" in again.notes[0].reason

    other = Busy()
    other.spec = replace(other.spec, replicas=1, model_id="another")
    scaler = Autoscaler(other, other.stats, kept)
    scaler.restore()
    await steps(other, scaler, 2)
    assert other.asked == []  # nothing is known of it
    assert module.INTERVAL_S > 0
