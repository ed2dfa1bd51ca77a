"""The limit of workers' resident memory: its rules, and the replacement of real processes."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.fleet import Fleet
from tests.support.polling import eventually

from teimgr.control.events.fleet_events import EventLog
from teimgr.control.supervision.memory_limit import PAUSE_S, READINGS, MemoryLimit, Verdict
from teimgr.observability.exposition import text
from teimgr.spec import RouteEntry, State

BELOW, ABOVE = 99 << 20, 101 << 20
LIMIT = 100


def readings(limit: MemoryLimit, *sizes: int, now: float = 0.0) -> list[Verdict | None]:
    return [limit.read(0, size, LIMIT, now, fresh=False) for size in sizes]


def test_a_replica_that_stays_above_is_replaced_and_a_peak_is_not() -> None:
    limit = MemoryLimit()
    assert limit.read(0, BELOW, LIMIT, 0.0, fresh=True) is None

    assert readings(limit, *[ABOVE] * (READINGS - 1), BELOW) == [None] * READINGS
    assert readings(limit, *[ABOVE] * (READINGS + 1))[-2:] == [Verdict.REPLACE] * 2
    assert limit.problems([0]) == []


def test_two_replacements_have_a_pause_between_them() -> None:
    limit = MemoryLimit()
    readings(limit, *[ABOVE] * READINGS)
    limit.begin_pause(0, 0.0)

    limit.read(0, BELOW, LIMIT, 1.0, fresh=True)
    assert readings(limit, *[ABOVE] * 10, now=PAUSE_S - 1) == [None] * 10
    assert readings(limit, ABOVE, now=PAUSE_S) == [Verdict.REPLACE]


def test_a_model_that_is_larger_than_the_limit_is_a_problem_and_no_replacement() -> None:
    limit = MemoryLimit()
    assert limit.read(0, ABOVE, LIMIT, 0.0, fresh=True) is Verdict.TOO_LARGE

    assert readings(limit, *[ABOVE] * 10, now=2 * PAUSE_S) == [None] * 10
    assert limit.problems([0, 1]) == [
        "replica 0 has 101 MiB right after its start, more than max_rss_mib = 100: it is not replaced, as the next one "
        "would be as large"
    ]
    limit.read(0, ABOVE, 2 * LIMIT, 0.0, fresh=False)
    assert limit.problems([0]) == []


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
