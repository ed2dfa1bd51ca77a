"""Changes of an instance without a gap, and its replicas: scripted workers of a real nursery."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.control.supervision.scripted_daemon import started
from tests.support.fakes.worker import fake_id
from tests.support.fleet import LIMIT_S, Fleet
from tests.support.polling import eventually

from teimgr.control.events.fleet_events import EventLog
from teimgr.control.launch.process_handle import look_up
from teimgr.control.ledger.ledger import Overrun
from teimgr.control.ledger.system_memory import READINGS
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.errors import (
    InstanceNotFound,
    InvalidGpuId,
    TeimgrError,
    Unavailable,
    UpdateFailed,
    UpdateInProgress,
    ValidationError,
)
from teimgr.observability.exposition import text
from teimgr.spec import InstanceSpec, InstanceView, RouteEntry, State

Fleets = Callable[..., Fleet]


class Watch:
    """Every entry of `a` that the directory published."""

    def __init__(self, fleet: Fleet) -> None:
        self.entries: list[RouteEntry] = []
        fleet.directory.subscribe(self._look)

        self.entries += [entry for entry in fleet.directory.snapshot().entries if entry.name == "a"]

    def _look(self, name: str, entry: RouteEntry | None) -> None:
        if entry is not None and name == "a":
            self.entries.append(entry)

    def assert_no_gap(self) -> None:
        assert all(entry.endpoints and entry.state is State.RUNNING for entry in self.entries)


async def gone(pid: int | None) -> None:
    assert pid is not None
    await eventually(lambda: look_up(pid) is None)


def pids(view: InstanceView) -> list[int | None]:
    return [worker.pid for worker in view.workers if worker.role == "serving"]


async def replicas_running(fleet: Fleet, replicas: int, flags: str = "", **values: Any) -> InstanceView:
    """An instance of so many replicas, all of which run."""
    await fleet.create(flags, replicas=replicas, **values)
    await fleet.until(lambda entry: len(entry.endpoints) == replicas)
    view = fleet.manager.get("a")
    fleet.pids.update(pid for pid in pids(view) if pid)
    return view


# Rolling


@pytest.mark.clause("D-update")
async def test_a_change_starts_the_new_worker_beside_the_old_one_and_then_ends_that(fleet: Fleet) -> None:
    await fleet.create()
    old = (await fleet.running()).pid
    watch = Watch(fleet)

    view = await fleet.manager.update("a", {"model_id": "fake/busy"})
    assert view.update is not None
    assert (view.update.state, view.update.changes, view.pid) == ("rolling", ("model_id",), old)
    new = (await fleet.running(not_pid=old)).pid

    await gone(old)
    await eventually(lambda: fleet.manager.get("a").update.state == "done")  # type: ignore[union-attr]
    view = fleet.manager.get("a")
    assert (view.spec.model_id, view.pid, view.restarts) == ("fake/busy", new, 0)
    await eventually(lambda: len(fleet.manager.get("a").workers) == 1)
    watch.assert_no_gap()


async def test_wait_returns_when_the_new_worker_serves(fleet: Fleet) -> None:
    await fleet.create()
    old = (await fleet.running()).pid

    view = await fleet.manager.update("a", {"dtype": "float16"}, wait=True)

    assert view.pid != old
    assert fleet.store.load().specs[0].dtype == "float16"
    await gone(old)


@pytest.mark.clause("D-update")
@pytest.mark.parametrize("flags", ["fail-permanent", "fail-transient", "exit-at-once=7", "never-ready"])
async def test_a_new_worker_that_fails_changes_nothing(fleet: Fleet, flags: str) -> None:
    await fleet.create(startup_timeout_secs=2)
    before = await fleet.running()
    watch = Watch(fleet)
    fleet.events.note([before])

    with pytest.raises(UpdateFailed, match="was rolled back") as caught:
        await fleet.manager.update("a", {"model_id": fake_id(flags)}, wait=True)

    view = fleet.manager.get("a")
    assert (view.spec, view.pid, view.state) == (before.spec, before.pid, State.RUNNING)
    assert view.update is not None
    assert view.update.state == "failed"
    assert str(view.update.reason) in caught.value.message
    assert fleet.store.load().specs == (before.spec,)
    assert len(view.workers) == len(list(fleet.settings.run_dir.glob("*.json"))) == 1
    assert [(each.event, each.reason) for each in fleet.events.history("a")] == [("update_failed", view.update.reason)]
    watch.assert_no_gap()


async def test_what_no_worker_is_told_is_changed_at_once(fleet: Fleet) -> None:
    await fleet.create()
    before = await fleet.running()

    view = await fleet.manager.update("a", {"startup_timeout_secs": 77})

    assert view.update is not None
    assert (view.update.state, view.pid, view.spec.startup_timeout_secs) == ("done", before.pid, 77)
    assert fleet.store.load().specs[0].startup_timeout_secs == 77


async def test_none_takes_a_key_back_to_its_default(fleet: Fleet) -> None:
    await fleet.create(dtype="float16", threads=3)
    await fleet.running()

    view = await fleet.manager.update("a", {"dtype": None, "threads": None}, wait=True)

    assert (view.spec.dtype, view.spec.threads) == ("auto", None)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ValidationError, {"dtype": "int3"}),
        (ValidationError, {"model_id": ""}),
        (InvalidGpuId, {"gpu_id": 4}),
        (ValidationError, {"replicas": 0}),
    ],
)
async def test_wrong_changes_are_refused_before_anything_happens(
    fleet: Fleet, error: type[TeimgrError], changes: dict[str, Any]
) -> None:
    await fleet.create()
    before = await fleet.running()

    with pytest.raises(error):
        await fleet.manager.update("a", changes)

    assert (fleet.manager.get("a").spec, fleet.manager.get("a").update) == (before.spec, None)


async def test_a_rolling_restart_has_no_gap_and_counts(fleet: Fleet) -> None:
    await fleet.create()
    old = (await fleet.running()).pid
    watch = Watch(fleet)

    view = await fleet.manager.restart("a", rolling=True, wait=True)

    assert (view.pid != old, view.restarts) == (True, 1)
    watch.assert_no_gap()
    await gone(old)


async def test_a_second_change_has_to_wait(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.manager.update("a", {"model_id": "fake/slow-start_60"})

    with pytest.raises(UpdateInProgress):
        await fleet.manager.update("a", {"dtype": "float16"})


@pytest.mark.parametrize("verb", ["stop", "restart", "delete"])
async def test_other_commands_give_a_change_up(fleet: Fleet, verb: str) -> None:
    await fleet.create()
    old = (await fleet.running()).pid
    await fleet.manager.update("a", {"model_id": "fake/never-ready"})
    await eventually(lambda: len(list(fleet.settings.run_dir.glob("*.json"))) == 2)

    view = await getattr(fleet.manager, verb)("a")

    assert view.spec.model_id == "fake"
    await gone(old)
    if verb == "restart":
        await fleet.running(not_pid=old)
    assert len(list(fleet.settings.run_dir.glob("*.json"))) == (verb == "restart")
    assert [spec.model_id for spec in fleet.store.load().specs] == ["fake"] * (verb != "delete")


async def test_a_change_that_is_on_its_way_to_the_disk_goes_to_its_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await replicas_running(fleet, 2)
    writing, go_on = threading.Event(), threading.Event()
    save = fleet.store.save

    def save_slowly(specs: Iterable[InstanceSpec]) -> None:
        kept = list(specs)
        if kept[0].model_id == "fake/busy":  # the commit, not the note that the change was accepted
            writing.set()
            assert go_on.wait(LIMIT_S)
        save(kept)

    monkeypatch.setattr(fleet.store, "save", save_slowly)
    await fleet.manager.update("a", {"model_id": "fake/busy"})
    await eventually(writing.is_set)
    stopping = asyncio.create_task(fleet.manager.stop("a"))
    for _ in range(5):
        await asyncio.sleep(0)  # until it waits for the change
    go_on.set()

    view = await stopping

    assert view.update is not None
    assert (view.state, view.spec.model_id, view.update.state) == (State.STOPPED, "fake/busy", "done")
    assert [spec.model_id for spec in fleet.store.load().specs] == ["fake/busy"]
    assert fleet.left_over() == set()


async def test_an_instance_that_is_being_deleted_is_not_changed(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=1)
    await fleet.manager.boot()
    await fleet.create("ignore-term")
    await fleet.running()
    deleting = asyncio.create_task(fleet.manager.delete("a"))
    await fleet.until(lambda entry: entry.state is State.STOPPING)

    for change in (fleet.manager.update("a", {"model_id": "fake"}), fleet.manager.restart("a", rolling=True)):
        with pytest.raises(InstanceNotFound):
            await change

    await deleting
    assert (fleet.manager.list(), fleet.left_over()) == ([], set())


async def test_a_rolling_restart_starts_what_does_not_run(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.manager.stop("a")

    view = await fleet.manager.restart("a", rolling=True)

    assert (view.update, view.spec.wanted_running) == (None, True)
    await fleet.running()


async def test_a_stopped_instance_is_changed_without_being_started(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.manager.stop("a")

    view = await fleet.manager.update("a", {"model_id": "fake/busy"})

    assert (view.state, view.spec.model_id, fleet.left_over()) == (State.STOPPED, "fake/busy", set())
    await fleet.manager.start("a")
    await fleet.running()


async def test_workers_of_an_update_are_counted_from_its_acceptance(fleet: Fleet) -> None:
    await replicas_running(fleet, 1)
    assert fleet.manager.planned_workers("a") == 1

    view = await fleet.manager.update("a", {"model_id": "fake/busy", "replicas": 3}, recreate=True)

    assert view.update is not None
    assert (view.update.state, view.spec.replicas) == ("rolling", 1)
    assert fleet.manager.planned_workers("a") == 3
    await fleet.manager.stop("a")  # which gives the update up
    assert fleet.manager.get("a").spec.replicas == fleet.manager.planned_workers("a")


async def test_recreate_ends_the_old_worker_first_and_brings_it_back_when_the_new_one_fails(fleet: Fleet) -> None:
    await fleet.create()
    old = (await fleet.running()).pid
    view = await fleet.manager.update("a", {"model_id": "fake/busy"}, recreate=True, wait=True)
    assert old is not None
    assert (look_up(old), view.spec.model_id) == (None, "fake/busy")

    with pytest.raises(UpdateFailed):
        await fleet.manager.update("a", {"model_id": "fake/fail-permanent"}, recreate=True, wait=True)

    assert (await fleet.running(not_pid=view.pid)).spec.model_id == "fake/busy"


async def test_recreate_of_a_loaded_model_on_demand_proves_the_new_one_and_leaves_it_loaded(fleet: Fleet) -> None:
    """Once the old worker had ended it counted as unloaded, so that no new one was started: anything was committed."""
    await fleet.create(load="on_demand", pinned=True)
    await fleet.manager.load("a")
    old = (await fleet.running()).pid
    watch = Watch(fleet)

    view = await fleet.manager.update("a", {"model_id": "fake/busy"}, recreate=True, wait=True)
    assert (view.state, view.spec.model_id) == (State.RUNNING, "fake/busy")
    assert view.pid not in (None, old)

    with pytest.raises(UpdateFailed):
        await fleet.manager.update("a", {"model_id": "fake/fail-permanent"}, recreate=True, wait=True)
    assert (await fleet.running(not_pid=view.pid)).spec.model_id == "fake/busy"
    assert fleet.store.load().specs[0].model_id == "fake/busy"
    assert State.UNLOADED not in [entry.state for entry in watch.entries]  # a call would have loaded the old one again


# Replicas


@pytest.mark.clause("D-replicas")
async def test_replicas_serve_side_by_side_and_share_the_cores(fleet: Fleet) -> None:
    view = await replicas_running(fleet, 2)

    assert [(worker.replica, worker.role) for worker in view.workers] == [(0, "serving"), (1, "serving")]
    assert len({worker.incarnation for worker in view.workers}) == 2
    assert (len(fleet.entry().endpoints), view.threads) == (2, 2)


async def test_a_crash_of_one_replica_is_no_matter_of_the_other(fleet: Fleet) -> None:
    before = pids(await replicas_running(fleet, 2))
    watch = Watch(fleet)
    assert before[0] is not None
    os.kill(before[0], signal.SIGKILL)

    await fleet.until(lambda entry: len(entry.endpoints) == 1)
    assert fleet.manager.get("a").state is State.RUNNING
    await fleet.until(lambda entry: len(entry.endpoints) == 2)

    view = fleet.manager.get("a")
    fleet.pids.update(pid for pid in pids(view) if pid)
    assert (pids(view)[1], [worker.restarts for worker in view.workers], view.restarts) == (before[1], [1, 0], 1)
    watch.assert_no_gap()


async def test_an_idle_model_is_unloaded_although_one_of_its_workers_is_gone(fleets: Fleets) -> None:
    """A load that needed its memory waited for ever: a replica without a worker was taken to have calls."""
    fleet = fleets(restart_backoff_secs=600, restart_backoff_max_secs=600)
    await fleet.manager.boot()
    await fleet.create(replicas=2, load="on_demand")
    await fleet.manager.load("a")
    await fleet.until(lambda entry: len(entry.endpoints) == 2)
    gone_pid = pids(fleet.manager.get("a"))[0]
    assert gone_pid is not None
    os.kill(gone_pid, signal.SIGKILL)
    await fleet.until(lambda entry: len(entry.endpoints) == 1)

    assert await fleet.manager.unload("a")

    assert fleet.manager.get("a").state is State.UNLOADED


async def test_calls_wait_for_a_model_on_demand_that_a_user_has_stopped_and_started(fleet: Fleet) -> None:
    """They were refused as long as it loaded: its route still was that of a stopped instance."""
    await fleet.create("never-ready", load="on_demand")
    await fleet.manager.stop("a")
    await fleet.manager.start("a")

    [entry] = fleet.directory.snapshot().entries
    assert (entry.state, entry.is_loadable) == (State.STARTING, True)


async def test_a_model_that_was_pinned_after_its_unloading_was_decided_serves_on(fleet: Fleet) -> None:
    await fleet.create(load="on_demand")
    await fleet.manager.load("a")
    await fleet.running()
    await fleet.manager.update("a", {"pinned": True})

    assert not await fleet.manager.unload("a", "evicted")

    await fleet.running()
    await fleet.manager.update("a", {"pinned": False})
    assert await fleet.manager.unload("a")


@pytest.mark.clause("D-replicas")
async def test_replicas_come_and_go_while_the_others_stay(fleet: Fleet) -> None:
    await fleet.create()
    first = (await fleet.running()).pid
    watch = Watch(fleet)

    view = await fleet.manager.update("a", {"replicas": 3}, wait=True)
    assert (len(pids(view)), pids(view)[0], view.spec.replicas) == (3, first, 3)
    surplus = pids(view)[1:]

    view = await fleet.manager.update("a", {"replicas": 1}, wait=True)
    assert pids(view) == [first]
    for pid in surplus:
        await gone(pid)
    watch.assert_no_gap()


async def test_a_change_replaces_every_replica_at_once(fleet: Fleet) -> None:
    before = pids(await replicas_running(fleet, 2))
    watch = Watch(fleet)

    view = await fleet.manager.update("a", {"model_id": "fake/busy", "replicas": 3}, wait=True)

    assert len(pids(view)) == 3
    assert not set(pids(view)) & set(before)
    for pid in before:
        await gone(pid)
    watch.assert_no_gap()
    assert {entry.model_id: len(entry.endpoints) for entry in watch.entries} == {"fake": 2, "fake/busy": 3}


async def test_stop_and_delete_end_every_replica(fleet: Fleet) -> None:
    await replicas_running(fleet, 3)

    assert (await fleet.manager.stop("a")).state is State.STOPPED
    assert fleet.left_over() == set()
    await fleet.manager.start("a")
    await fleet.until(lambda entry: len(entry.endpoints) == 3)
    await fleet.manager.delete("a")
    assert fleet.left_over() == set()


# A crash of the daemon


@pytest.fixture
def crash(folder: Path) -> Callable[..., None]:
    """Runs a daemon with `a` until that many workers are there, perhaps after the beginning of a change; kills it."""

    def run(*, replicas: int = 1, change: str = "", workers: int) -> None:
        flags = "slow-successor=30" if change == "restart" else "first-only"  # else the change has its own
        options = [f"a={flags}", "--replicas", str(replicas), "--change", change]
        with started(folder, *options) as (daemon, pids):
            assert pids.keys() == {"a"}
            while len(list((folder / "run").glob("????????????.json"))) < workers:
                assert daemon.poll() is None

    return run


async def test_every_replica_is_adopted(crash: Callable[..., None], fleets: Fleets) -> None:
    crash(replicas=3, workers=3)
    fleet = fleets()
    await fleet.manager.boot()

    view = fleet.manager.get("a")
    assert [worker.replica for worker in view.workers if worker.state is State.RUNNING] == [0, 1, 2]
    assert len(list(fleet.settings.run_dir.glob("*.json"))) == 3
    assert view.restarts == 0


@pytest.mark.parametrize("change", ["fake/slow-start_30", "restart"])
async def test_a_crash_in_the_midst_of_a_change_keeps_the_old_worker_and_ends_the_new_one(
    crash: Callable[..., None], fleets: Fleets, change: str
) -> None:
    crash(change=change, workers=2)
    fleet = fleets()
    before = [
        path.stem for path in sorted(fleet.settings.run_dir.glob("*.json"), key=lambda path: path.stat().st_mtime)
    ]
    await fleet.manager.boot()

    view = fleet.manager.get("a")
    assert (view.state, view.restarts) == (State.RUNNING, 0)
    assert view.spec.model_id == ("fake/slow-successor_30" if change == "restart" else "fake/first-only")
    assert [worker.incarnation for worker in view.workers if worker.role == "serving"] == before[:1]
    await eventually(lambda: before[1] not in {path.stem for path in fleet.settings.run_dir.glob("*.json")})


async def test_a_change_in_whose_midst_the_daemon_died_is_completed_by_the_next(
    crash: Callable[..., None], fleets: Fleets
) -> None:
    change = "fake/slow-start_1"
    crash(change=change, workers=2)
    fleet = fleets()
    stored = fleet.store.load().specs[0]
    assert (stored.model_id, change in (stored.pending_update or "")) == ("fake/first-only", True)
    await fleet.manager.boot()

    await eventually(lambda: fleet.manager.get("a").spec.model_id == change)
    view = fleet.manager.get("a")
    assert view.update is not None
    assert (view.update.changes, view.spec.pending_update) == (("model_id",), None)
    await eventually(lambda: fleet.store.load().specs[0].pending_update is None)
    assert fleet.store.load().specs[0].model_id == change
    assert fleet.manager.store_alarm is None
    await fleet.manager.stop("a")


async def test_a_change_that_the_daemon_survives_too_seldom_is_given_up(
    crash: Callable[..., None], fleets: Fleets
) -> None:
    crash(change="fake/slow-start_30", workers=2)
    fleet = fleets()
    [stored] = fleet.store.load().specs
    assert stored.pending_update is not None
    tried = stored.pending_update.replace('"tries": 1', '"tries": 5')
    fleet.store.save([replace(stored, pending_update=tried)])
    await fleet.manager.boot()

    await eventually(lambda: "was not resumed" in (fleet.manager.store_alarm or ""))
    await eventually(lambda: fleet.store.load().specs[0].pending_update is None)
    assert fleet.manager.get("a").update is None
    await fleet.manager.stop("a")


async def test_a_change_that_ends_by_itself_is_forgotten_and_one_cut_short_by_a_stop_of_the_daemon_is_not(
    fleet: Fleet,
) -> None:
    await fleet.create()
    await fleet.running()
    for model_id, state in (("fake/busy", "done"), ("fake/fail-permanent_11", "failed")):
        with suppress(UpdateFailed):
            await fleet.manager.update("a", {"model_id": model_id}, wait=True)
        assert fleet.manager.get("a").update.state == state  # type: ignore[union-attr]
        await eventually(lambda: fleet.store.load().specs[0].pending_update is None)
    await fleet.manager.update("a", {"model_id": "fake/never-ready"})
    assert fleet.store.load().specs[0].pending_update is not None
    await fleet.manager.shutdown(at_once=True)
    assert fleet.store.load().specs[0].pending_update is not None


async def test_a_change_that_the_next_daemon_continues_has_not_failed(fleet: Fleet) -> None:
    """A caller who waited got an error, failed and rolled back; the next daemon then made the change."""
    await fleet.create()
    await fleet.running()
    await fleet.manager.update("a", {"model_id": "fake/never-ready"})
    waiting = asyncio.create_task(fleet.manager._instances["a"].update_finished())
    await fleet.manager.shutdown(at_once=True)
    with pytest.raises(Unavailable, match="the next one continues the update"):
        await waiting


async def test_the_end_of_the_daemon_in_the_midst_of_a_change_leaves_nothing(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.manager.update("a", {"model_id": "fake/never-ready"})
    await eventually(lambda: len(list(fleet.settings.run_dir.glob("*.json"))) == 2)

    with suppress(TimeoutError):
        await asyncio.wait_for(fleet.manager.shutdown(), LIMIT_S)

    assert fleet.left_over() == set()
    assert fleet.store.load().specs[0].model_id == "fake"


def test_only_a_notable_growth_over_a_reservation_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """One of some KiB was one at each reading."""
    incidents: list[Any] = []
    instance: Any = SimpleNamespace(spec=SimpleNamespace(name="a"), on_incident=incidents.append)
    supervisor: Any = SimpleNamespace(number=0)
    with caplog.at_level(logging.DEBUG):
        for grown in (4 << 10, 65 << 20):
            ManagedInstance.on_overrun(instance, supervisor, Overrun("cpu", 31 << 20, (31 << 20) + grown))

    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.WARNING]
    assert [each.event for each in incidents] == ["over_memory"]


def watched(fleet: Fleet) -> EventLog:
    fleet.events.note(fleet.manager.list())
    return fleet.events


async def booted(fleets: Callable[..., Fleet]) -> Fleet:
    fleet = fleets(health_check_interval_secs=0.05, health_probe_timeout_secs=10)
    await fleet.manager.boot()
    return fleet


async def test_a_worker_that_grew_is_replaced_once_and_without_a_gap(fleets: Callable[..., Fleet]) -> None:
    fleet = await booted(fleets)
    events, endpoints = watched(fleet), list[int]()

    def note(name: str, entry: RouteEntry | None) -> None:
        if entry is not None and (endpoints or entry.endpoints):
            endpoints.append(len(entry.endpoints))

    fleet.directory.subscribe(note)
    await fleet.create("grow=80", replicas=2, max_rss_mib=70)
    await fleet.until(lambda entry: len(entry.endpoints) == 2)
    first = {worker.pid for worker in fleet.manager.get("a").workers}

    def replaced() -> bool:
        workers = fleet.manager.get("a").workers
        return len(workers) == 2 and not first & {worker.pid for worker in workers}

    await eventually(replaced)

    view = fleet.manager.get("a")
    assert [worker.replica for worker in view.workers] == [0, 1]
    assert min(endpoints) > 0, "a moment without a worker"
    told = [event.reason for event in events.history("a") if event.event == "over_memory"]
    assert sorted(str(reason)[:14] for reason in told) == ["replica 0 has ", "replica 1 has "]
    assert all(str(reason).endswith("MiB, more than max_rss_mib = 70: it is being replaced") for reason in told)
    assert (view.restarts, fleet.manager.alarms()) == (2, [])
    assert 'teimgr_worker_memory_replacements_total{instance="a"} 2' in text(await fleet.metrics.page())


async def test_a_model_that_alone_is_above_the_limit_is_an_alarm_until_the_limit_is_raised(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = await booted(fleets)
    events = watched(fleet)
    await fleet.create("large=80", max_rss_mib=70)
    pid = (await fleet.running()).pid

    await eventually(fleet.manager.alarms)
    probed = fleet.manager.get("a").last_health_check
    for _ in range(READINGS + 1):
        await eventually(lambda before=probed: fleet.manager.get("a").last_health_check != before)
        probed = fleet.manager.get("a").last_health_check

    view = fleet.manager.get("a")
    assert (view.state, view.pid, view.restarts) == (State.RUNNING, pid, 0)
    assert [event.event for event in events.history("a")].count("over_memory") == 1
    (alarm,) = fleet.manager.alarms()
    assert alarm.startswith("a: replica 0 has ")

    await fleet.manager.update("a", {"max_rss_mib": 1000})
    await eventually(lambda: not fleet.manager.alarms())
    assert fleet.manager.get("a").pid == pid
