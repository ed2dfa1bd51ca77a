"""The manager and its supervisors over a real nursery, with workers that fail as scripted."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest
from tests.support.fleet import LIMIT_S, Fleet
from tests.support.polling import eventually

from teimgr.control.launch.control_link import identify
from teimgr.control.launch.process_handle import look_up
from teimgr.control.supervision.lifecycle import ALARMING_FAILURES
from teimgr.errors import (
    AlreadyRunning,
    Code,
    InstanceExists,
    InstanceNotFound,
    InvalidConfig,
    InvalidGpuId,
    InvalidInstanceName,
    InvalidPort,
    MaxInstancesReached,
    NotRunning,
    PortAllocationFailed,
    PortConflict,
    Unavailable,
    ValidationError,
)
from teimgr.observability.exposition import text
from teimgr.spec import InstanceSpec, State, WorkerEndpoint
from teimgr.wire.frames import Method
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.router import Router

Fleets = Callable[..., Fleet]


# The verbs


@pytest.mark.clause("M2.4-at-once", "M5.3-ready")
async def test_a_created_instance_starts_becomes_ready_and_is_in_the_directory(fleet: Fleet) -> None:
    view = await fleet.create()
    assert view.state is State.STARTING

    view = await fleet.running()
    entry = fleet.entry()
    assert (view.state, view.restarts, view.spec.created_at is not None) == (State.RUNNING, 0, True)
    assert (entry.state, entry.dimension) == (State.RUNNING, 4)
    status = await identify(next(fleet.settings.run_dir.glob("*.sock")), LIMIT_S)
    assert status is not None
    assert (entry.endpoints[0].incarnation, view.pid) == (status.incarnation, status.pid)


@pytest.mark.clause("M2.6-stop")
async def test_stop_returns_when_the_process_is_gone_and_nothing_brings_it_back(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    assert pid is not None

    view = await fleet.manager.stop("a")

    assert (view.state, view.pid, view.spec.wanted_running) == (State.STOPPED, None, False)
    assert look_up(pid) is None
    assert fleet.left_over() == set()
    assert fleet.entry().endpoints == ()


async def test_start_after_stop_brings_a_new_process(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    await fleet.manager.stop("a")

    view = await fleet.manager.start("a")

    assert view.state in (State.STARTING, State.RUNNING)
    assert (await fleet.running(not_pid=pid)).spec.wanted_running


@pytest.mark.clause("M2.5-restarts")
async def test_restart_replaces_the_process_and_counts(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    assert pid is not None

    view = await fleet.manager.restart("a")

    assert (view.state in (State.STARTING, State.RUNNING), view.restarts) == (True, 1)
    assert look_up(pid) is None
    await fleet.running(not_pid=pid)


@pytest.mark.clause("M2.6-delete")
async def test_delete_leaves_nothing_but_the_log(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    assert pid is not None
    log = fleet.launcher.log_path("a")

    view = await fleet.manager.delete("a")

    assert view.spec.name == "a"
    assert look_up(pid) is None
    assert fleet.left_over() == set()
    assert fleet.directory.snapshot().entries == ()
    assert fleet.manager.list() == []
    assert log.exists()


@pytest.mark.clause("M2.6-conflicts")
async def test_commands_that_make_no_sense_are_refused(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()

    with pytest.raises(AlreadyRunning, match="already running"):
        await fleet.manager.start("a")
    await fleet.manager.stop("a")
    with pytest.raises(NotRunning, match="status: stopped"):
        await fleet.manager.stop("a")
    for verb in (fleet.manager.start, fleet.manager.stop, fleet.manager.restart, fleet.manager.delete):
        with pytest.raises(InstanceNotFound):
            await verb("nobody")


@pytest.mark.clause("M2.6-one-process")
async def test_two_starts_at_once_make_one_process(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()
    await fleet.manager.stop("a")

    results = await asyncio.gather(*(fleet.manager.start("a") for _ in range(5)), return_exceptions=True)

    assert sorted(type(result).__name__ for result in results) == ["AlreadyRunning"] * 4 + ["InstanceView"]
    await fleet.running()
    assert len(list(fleet.settings.run_dir.glob("*.sock"))) == 1


async def test_two_deletes_at_once_both_end(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.running()

    await asyncio.gather(fleet.manager.delete("a"), fleet.manager.delete("a"))

    assert fleet.manager.list() == []


async def test_a_stop_while_the_worker_starts_ends_it(fleet: Fleet) -> None:
    await fleet.create("never-ready")

    view = await fleet.manager.stop("a")

    assert view.state is State.STOPPED
    assert fleet.left_over() == set()


async def test_commands_in_any_order_leave_one_process_or_none(fleet: Fleet) -> None:
    await fleet.create()
    manager = fleet.manager
    verbs = [
        manager.restart,
        manager.stop,
        manager.start,
        manager.restart,
        manager.restart,
        manager.stop,
        manager.start,
    ]
    await asyncio.gather(*(verb("a") for verb in verbs), return_exceptions=True)

    await manager.restart("a")
    await fleet.running()
    assert len(list(fleet.settings.run_dir.glob("*.json"))) == 1
    await manager.stop("a")
    assert fleet.left_over() == set()


# Misbehaviour


@pytest.mark.clause("M2.5-restarts")
async def test_a_killed_worker_is_replaced(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    view = await fleet.running(not_pid=pid)

    assert (view.restarts, view.reason) == (1, None)


async def test_a_worker_that_crashes_once_is_tried_again(fleet: Fleet) -> None:
    await fleet.create("first-only,crash-after-ready=9")

    entry = await fleet.until(lambda entry: entry.reason is not None)
    assert "exited with status 9" in str(entry.reason)
    await fleet.until(lambda entry: entry.reason is None and bool(entry.endpoints))


@pytest.mark.clause("M2.5-status", "M5.4-backoff")
async def test_a_permanent_failure_is_told_and_not_tried_again(fleet: Fleet) -> None:
    await fleet.create(f"fail-permanent={Code.MODEL_NOT_FOUND.value}")

    entry = await fleet.until(lambda entry: entry.state is State.FAILED)

    view = fleet.manager.get("a")
    assert entry.reason == "scripted failure"
    assert (view.state, view.reason, view.pid, view.restarts) == (State.FAILED, "scripted failure", None, 0)
    assert fleet.left_over() == set()


async def test_a_passing_failure_is_tried_again(fleet: Fleet) -> None:
    await fleet.create("first-only,fail-transient")

    assert (await fleet.running()).restarts == 1


async def test_a_start_that_fails_again_and_again_is_an_alarm_with_its_cause(fleet: Fleet) -> None:
    fleet.events.note([])
    await fleet.create("fail-transient")

    await eventually(fleet.manager.alarms)

    (alarm,) = fleet.manager.alarms()
    assert re.fullmatch(r"a: it failed \d+ times in a row, the last time because scripted failure", alarm)
    worker = fleet.manager.get("a").workers[0]
    assert worker.attempt is not None
    assert worker.attempt > ALARMING_FAILURES
    crashes = [each for each in fleet.events.history("a") if each.event == "crashed"]
    assert [each.count >= ALARMING_FAILURES for each in crashes] == [True], "they are one event"


async def test_a_failed_instance_can_be_stopped_and_deleted(fleet: Fleet) -> None:
    await fleet.create("fail-permanent")
    await fleet.until(lambda entry: entry.state is State.FAILED)

    assert (await fleet.manager.stop("a")).state is State.STOPPED
    await fleet.manager.delete("a")


@pytest.mark.clause("M2.4-startup-timeout")
async def test_a_worker_that_is_never_ready_has_failed_after_its_time(fleet: Fleet) -> None:
    await fleet.create("never-ready", startup_timeout_secs=1)

    entry = await fleet.until(lambda entry: entry.state is State.FAILED)

    assert entry.reason == "not ready within 1 s"
    assert fleet.left_over() == set()


async def test_the_time_of_a_start_begins_with_its_load_slot(fleet: Fleet) -> None:
    fleet.manager._context.planner.slots._limit = lambda gpu: 1
    await fleet.create("never-ready", name="first", startup_timeout_secs=2)
    await fleet.create(name="second", startup_timeout_secs=1)

    view = await fleet.running("second")

    assert fleet.manager.get("first").state is State.FAILED, "it held the only slot"
    assert (view.restarts, view.reason) == (0, None)


@pytest.mark.clause("M2.6-stop")
async def test_a_worker_that_ignores_the_drain_is_killed_when_the_grace_is_over(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=1)
    await fleet.manager.boot()
    await fleet.create("ignore-term")
    pid = (await fleet.running()).pid
    assert pid is not None

    assert (await fleet.manager.stop("a")).state is State.STOPPED
    assert look_up(pid) is None


@pytest.mark.clause("M5.4-restart")
@pytest.mark.parametrize("flags", ["first-only,hang-probe", "first-only,fail-probe"])
async def test_a_worker_without_proof_of_health_is_replaced(fleets: Fleets, flags: str) -> None:
    fleet = fleets(max_failures_before_restart=2)
    await fleet.manager.boot()
    await fleet.create(flags)
    pid = (await fleet.running()).pid

    entry = await fleet.until(lambda entry: entry.reason is not None)
    assert "2 health probes in a row failed" in str(entry.reason)
    await fleet.running(not_pid=pid)
    assert 'tei_manager_health_check_failures_total{instance="a"} 2' in text(await fleet.metrics.page())


async def test_a_busy_worker_needs_no_probe(fleet: Fleet) -> None:
    """Its PROBEs hang; the batches it counts are proof enough."""
    await fleet.create("busy,hang-probe")
    await fleet.running()

    await eventually(lambda: fleet.manager.get("a").last_health_check)

    assert fleet.manager.get("a").restarts == 0


async def test_what_held_the_loop_of_a_worker_is_an_alarm(fleet: Fleet) -> None:
    await fleet.create("alarm=held")
    await fleet.running()

    await eventually(lambda: fleet.manager.alarms() == ["held"])


async def test_probes_that_recover_in_time_change_nothing(fleet: Fleet) -> None:
    await fleet.create("fail-probes=2")
    pid = (await fleet.running()).pid

    await eventually(lambda: fleet.manager.get("a").health_check_failures == 2)
    await eventually(lambda: fleet.manager.get("a").last_health_check)

    view = fleet.manager.get("a")
    assert (view.pid, view.health_check_failures) == (pid, 0)


async def test_a_worker_whose_self_test_fails_is_out_of_the_routes_until_the_next_good_probe(fleet: Fleet) -> None:
    await fleet.create("fail-probes=1")
    (endpoint,) = (await fleet.until(lambda entry: bool(entry.endpoints))).endpoints

    entry = await fleet.until(lambda entry: not entry.endpoints)
    assert (entry.state, fleet.manager.get("a").health_check_failures) == (State.RUNNING, 1)
    assert (await fleet.until(lambda entry: bool(entry.endpoints))).endpoints == (endpoint,)
    assert fleet.manager.get("a").restarts == 0


async def test_a_missed_probe_ends_the_routes_to_a_worker_that_has_a_healthy_sibling(fleet: Fleet) -> None:
    await fleet.create("first-only,hang-probes=1", replicas=2)
    both = (await fleet.until(lambda entry: len(entry.endpoints) == 2)).endpoints

    (sibling,) = (await fleet.until(lambda entry: len(entry.endpoints) < 2)).endpoints
    assert sibling in both
    assert fleet.manager.get("a").health_check_failures == 1
    assert (await fleet.until(lambda entry: len(entry.endpoints) == 2)).endpoints == both


async def test_the_only_worker_stays_in_the_routes_at_its_first_missed_probe(fleet: Fleet) -> None:
    """At the second in a row it leaves them: see the stopped worker below."""
    await fleet.create("hang-probes=1")
    (endpoint,) = (await fleet.until(lambda entry: bool(entry.endpoints))).endpoints
    seen: list[tuple[WorkerEndpoint, ...]] = [(endpoint,)]
    fleet.directory.subscribe(lambda name, entry: seen.append(entry.endpoints if entry else ()))

    await eventually(lambda: fleet.manager.get("a").last_health_check)

    assert set(seen) == {(endpoint,)}
    view = fleet.manager.get("a")
    assert (view.restarts, view.health_check_failures) == (0, 0)
    assert 'health_check_failures_total{instance="a"} 1' in text(await fleet.metrics.page())


@pytest.mark.clause("M5.4-restart")
@pytest.mark.parametrize(("flag", "survives"), [("compute-embed=8", True), ("deadlock-embed", False)])
async def test_a_worker_whose_loop_computes_is_kept_and_one_in_a_deadlock_is_replaced(
    fleets: Fleets, flag: str, survives: bool
) -> None:
    """Both give no answer. The first is busy for longer than the three missed probes that end the second."""
    fleet = fleets(health_probe_timeout_secs=2)
    await fleet.manager.boot()
    await fleet.create(f"first-only,{flag}")
    view = await fleet.running()
    router = Router()
    fleet.directory.subscribe(router.apply)
    router.update(fleet.directory.snapshot())
    with router.lease(Target(instance_name="a")) as lease:
        call = await lease.start(Method.EMBED, b"")
        if survives:
            await call.answer
            assert (await fleet.running()).pid == view.pid
        else:
            with pytest.raises(Unavailable):
                await call.answer
            await fleet.running(not_pid=view.pid)
    await router.close()


async def test_a_stopped_worker_is_replaced_within_seconds_and_its_callers_are_told(fleets: Fleets) -> None:
    """Three probes in a row without an answer end it before a single one has had the whole limit of a probe."""
    fleet = fleets(health_probe_timeout_secs=10)
    await fleet.manager.boot()
    await fleet.create("first-only,hang-embed")
    view = await fleet.running()
    router = Router()
    fleet.directory.subscribe(router.apply)
    router.update(fleet.directory.snapshot())
    with router.lease(Target(instance_name="a")) as lease:
        call = await lease.start(Method.EMBED, b"")
        assert view.pid is not None
        os.kill(view.pid, signal.SIGSTOP)
        clock = asyncio.get_running_loop().time
        stopped = clock()
        await fleet.until(lambda entry: not entry.endpoints)
        unrouted = clock()
        with pytest.raises(Unavailable):
            await call.answer
        told = clock()

    await fleet.running(not_pid=view.pid)
    # Usually 3 s: the interval, and the shorter limit of the probes after the first. Three full limits are 30 s.
    assert unrouted - stopped < 10
    assert told - unrouted < 10
    await router.close()


async def test_a_worker_that_drains_by_itself_is_replaced(fleet: Fleet) -> None:
    await fleet.create("first-only,drain-itself")

    entry = await fleet.until(lambda entry: entry.reason is not None)
    assert entry.reason == "the worker was asked to end by another process"
    await fleet.until(lambda entry: bool(entry.endpoints) and entry.reason is None)


async def test_a_deaf_worker_can_be_deleted(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=1)
    await fleet.manager.boot()
    await fleet.create("deaf,ignore-term")
    await eventually(lambda: fleet.manager.get("a").pid)

    await fleet.manager.delete("a")

    assert fleet.left_over() == set()


async def test_a_dead_nursery_costs_no_instance(fleet: Fleet) -> None:
    await fleet.create()
    view = await fleet.running()
    nursery = fleet.launcher.nursery.pid
    assert nursery is not None
    os.kill(nursery, signal.SIGKILL)

    await fleet.create(name="b")

    await fleet.running("b")
    assert (fleet.manager.get("a").pid, fleet.manager.get("a").restarts) == (view.pid, 0)
    await fleet.manager.stop("a")


async def test_the_worker_of_one_instance_cannot_harm_another(fleet: Fleet) -> None:
    await fleet.create(name="good")
    good = await fleet.running("good")
    await fleet.create("crash-after-ready=1", name="bad")

    await eventually(lambda: fleet.manager.get("bad").restarts >= 3)

    assert fleet.manager.get("good").pid == good.pid
    await fleet.manager.delete("bad")
    await fleet.manager.delete("good")
    assert fleet.left_over() == set()


# Names and ports


async def test_wrong_requests_are_refused_each_with_its_error(fleet: Fleet) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as stranger:
        taken = stranger.getsockname()[1]
        await fleet.create(name="holder", port=23500)
        for error, values in [
            (InstanceExists, {"name": "holder"}),
            (InvalidInstanceName, {"name": "../x"}),
            (ValidationError, {"model_id": ""}),
            (ValidationError, {"max_batch_tokens": -1}),  # 0 asks for what the GPU has room for
            (ValidationError, {"dtype": "int3"}),
            (InvalidConfig, {"extra_args": ("--nonsense",)}),
            (InvalidGpuId, {"gpu_id": 0}),
            (InvalidPort, {"port": 80}),
            (PortConflict, {"port": 23500}),
            (PortConflict, {"port": fleet.settings.api_port}),
            (PortConflict, {"port": fleet.settings.grpc_port}),
            (PortConflict, {"port": taken}),
        ]:
            with pytest.raises(error):
                await fleet.manager.create(InstanceSpec(**({"name": "x", "model_id": "fake"} | values)))  # type: ignore[arg-type]

    assert [view.spec.name for view in fleet.manager.list()] == ["holder"]


async def test_creates_at_once_share_neither_name_nor_port(fleets: Fleets) -> None:
    fleet = fleets(instance_port_start=24500, instance_port_end=24503)
    await fleet.manager.boot()

    names = ["a", "a", "b", "c", "d"]
    results = await asyncio.gather(*(fleet.create(name=name) for name in names), return_exceptions=True)

    kinds = [type(result) for result in results]
    assert kinds.count(InstanceExists) == 1
    assert kinds.count(PortAllocationFailed) == 1
    assert len({view.spec.port for view in fleet.manager.list()}) == 3


@pytest.mark.clause("M2.4-max-instances")
async def test_no_more_instances_than_allowed(fleets: Fleets) -> None:
    fleet = fleets(max_instances=1)
    await fleet.manager.boot()
    await fleet.create()

    with pytest.raises(MaxInstancesReached):
        await fleet.create(name="b")
    await fleet.manager.delete("a")
    await fleet.create(name="b")


# The CPU


async def test_threads_are_shared_anew_when_the_fleet_changes(fleet: Fleet) -> None:
    async def threads_of(name: str) -> int:
        pid = fleet.manager.get(name).pid
        for path in fleet.settings.run_dir.glob("*.sock"):
            status = await identify(path, LIMIT_S)
            if status and status.pid == pid:
                return status.threads
        raise AssertionError(f"{name} does not answer")

    async def shared(**expected: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while {name: await threads_of(name) for name in expected} != expected:
                pass

    await fleet.create(name="a")
    await fleet.running("a")
    await shared(a=4)

    await fleet.create(name="b")
    await fleet.running("b")
    await shared(a=2, b=2)

    await fleet.manager.stop("b")
    await shared(a=4)


# The daemon's end


@pytest.mark.clause("M5.5-shutdown")
async def test_shutdown_stops_all_in_parallel_and_keeps_what_is_wanted(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=2)
    await fleet.manager.boot()
    for number in range(4):
        await fleet.create("ignore-term", name=f"n{number}")
    for number in range(4):
        await fleet.running(f"n{number}")
    begin = asyncio.get_running_loop().time()

    await fleet.manager.shutdown()

    assert asyncio.get_running_loop().time() - begin < 7, "one grace for all, not one for each"
    assert fleet.left_over() == set()
    await fleet.launcher.close()

    after = fleets()
    await after.manager.boot()
    for number in range(4):
        await after.running(f"n{number}")


async def test_a_shutdown_may_have_less_time_than_the_grace(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=3600)
    await fleet.manager.boot()
    await fleet.create("ignore-term")
    await fleet.running()

    await asyncio.wait_for(fleet.manager.shutdown(within_s=0.1), LIMIT_S)

    assert fleet.left_over() == set()


async def test_a_second_shutdown_without_grace_cuts_the_first_short(fleets: Fleets) -> None:
    fleet = fleets(graceful_shutdown_timeout_secs=3600)
    await fleet.manager.boot()
    await fleet.create("ignore-term")
    await fleet.running()
    patient = asyncio.create_task(fleet.manager.shutdown())
    await fleet.until(lambda entry: entry.state is State.STOPPING)

    await fleet.manager.shutdown(at_once=True)

    await asyncio.wait_for(patient, LIMIT_S)


async def test_no_descriptor_is_leaked_over_many_lives(fleet: Fleet) -> None:
    async def once() -> None:
        await fleet.create()
        await fleet.running()
        await fleet.manager.delete("a")

    await once()
    before = psutil.Process().num_fds()
    for _ in range(5):
        await once()

    assert psutil.Process().num_fds() == before


async def test_a_stop_in_the_very_moment_of_a_crash_ends_stopped(fleet: Fleet) -> None:
    for _ in range(20):
        await fleet.create()
        pid = (await fleet.running()).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while look_up(pid) is not None:
            pass  # our own loop must not see the end before the stop does

        await fleet.manager.stop("a")
        assert fleet.manager.get("a").state is State.STOPPED
        await fleet.manager.delete("a")


async def test_a_shutdown_after_a_failed_boot_ends(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fleets()
    await before.manager.boot()
    await before.create()
    await before.end()
    fleet = fleets()

    async def fail() -> list[object]:
        raise OSError("the run directory vanished")

    monkeypatch.setattr(fleet.launcher, "find", fail)
    with pytest.raises(OSError, match="vanished"):
        await fleet.manager.boot()

    await asyncio.wait_for(fleet.manager.shutdown(), LIMIT_S)
