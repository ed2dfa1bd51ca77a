"""The task of recommendations over a scripted fleet: an applied one is kept, taken back, or given up; also restarts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from teimgr.control.background import KeptFile
from teimgr.control.capacity.advisor import SEEN_PART, Advisor
from teimgr.control.ledger.admission import Admission
from teimgr.control.ledger.footprints import Footprints
from teimgr.control.ledger.ledger import Footprint, Ledger, Place
from teimgr.control.placement.hosts import Inventory
from teimgr.control.supervision.validation import with_changes
from teimgr.errors import InstanceNotFound, ObjectNotFound
from teimgr.spec import Incident, InstanceSpec, InstanceView, State, UpdateView, WorkerView

MIB = 2**20


@dataclass
class Worker:
    instance: str
    incarnation: str = "1"
    counters: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """One instance `a`, and what its worker has counted."""

    def __init__(self) -> None:
        self.spec: InstanceSpec | None = InstanceSpec(name="a", model_id="m")
        self.worker: Worker | None = Worker("a", counters={"taken": 0, "queued_tokens": 0})
        self.has_worker = False  # by its view
        self.notes: list[Incident] = []
        self.time = 0.0
        self.last_update: UpdateView | None = None
        self.rolls = False  # an update takes its time

    def get(self, name: str) -> InstanceView:
        if self.spec is None or name != "a":
            raise InstanceNotFound(name)
        there = WorkerView(replica=0, role="serving", state=State.RUNNING, incarnation="1")
        return InstanceView(
            spec=self.spec, state=State.RUNNING, workers=(there,) if self.has_worker else (), update=self.last_update
        )

    async def update(self, name: str, changes: Mapping[str, Any]) -> InstanceView:
        assert self.spec is not None
        if self.rolls:
            self.last_update = UpdateView(state="rolling", changes=tuple(changes))
        else:
            self.spec = with_changes(self.spec, changes)
        return self.get(name)

    def note(self, name: str, incident: Incident) -> None:
        self.notes.append(incident)

    async def stats(self, names: Collection[str] | None) -> list[Worker]:
        return [replace(self.worker)] if self.worker else []


class Cards:
    async def read(self) -> Inventory:
        return Inventory()


async def refresh() -> None: ...


class Setup:
    def __init__(self, path: Path | None = None) -> None:
        self.fleet = Fleet()
        self.memory = Admission(Ledger(), Footprints(), refresh)
        self.held = self.memory.ledger.hold("a", 0, Footprint(host_bytes=400 * MIB), Place(), is_settled=True)
        self.kept = KeptFile(path)
        self.advisor = self.made()

    def made(self, seen_part: float = 0.0) -> Advisor:
        fleet = self.fleet
        how: dict[str, Any] = {"clock": lambda: fleet.time, "seen_part": seen_part}
        return Advisor(fleet, fleet.stats, self.memory, Cards(), self.kept, **how)

    async def applied(self) -> None:
        """The idle instance `a` is made one on demand, as the route does it."""
        await self.advisor.look()
        assert self.fleet.spec is not None
        found, before = await self.advisor.find("idle.a"), self.fleet.spec
        assert found.patch is not None
        await self.fleet.update("a", found.patch)
        self.advisor.watch(found, before, 60)

    def state(self) -> tuple[str, str | None]:
        (record,) = self.advisor.applied()
        return record.state, record.result


async def test_what_brings_its_effect_is_kept() -> None:
    setup = Setup()
    await setup.applied()
    assert setup.fleet.spec is not None
    assert setup.fleet.spec.load == "on_demand"
    setup.fleet.worker = None
    setup.memory.release(setup.held)
    await setup.advisor.look()
    await setup.advisor.judge()
    assert setup.state()[0] == "watched"
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state() == ("kept", "held_bytes is 0, expected at most 2.097e+08")
    assert setup.fleet.spec.load == "on_demand"


async def test_what_does_not_is_taken_back_with_an_event_and_not_recommended_again() -> None:
    setup = Setup()
    await setup.applied()
    assert await setup.advisor.recommendations() == []  # while it is watched
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state()[0] == "taken_back"
    assert setup.fleet.spec == InstanceSpec(name="a", model_id="m")
    applied, taken_back = setup.fleet.notes
    assert applied.event == "applied"
    assert "load = on_demand" in applied.reason
    assert taken_back.event == "taken_back"
    assert taken_back.reason.startswith("idle.a: load = on_demand")
    assert "is reverted: held_bytes is 4.194e+08, expected at most 2.097e+08" in taken_back.reason
    await setup.advisor.look()
    assert await setup.advisor.recommendations() == []
    setup.fleet.time += 86401
    assert [each.id for each in await setup.advisor.recommendations()] == ["idle.a"]


async def test_keys_that_someone_has_changed_since_stay_as_they_are() -> None:
    setup = Setup()
    await setup.applied()
    await setup.fleet.update("a", {"idle_timeout_secs": 7})
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state()[0] == "superseded"
    assert setup.fleet.spec is not None
    assert setup.fleet.spec.idle_timeout_secs == 7


async def test_one_whose_update_failed_is_refused_with_the_reason_and_an_event() -> None:
    """Its 202 was followed by a line of the log alone."""
    setup = Setup()
    before = setup.fleet.spec
    await setup.applied()
    [record] = setup.advisor.applied()
    setup.fleet.last_update = UpdateView(state="failed", changes=tuple(record.patch), reason="no room on any host")
    setup.fleet.spec = before
    await setup.advisor.judge()
    assert setup.state() == ("refused", "no room on any host")
    assert [each.event for each in setup.fleet.notes] == ["applied", "refused"]
    assert setup.fleet.notes[1].reason.startswith("idle.a: load = on_demand")


async def test_one_is_taken_back_only_once_the_update_that_does_it_is_over() -> None:
    """It was told as taken back when that update was accepted: one that then failed left the change."""
    setup = Setup()
    await setup.applied()
    [record] = setup.advisor.applied()
    setup.fleet.rolls = True
    for tries in (1, 2, 3):
        setup.fleet.time += 61
        await setup.advisor.judge()
        assert (setup.state()[0], record.reversal is not None, record.tries) == ("watched", True, tries)
        setup.fleet.last_update = UpdateView(state="failed", changes=tuple(record.patch), reason="no room on any host")
        await setup.advisor.judge()
        assert setup.state() == ("watched", "not taken back: no room on any host")
    assert [each.event for each in setup.fleet.notes] == ["applied"]
    setup.fleet.time += 61
    await setup.advisor.judge()
    assert setup.state() == ("refused", "not taken back: no room on any host")
    assert setup.fleet.notes[1].reason.startswith("idle.a: load = eager")


async def test_the_next_daemon_sees_that_the_update_which_takes_one_back_is_over(tmp_path: Path) -> None:
    setup = Setup(tmp_path / "kept.json")
    before = setup.fleet.spec
    await setup.applied()
    setup.fleet.rolls, setup.fleet.time = True, 61
    await setup.advisor.judge()
    assert setup.state()[0] == "watched"

    setup.fleet.spec, setup.fleet.last_update = before, None
    setup.advisor = setup.made()
    setup.advisor.restore()
    await setup.advisor.judge()

    assert setup.state()[0] == "taken_back"
    assert setup.fleet.notes[-1].event == "taken_back"


async def test_a_clock_that_is_set_back_delays_no_judgement() -> None:
    setup = Setup()
    setup.fleet.time = 1e6
    await setup.applied()
    setup.fleet.time = 0.0
    await setup.advisor.judge()
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state()[0] == "taken_back"
    setup.fleet.time += 86401
    await setup.advisor.look()
    assert [each.id for each in await setup.advisor.recommendations()] == ["idle.a"]


async def test_an_instance_that_is_deleted_while_it_is_taken_back_ends_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    await setup.applied()

    async def update(name: str, changes: Mapping[str, Any]) -> InstanceView:
        view = setup.fleet.get(name)
        setup.fleet.spec = None
        return view

    monkeypatch.setattr(setup.fleet, "update", update)
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state()[0] == "superseded"


async def test_a_deleted_instance_ends_its_record() -> None:
    setup = Setup()
    await setup.applied()
    setup.fleet.spec = None
    await setup.advisor.judge()
    assert setup.state() == ("superseded", "the instance was deleted")


async def test_the_next_daemon_judges_what_this_one_has_applied(tmp_path: Path) -> None:
    setup = Setup(tmp_path / "state.capacity.json")
    await setup.applied()
    await setup.kept.close()
    setup.kept = KeptFile(tmp_path / "state.capacity.json")
    setup.kept.load()
    setup.advisor = setup.made()
    setup.advisor.restore()
    setup.fleet.time = 61
    await setup.advisor.judge()
    assert setup.state()[0] == "taken_back"


async def test_an_instance_that_has_just_begun_is_not_idle() -> None:
    setup = Setup()
    for seen_part, found in ((0.0, ["idle.a"]), (SEEN_PART, [])):
        advisor = setup.made(seen_part)
        await advisor.look()
        assert [each.id for each in await advisor.recommendations()] == found


async def test_an_instance_whose_workers_all_miss_a_reading_is_still_watched() -> None:
    setup = Setup()
    await setup.advisor.look()
    history, setup.fleet.has_worker, setup.fleet.worker = setup.advisor._histories["a"], True, None
    await setup.advisor.look()
    assert setup.advisor._histories == {"a": history}
    setup.fleet.has_worker = False
    await setup.advisor.look()
    assert not setup.advisor._histories


async def test_only_what_is_recommended_now_has_an_id() -> None:
    setup = Setup()
    await setup.advisor.look()
    assert (await setup.advisor.find("idle.a")).instance == "a"
    assert setup.fleet.worker is not None
    setup.fleet.worker.counters = {"taken": 3}
    for id in ("idle.a", "idle.b", "nonsense"):
        with pytest.raises(ObjectNotFound, match="No such recommendation"):
            await setup.advisor.find(id)
