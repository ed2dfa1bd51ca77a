"""Adoption of a killed daemon's workers; changes of wanted state when the disk refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.supervision.scripted_daemon import started
from tests.support.fleet import LIMIT_S, Fleet, settings_for
from tests.support.measures import watch_turns
from tests.support.polling import eventually

from teimgr.config.sections import OnDemandSettings
from teimgr.control.launch.process_handle import look_up
from teimgr.control.ledger.ledger import Place
from teimgr.control.placement.hosts import Host, Inventory
from teimgr.control.supervision import fleet_plan
from teimgr.control.supervision import manager as manager_module
from teimgr.control.supervision.crash_reports import CrashReports
from teimgr.control.supervision.store import parse
from teimgr.errors import (
    Code,
    InstanceExists,
    InstanceNotFound,
    Internal,
    ModelNotFound,
    NotRunning,
    Overloaded,
    StateNotSaved,
    UpdateFailed,
    ValidationError,
)
from teimgr.observability import catalogue, logs
from teimgr.observability.log_source import LocalLogs, LogFilter
from teimgr.spec import InstanceSpec, InstanceView, State, UpdateView
from teimgr.wire.routing.router import Router

Fleets = Callable[..., Fleet]


@pytest.fixture
def crash(folder: Path) -> Callable[..., dict[str, int]]:
    """Runs a daemon until its instances run, kills it, and prints the pids of the workers it leaves."""

    def run(*instances: str) -> dict[str, int]:
        with started(folder, *instances) as (_, pids):
            return pids

    return run


async def test_live_workers_are_adopted_without_a_gap_in_the_directory(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pids = crash("a", "b")
    fleet = fleets()
    fleet.pids.update(pids.values())

    await fleet.manager.boot()
    entries = fleet.directory.snapshot().entries

    assert {view.spec.name: view.pid for view in fleet.manager.list()} == pids
    assert [entry.state for entry in entries] == [State.RUNNING] * 2
    assert all(entry.dimension == 4 for entry in entries)
    assert {view.restarts for view in fleet.manager.list()} == {0}


async def test_a_hung_worker_keeps_no_other_from_being_adopted(
    crash: Callable[..., dict[str, int]], fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.control.launch.launcher.IDENTITY_LIMIT_S", 2 * LIMIT_S)
    monkeypatch.setattr("teimgr.control.supervision.manager.ADOPTION_LIMIT_S", 0.2)
    pids = crash("a", "b")
    fleet = fleets()
    fleet.pids.update(pids.values())
    await fleet.manager.restore()
    assert {entry.state for entry in fleet.directory.snapshot().entries} == {State.STARTING}
    os.kill(pids["a"], signal.SIGSTOP)

    async with asyncio.timeout(LIMIT_S):
        await fleet.manager.boot()

    assert (fleet.entry("a").state, fleet.entry("b").state) == (State.STARTING, State.RUNNING)
    over = asyncio.create_task(fleet.manager.adoption_over())
    stopping = asyncio.create_task(fleet.manager.stop("a"))  # waits for the adoption
    assert (await fleet.manager.stop("b")).state is State.STOPPED
    assert not over.done(), "muxes would lose a worker that may still answer"
    os.kill(pids["a"], signal.SIGCONT)
    await over
    assert (await stopping).state is State.STOPPED
    assert look_up(pids["a"]) is None


async def test_an_adopted_worker_is_supervised_as_any_other(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pid = crash("a")["a"]
    fleet = fleets()
    await fleet.manager.boot()

    await eventually(lambda: fleet.manager.get("a").last_health_check)
    os.kill(pid, signal.SIGKILL)
    view = await fleet.running(not_pid=pid)
    assert view.restarts == 1

    await fleet.manager.stop("a")
    assert fleet.left_over() == set()


async def test_a_worker_that_died_meanwhile_is_launched_anew(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pid = crash("a")["a"]
    os.kill(pid, signal.SIGKILL)
    fleet = fleets()
    await fleet.manager.boot()

    await fleet.running(not_pid=pid)
    assert len(list(fleet.settings.run_dir.glob("*.sock"))) == 1


async def test_a_worker_of_another_spec_is_replaced(crash: Callable[..., dict[str, int]], fleets: Fleets) -> None:
    pid = crash("a")["a"]
    fleet = fleets(max_client_batch_size=7)
    await fleet.manager.boot()

    await fleet.running(not_pid=pid)
    assert look_up(pid) is None


async def test_a_worker_whose_instance_is_not_wanted_is_ended(
    crash: Callable[..., dict[str, int]], folder: Path, fleets: Fleets
) -> None:
    pids = crash("a", "gone")
    fleet = fleets()
    store = fleet.store
    specs = {spec.name: spec for spec in store.load().specs}
    store.save([replace(specs["a"], wanted_running=False)])

    await fleet.manager.boot()

    assert [(view.spec.name, view.state) for view in fleet.manager.list()] == [("a", State.STOPPED)]
    assert [look_up(pid) for pid in pids.values()] == [None, None]
    assert fleet.left_over() == set()


async def test_a_seed_keeps_its_worker_though_the_state_is_not_restored(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pid = crash("a")["a"]
    seed = InstanceSpec(name="a", model_id="fake")
    fleet = fleets(auto_restore_on_restart=False, instances=(seed,))
    fleet.pids.add(pid)

    await fleet.manager.boot()

    assert fleet.manager.get("a").pid == pid


async def test_a_stop_survives_the_crash(crash: Callable[..., dict[str, int]], fleets: Fleets) -> None:
    crash("a")
    first = fleets()
    await first.manager.boot()
    await first.manager.stop("a")
    await first.end()

    second = fleets()
    await second.manager.boot()

    assert second.manager.get("a").state is State.STOPPED


@pytest.mark.clause("M4-corrupt")
async def test_a_damaged_state_file_is_an_alarm_and_the_fleet_goes_on(
    crash: Callable[..., dict[str, int]], folder: Path, fleets: Fleets
) -> None:
    pids = crash("a", "b")
    (folder / "state.toml").unlink()
    (folder / "state.toml").write_text("junk")
    fleet = fleets()
    fleet.pids.update(pids.values())

    await fleet.manager.boot()

    assert "cannot be read" in str(fleet.manager.store_alarm)
    assert fleet.manager.get("a").pid == pids["a"], "the generation before knew the first"
    assert len(list(folder.glob("state.toml.corrupt-*"))) == 1


@pytest.mark.clause("M4-restore")
async def test_instances_that_cannot_be_had_are_shown_as_failed_not_lost(fleets: Fleets, folder: Path) -> None:
    (folder / "state.toml").write_text(
        'last_updated = "x"\n'
        + "".join(f'[[instances]]\nname = "{name}"\nmodel_id = "fake"\nport = 23001\n' for name in ("a", "b"))
    )
    fleet = fleets()

    await fleet.manager.boot()

    await fleet.running("a")
    view = fleet.manager.get("b")
    assert (view.state, view.reason) == (State.FAILED, "Port 23001 already in use by instance 'a'")
    assert view.spec.wanted_running


async def test_a_worker_that_was_killed_while_no_daemon_ran_leaves_a_report(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pid = crash("a")["a"]
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: look_up(pid) is None)
    fleet = fleets()
    await fleet.manager.restore()
    events = fleet.events
    events.note(fleet.manager.list())

    await fleet.manager.boot()
    (crashed,) = [event for event in events.history("a") if event.event == "crashed"]
    report = fleet.settings.log_dir / "crashes" / str(crashed.crash_report)
    await eventually(report.exists)

    assert crashed.reason.startswith("while no daemon ran the worker ended")
    assert (json.loads(report.read_text())["pid"], look_up(pid)) == (pid, None)
    await fleet.running("a", not_pid=pid)


async def test_a_daemon_that_ends_completes_its_crash_reports(
    crash: Callable[..., dict[str, int]], fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = crash("a")["a"]
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: look_up(pid) is None)
    fleet, may_write, write = fleets(), threading.Event(), CrashReports.write

    def write_late(*arguments: Any) -> None:
        may_write.wait(LIMIT_S)
        write(*arguments)

    monkeypatch.setattr(CrashReports, "write", write_late)
    await fleet.manager.boot()

    threading.Timer(0.3, may_write.set).start()
    await fleet.manager.shutdown(at_once=True)

    assert len(list((fleet.settings.log_dir / "crashes").glob("a-0-*.json"))) == 1


async def test_a_worker_that_ended_in_order_while_no_daemon_ran_leaves_none(
    crash: Callable[..., dict[str, int]], fleets: Fleets
) -> None:
    pid = crash("a=exit-when-alone")["a"]
    await eventually(lambda: look_up(pid) is None)
    fleet = fleets()
    await fleet.manager.restore()
    events = fleet.events
    events.note(fleet.manager.list())

    await fleet.manager.boot()

    assert [event for event in events.history("a") if event.event == "crashed"] == []
    await fleet.running("a", not_pid=pid)


async def test_the_nursery_ends_with_its_daemon(crash: Callable[..., dict[str, int]], folder: Path) -> None:
    pid = crash("a")["a"]
    log = str(folder / "run" / "nursery.log")

    def writers() -> list[str]:
        found = [path for path in Path("/proc").glob("[0-9]*/fd/1") if os.path.realpath(path) == log]
        return [path.parts[2] for path in found]

    await eventually(lambda: not writers())
    assert look_up(pid) is not None
    os.kill(pid, signal.SIGKILL)


async def test_orphans_end_by_themselves(crash: Callable[..., dict[str, int]], fleets: Fleets) -> None:
    """The scripted worker's own clock; the daemon never comes back."""
    pid = crash("a=exit-when-alone")["a"]

    await eventually(lambda: look_up(pid) is None)


# A disk that refuses


async def _with_one_stopped(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.create(name="quiet")
    await fleet.running("quiet")
    await fleet.manager.stop("quiet")


@pytest.fixture
def broken_disk(folder: Path) -> Path:
    """A folder where the store writes its temporary file: every save fails until it is removed."""
    return folder / "state.toml.tmp"


COMMANDS: dict[str, Callable[[Fleet], Awaitable[object]]] = {
    "create": lambda fleet: fleet.create(name="new"),
    "delete": lambda fleet: fleet.manager.delete("a"),
    "stop": lambda fleet: fleet.manager.stop("a"),
    "start": lambda fleet: fleet.manager.start("quiet"),
    "update in place": lambda fleet: fleet.manager.update("a", {"tags": {"team": "search"}}),
    "update with new workers": lambda fleet: fleet.manager.update("a", {"dtype": "float32"}, wait=True),
    "scaling": lambda fleet: fleet.manager.update("a", {"replicas": 2}, wait=True),
}


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_change_that_cannot_be_saved_is_refused_and_not_made(
    fleet: Fleet, broken_disk: Path, command: str
) -> None:
    await _with_one_stopped(fleet)
    before = [(view.spec, view.state, view.pid) for view in fleet.manager.list()]
    saved = parse((fleet.settings.state_file).read_bytes()).specs
    broken_disk.mkdir()

    for _ in range(2):  # newly refused, and known to be refused
        with pytest.raises(StateNotSaved, match="the state cannot be saved"):
            await COMMANDS[command](fleet)

    assert [(view.spec, view.state, view.pid) for view in fleet.manager.list()] == before
    assert parse((fleet.settings.state_file).read_bytes()).specs == saved
    assert "cannot be saved" in str(fleet.manager.store_alarm)


async def test_commands_work_again_when_the_disk_does(fleet: Fleet, broken_disk: Path) -> None:
    broken_disk.mkdir()
    with pytest.raises(StateNotSaved):
        await fleet.create()
    broken_disk.rmdir()

    await fleet.create()
    await fleet.running()

    assert fleet.manager.store_alarm is None
    assert [spec.name for spec in parse(fleet.settings.state_file.read_bytes()).specs] == ["a"]


async def test_a_state_that_could_not_be_saved_at_the_start_is_saved_at_the_end(
    fleets: Fleets, folder: Path, broken_disk: Path
) -> None:
    broken_disk.mkdir()
    fleet = fleets(instances=(InstanceSpec(name="seed", model_id="fake", seeded=True),))
    await fleet.manager.boot()
    await fleet.running("seed")
    assert "cannot be saved" in str(fleet.manager.store_alarm)
    broken_disk.rmdir()

    await fleet.end()

    assert [spec.name for spec in parse((folder / "state.toml").read_bytes()).specs] == ["seed"]


async def test_a_create_is_on_disk_before_its_worker_starts(fleet: Fleet) -> None:
    creating = asyncio.create_task(fleet.create())
    await fleet.until(lambda entry: entry.state is State.STARTING)

    assert [spec.name for spec in parse(fleet.settings.state_file.read_bytes()).specs] == ["a"]
    await creating
    await fleet.running()


async def test_what_the_settings_forbid_is_neither_created_nor_made_of_an_instance(fleets: Fleets) -> None:
    fleet = fleets(allow_pickled_weights=False)
    await fleet.manager.boot()
    with pytest.raises(ValidationError, match="allow_remote_code = true"):
        await fleet.create(trust_remote_code=True)
    assert fleet.manager.list() == []
    await fleet.create()
    with pytest.raises(ValidationError, match="allow_remote_code = true"):
        await fleet.manager.update("a", {"extra_args": ("--trust-remote-code",)})
    await fleet.running()
    await fleet.manager.stop("a")


async def cost_of_an_event(fleet: Fleet, count: int) -> int:
    """How many functions run when one of `count` instances changes."""
    idle = InstanceSpec(name="idle", model_id="fake", wanted_running=False, prometheus_port=0)
    fleet.store.save([replace(idle, name=f"idle-{number}", port=30000 + number) for number in range(count)])
    router = Router()
    await fleet.manager.boot()
    fleet.events.note(fleet.manager.list())
    fleet.directory.subscribe(router.apply)
    instance = fleet.manager._instances["idle-0"]
    worker = instance.workers[0]
    worker._replica = replace(worker._replica, reason="changed")
    calls = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counted)
    instance.on_state_changed()
    sys.setprofile(None)
    assert router.snapshot.entries[0].reason == "changed"
    return calls


async def test_the_cost_of_an_event_does_not_grow_with_the_fleet(folder: Path, fleets: Fleets) -> None:
    few = fleets()
    cost = await cost_of_an_event(few, 3)
    await few.end()

    assert await cost_of_an_event(fleets(), 200) == cost < 500


class TwoHosts:
    """An inventory of two hosts; the second one may have a problem."""

    problem = ""

    async def read(self) -> Inventory:
        return Inventory(hosts=(Host(name="one"), Host(name="two", problem=self.problem)))


async def test_a_worker_pinned_to_a_removed_host_ends_and_the_reason_is_shown(folder: Path) -> None:
    hosts = TwoHosts()
    fleet = Fleet(folder, settings_for(folder), inventory=hosts)
    events = fleet.events
    try:
        await fleet.manager.boot()
        events.note([])
        await fleet.create(node="two")
        before = await fleet.running()

        hosts.problem = "it was removed from the fleet"
        fleet.leaving.report("two", was_removed=True)

        reason = "no host for 'a' (one: node = 'two'; two: it was removed from the fleet)"
        await eventually(lambda: fleet.manager.get("a").reason == reason, LIMIT_S)
        assert fleet.manager.get("a").state is State.STARTING
        assert fleet.entry().endpoints == ()
        assert before.pid is not None
        assert not look_up(before.pid)
        (told,) = [event.reason for event in events.history("a") if event.event == "no_host"]
        assert told == f"host 'two' was removed from the fleet, and its workers are ended: {reason}"

        hosts.problem = ""  # it has joined again

        await fleet.running(not_pid=before.pid)
    finally:
        await fleet.end()


async def test_a_worker_that_no_other_host_takes_serves_on_while_its_host_is_about_to_leave(folder: Path) -> None:
    hosts = TwoHosts()
    fleet = Fleet(folder, settings_for(folder), inventory=hosts)
    try:
        await fleet.manager.boot()
        await fleet.create(node="two")
        before = await fleet.running()

        hosts.problem = "it is leaving"
        fleet.leaving.report("two")

        def update() -> UpdateView | None:
            return fleet.manager.get("a").update

        await eventually(lambda: (found := update()) is not None and found.state == "failed", LIMIT_S)
        after = fleet.manager.get("a")
        assert (after.state, after.pid) == (State.RUNNING, before.pid)
    finally:
        await fleet.end()


async def test_a_further_replica_avoids_the_hosts_of_those_that_stay(folder: Path) -> None:
    """Replicas of an update see those that serve on: else each further one would go where the first one is."""
    fleet = Fleet(folder, settings_for(folder), inventory=TwoHosts())
    try:
        await fleet.manager.boot()
        await fleet.create(placement="spread")
        await fleet.running()
        [first] = fleet.manager.get("a").workers
        await fleet.create(name="b", node="one" if first.node == "two" else "two")  # the other host is the busier one
        await fleet.create(name="c", node="one" if first.node == "two" else "two")
        for name in "bc":
            await fleet.running(name)
        await fleet.manager.update("a", {"replicas": 2}, wait=True)
        assert {each.node for each in fleet.manager.get("a").workers} == {"one", "two"}
    finally:
        await fleet.end()


async def test_rebalancing_moves_workers_to_the_emptier_host_without_a_gap(folder: Path) -> None:
    hosts = TwoHosts()
    hosts.problem = "it is not there yet"
    fleet = Fleet(folder, settings_for(folder), inventory=hosts)
    try:
        await fleet.manager.boot()
        for name in "ab":
            await fleet.create(name=name)
            await fleet.running(name)
        hosts.problem = ""
        planned = await fleet.manager.rebalance(dry_run=True)
        [move] = planned["moves"]
        assert (move["instance"], move["from"]["node"], move["to"]["node"]) == ("a", "one", "two")
        before = fleet.manager.get("a").pid
        assert [each.node for each in fleet.manager.get("a").workers] == ["one"], "a plan moves nothing"

        gaps: list[str] = []
        fleet.directory.subscribe(
            lambda name, entry: None if entry is not None and entry.endpoints else gaps.append(name)
        )
        moved = await fleet.manager.rebalance()

        assert [each["outcome"] for each in moved["moves"]] == ["moved"]
        view = await fleet.running("a", not_pid=before)
        assert [each.node for each in view.workers if each.role == "serving"] == ["two"]
        assert not gaps
        again = await fleet.manager.rebalance()
        assert (again["moves"], len(again["stays"])) == ([], 2)
    finally:
        await fleet.end()


async def test_a_move_that_fails_leaves_the_worker_where_it_serves(folder: Path) -> None:
    hosts = TwoHosts()
    fleet = Fleet(folder, settings_for(folder), inventory=hosts)
    try:
        await fleet.manager.boot()
        await fleet.create()
        before = await fleet.running()
        instance = fleet.manager._instances["a"]
        with pytest.raises(UpdateFailed, match="three is no longer available"):
            await instance.move(0, Place("three"))
        assert fleet.manager.get("a").pid == before.pid
        assert fleet.manager.get("a").state is State.RUNNING
        with pytest.raises(NotRunning):
            await instance.move(1, Place("two"))
    finally:
        await fleet.end()


async def test_the_devices_of_an_instance_are_those_it_would_be_placed_on(folder: Path) -> None:
    fleet = Fleet(folder, settings_for(folder), inventory=TwoHosts())
    try:
        await fleet.manager.boot()
        await fleet.create(name="a", load="on_demand")
        assert fleet.manager.devices("a") == ("one",)
        assert fleet.manager.devices("unknown") == ()
    finally:
        await fleet.end()


async def test_two_updates_at_a_time_that_do_not_fit_together_are_not_both_taken(fleets: Fleets) -> None:
    fleet = fleets()
    await fleet.manager.boot()
    await fleet.create(load="on_demand", min_replicas=1, max_replicas=5)
    changes: list[dict[str, int]] = [{"min_replicas": 4}, {"max_replicas": 2}]
    found = await asyncio.gather(*(fleet.manager.update("a", each) for each in changes), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["InstanceView", "ValidationError"]
    spec = fleet.manager.get("a").spec
    assert spec.min_replicas <= spec.max_replicas


async def test_a_plan_of_hundreds_of_instances_holds_the_loop_for_some_turns_only(fleets: Fleets) -> None:
    """Each is placed beside all others: a thousand took the loop 0.9 s, and hours with 64 workers each."""
    fleet, held = fleets(), [0.0]
    await fleet.manager.boot()
    wanted = [InstanceSpec(name=f"p{number}", model_id="fake", max_batch_tokens=1024) for number in range(400)]
    watching = asyncio.create_task(watch_turns(held))
    planned = await fleet.manager.plan(wanted)
    watching.cancel()
    assert [each.instance for each in planned.workers] == [spec.name for spec in wanted]
    assert max(held) < 0.03
    many = [replace(spec, replicas=64) for spec in wanted]
    with pytest.raises(ValidationError, match="25600 workers are more than the 2000 of a plan"):
        await fleet.manager.plan(many)


async def test_plans_are_made_one_at_a_time_and_workers_that_run_do_not_count(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waited up to 0.9 s for the GIL while six were made at once."""
    fleet, makes, at_once = fleets(), [0], list[int]()
    plan_fleet = fleet_plan.plan_fleet

    def counted(*given: Any) -> Any:
        makes[0] += 1
        try:
            at_once.append(makes[0])
            return plan_fleet(*given)
        finally:
            makes[0] -= 1

    monkeypatch.setattr(fleet_plan, "plan_fleet", counted)
    await fleet.manager.boot()
    await fleet.create()
    await fleet.running()
    monkeypatch.setattr(fleet_plan, "MAX_WORKERS", 100)
    wanted = [InstanceSpec(name=f"p{number}", model_id="fake", max_batch_tokens=1024) for number in range(100)]
    wanted.append(fleet.manager.get("a").spec)
    await asyncio.gather(*(fleet.manager.plan(wanted) for _ in range(6)))
    assert at_once == [1] * 6


async def test_a_plan_under_way_whose_instance_is_deleted_names_it(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleets()
    await fleet.manager.boot()
    create = fleet.manager.create

    async def create_and_delete(spec: InstanceSpec) -> InstanceView:
        await create(spec)
        return await fleet.manager.delete(spec.name)

    monkeypatch.setattr(fleet.manager, "create", create_and_delete)
    with pytest.raises(InstanceNotFound, match="'a' not found"):
        await fleet.manager.carry_out([InstanceSpec(name="a", model_id="fake")])


async def test_a_key_with_more_than_its_share_of_the_places_loses_its_least_valuable_one(fleets: Fleets) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",), max_instances=3))
    await fleet.manager.boot()
    first, second, third = [str(await fleet.manager.declare(f"org/{name}", "one")) for name in ("a", "b", "c")]
    with pytest.raises(Overloaded):
        await fleet.manager.declare("org/d", "one")
    values = {first: None, second: 2.0, third: 1.0}

    fourth = await fleet.manager.declare("org/d", "two", values.__getitem__)

    assert sorted(view.spec.name for view in fleet.manager.list()) == sorted([first, second, str(fourth)])
    with pytest.raises(Overloaded):  # one of three is its share, and the first key is alone above its own
        await fleet.manager.declare("org/e", "two", lambda name: None)


async def test_a_model_that_calls_had_made_and_that_fails_gives_its_place_to_another(fleets: Fleets) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",), max_instances=1))
    await fleet.manager.boot()
    await fleet.create(f"fail-permanent={Code.MODEL_NOT_FOUND.value}", by_call=True)
    await fleet.until(lambda entry: entry.state is State.FAILED)

    second = await fleet.manager.declare("org/second")

    assert [view.spec.name for view in fleet.manager.list()] == [second]
    with pytest.raises(Overloaded):
        await fleet.manager.declare("org/third")


async def test_a_model_that_gave_its_place_as_it_failed_is_not_made_again_for_a_while(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "allows", lambda patterns, model_id: True)
    fleet = fleets(on_demand=OnDemandSettings(max_instances=1))
    await fleet.manager.boot()
    missing = f"fail-permanent={Code.MODEL_NOT_FOUND.value}"
    await fleet.create(missing, by_call=True)
    await fleet.until(lambda entry: entry.state is State.FAILED)
    reason, retry_s, code = fleet.manager.failure("a")
    assert (retry_s, code) == (None, Code.MODEL_NOT_FOUND)
    model_id = fleet.manager.get("a").spec.model_id
    other = await fleet.manager.declare("org/other", "one")

    with pytest.raises(ModelNotFound) as refused:
        await fleet.manager.declare(model_id, "two", lambda name: 0.0)

    assert refused.value.message == reason
    assert [view.spec.name for view in fleet.manager.list()] == [other]


async def _fail_for_good(fleet: Fleet) -> None:
    """Instance `a`, made by calls, and `b`, by a user, have a model that does not exist."""
    await fleet.manager.boot()
    for name, is_by_call in (("a", True), ("b", False)):
        await fleet.create(f"fail-permanent={Code.MODEL_NOT_FOUND.value}", name, by_call=is_by_call)
        await fleet.until(lambda entry: entry.state is State.FAILED, name)


async def test_a_failed_model_that_calls_had_made_is_given_up_and_one_that_has_not_stays(fleets: Fleets) -> None:
    fleet = fleets()
    await _fail_for_good(fleet)
    await fleet.manager.give_up("a")
    await fleet.manager.give_up("b")
    assert [view.spec.name for view in fleet.manager.list()] == ["b"]
    assert fleet.manager.failure("b")[2] is None


async def test_a_model_that_calls_had_made_and_that_has_failed_for_good_is_no_alarm(fleets: Fleets) -> None:
    fleet = fleets()
    await _fail_for_good(fleet)
    assert [alarm.split(":")[0] for alarm in fleet.manager.alarms()] == ["b"]


@pytest.mark.parametrize("limits", [{"max_instances": 4}, {"instance_port_start": 23200, "instance_port_end": 23204}])
async def test_instances_of_calls_leave_places_and_ports_to_an_operator(
    fleets: Fleets, limits: dict[str, object]
) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",)), **limits)
    await fleet.manager.boot()
    for number in range(3):
        await fleet.manager.declare(f"org/{number}")

    with pytest.raises(Overloaded) as refused:
        await fleet.manager.declare("org/more")

    assert refused.value.retry_after_s
    await fleet.create(load="on_demand")


async def test_a_tag_of_a_user_does_not_count_an_instance_among_those_of_calls(fleets: Fleets) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",), max_instances=1))
    await fleet.manager.boot()
    await fleet.create(load="on_demand", tags={"made_by": "call", "made_for": "one"})

    made = await fleet.manager.declare("org/first", "two", lambda name: 0.0)

    assert {view.spec.name for view in fleet.manager.list()} == {"a", made}


async def test_instances_that_calls_have_made_leave_no_series_in_the_metrics(fleets: Fleets) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",)))
    await fleet.manager.boot()
    pages = []
    for number in range(3):
        name = str(await fleet.manager.declare(f"org/{number}"))
        fleet.metrics.count(catalogue.RESTARTS, name)
        await fleet.manager.delete(name)
        page = await fleet.metrics.page()
        pages.append([(family.name, each.labels) for family in page for each in page[family] if each.labels])
    assert pages[0] == pages[2]
    assert (catalogue.DELETED.name, {"instance": "(by calls)"}) in pages[0]


async def test_of_the_logs_of_instances_that_calls_have_made_the_newest_few_stay(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "GONE_LOGS", 2)
    fleet = fleets(on_demand=OnDemandSettings(models=("org/*",), max_instances=1))
    await fleet.manager.boot()
    folder = fleet.settings.log_dir
    (folder / "crashes").mkdir(parents=True)
    (folder / "org-own.log").write_text("of an instance that a user has deleted")
    names = []
    for number in range(4):
        if names:
            await fleet.manager.delete(names[-1])
        name = str(await fleet.manager.declare(f"org/{number}"))
        names.append(name)
        for path in (f"{name}.log", f"{name}.log.1", f"crashes/{name}-0-20260101T000000.json"):
            (folder / path).write_text(name)
            os.utime(folder / path, (number, number))

    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    of_last = [f"crashes/{name}-0-20260101T000000.json", f"{name}.log", f"{name}.log.1"]
    assert left == sorted(["org-own.log", *of_last, *(f"gone/{each}.log" for each in names[1:3])])
    log = await LocalLogs(folder).open(names[2], LogFilter(), follow=False)
    assert log is not None
    assert await LocalLogs(folder).open(names[0], LogFilter(), follow=False) is None


async def test_the_log_of_the_next_instance_of_a_name_is_not_the_one_that_is_set_aside(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was free before: the log that the next worker had opened was moved, then never rotated, and removed."""
    fleet = fleets(on_demand=OnDemandSettings(models=("*",)))
    await fleet.manager.boot()
    log_file = fleet.settings.log_dir / "a.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    moving, disk_answers = threading.Event(), threading.Event()

    def move(folder: Path, name: str) -> None:
        moving.set()
        assert disk_answers.wait(LIMIT_S)
        logs.set_log_aside(folder, name)

    monkeypatch.setattr(manager_module, "set_log_aside", move)
    await fleet.create(load="on_demand", by_call=True)
    log_file.write_text("first")
    deletion = asyncio.create_task(fleet.manager.delete("a"))
    await asyncio.to_thread(moving.wait, LIMIT_S)
    try:
        with pytest.raises(InstanceExists):
            await fleet.create(load="on_demand", by_call=True)
    finally:
        disk_answers.set()
        await deletion

    await fleet.create(load="on_demand", by_call=True)
    log_file.write_text("second")
    assert (log_file.parent / logs.GONE / "a.log").read_text() == "first"


async def test_a_purge_removes_the_logs_of_that_instance_alone(fleets: Fleets) -> None:
    fleet = fleets()
    await fleet.manager.boot()
    folder, crashes = fleet.settings.log_dir, fleet.settings.log_dir / "crashes"
    crashes.mkdir(parents=True)
    mine = [folder / "a.log", folder / "a.log.1", crashes / "a-0-20261121T120000.000000Z.json"]
    others = [folder / "a.log.log", folder / "a-0.log", crashes / "a-0-0-20261121T120000.000000Z.json"]
    for path in (*mine, *others):
        path.write_text("{}")
    await fleet.create(load="on_demand")
    await fleet.manager.delete("a", purge=True)
    assert [path for path in (*mine, *others) if path.exists()] == others


async def test_the_log_says_which_instance_gets_no_calls_by_its_model_id(
    fleets: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleets()
    await fleet.manager.boot()
    keys: dict[str, dict[str, Any]] = {"a": {}, "b": {"pooling": "cls"}, "c": {}}
    for name, given in keys.items():
        await fleet.create(name=name, load="on_demand", **given)
    found = [vars(each) for each in caplog.records if "another embedding space" in each.message]
    assert [(each["instance"], each["space_of"]) for each in found] == [("b", "a")]


async def test_a_purge_removes_the_logs_before_another_instance_may_have_the_name(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleets()
    await fleet.manager.boot()
    removing, disk_answers = threading.Event(), threading.Event()

    def remove(folder: Path, name: str) -> None:
        removing.set()
        assert disk_answers.wait(LIMIT_S)
        raise PermissionError(f"{name}.log: not permitted")

    monkeypatch.setattr(manager_module, "remove_logs", remove)
    await fleet.create(load="on_demand")
    deletion = asyncio.create_task(fleet.manager.delete("a", purge=True))
    await asyncio.to_thread(removing.wait, LIMIT_S)
    second = asyncio.create_task(fleet.manager.delete("a", purge=True))
    try:
        with pytest.raises(InstanceExists):
            await fleet.create(load="on_demand")
    finally:
        disk_answers.set()
    with pytest.raises(Internal, match=r"not all of its logs: a\.log: not permitted"):
        await deletion
    with pytest.raises(InstanceNotFound):
        await second
    assert fleet.manager.list() == []


async def test_a_disk_that_does_not_answer_holds_no_name_of_a_model_that_calls_made(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("*",)))
    await fleet.manager.boot()
    disk_answers = threading.Event()
    monkeypatch.setattr(manager_module, "_LOG_LIMIT_S", 0.05)
    monkeypatch.setattr(manager_module, "set_log_aside", lambda folder, name: disk_answers.wait(LIMIT_S))
    await fleet.create(load="on_demand", by_call=True)
    try:
        await fleet.manager.delete("a")
        assert (await fleet.create(load="on_demand", by_call=True)).spec.name == "a"
        assert not disk_answers.is_set()
    finally:
        disk_answers.set()


async def test_calls_at_the_same_time_have_no_more_instances_made_and_none_of_another_model(fleets: Fleets) -> None:
    fleet = fleets(on_demand=OnDemandSettings(models=("*",), max_instances=2))
    await fleet.manager.boot()
    ids = [f"{owner}/model" for owner in "abcd"]

    answers = await asyncio.gather(*map(fleet.manager.declare, [*ids, *ids]), return_exceptions=True)

    models = {view.spec.name: view.spec.model_id for view in fleet.manager.list()}
    assert sorted(models.values()) == ["a/model", "b/model"]
    assert [models.get(str(name)) for name in answers[:2] + answers[4:6]] == ids[:2] * 2
    assert all(isinstance(each, Overloaded) for each in answers[2:4] + answers[6:])


async def test_series_of_deleted_instances_stay_for_the_last_ones_alone(
    fleets: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "_MAX_DELETED_SERIES", 2)
    fleet = fleets()
    await fleet.manager.boot()
    for name in ("a", "b", "a", "c", "d"):
        await fleet.create(name=name)
        await fleet.manager.delete(name)
    page = await fleet.metrics.page()
    (deleted,) = [samples for family, samples in page.items() if family is catalogue.DELETED]
    assert {each.labels["instance"]: each.value for each in deleted} == {"c": 1, "d": 1}
