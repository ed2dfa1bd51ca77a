"""Fleet events: found by comparing views, kept in a ring, followed by readers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.polling import eventually

from teimgr.control.events.fleet_events import KEPT_PER_INSTANCE, EventFile, EventLog, events_path, known_to
from teimgr.spec import EVENTS, Incident, InstanceSpec, InstanceView, State

VIEW = InstanceView(spec=InstanceSpec(name="a", model_id="m", tags={"team": "x"}), state=State.STARTING)
CRASH = Incident(event="crashed", reason="killed", at="2026-03-04T12:00:00.123456Z", crash_report="a-0.json")
GROWTH = Incident(event="over_memory", reason="700 MiB", at="2026-03-04T12:00:01.123456Z")
LOST = Incident(event="no_host", reason="no other host takes it", at="2026-03-04T12:00:02.123456Z")
STOPPED = replace(
    VIEW,
    state=State.STOPPED,
    incident=GROWTH,
    spec=replace(VIEW.spec, max_batch_tokens=1, wanted_running=False),
)
LIMIT_S = 10.0


def kinds(events: EventLog, number: int = 0) -> list[str]:
    return [each.event for each in events.since(number)]


def began(*views: InstanceView) -> EventLog:
    events = EventLog()
    events.note(views)
    return events


def test_what_is_there_at_first_has_not_happened() -> None:
    assert kinds(began(VIEW)) == []


@pytest.mark.clause("N-events")
def test_a_life_is_told_step_by_step() -> None:
    events = began()
    for view in (
        VIEW,
        replace(VIEW, state=State.RUNNING),
        replace(VIEW, state=State.RUNNING, health_check_failures=1),
        replace(VIEW, state=State.RUNNING, health_check_failures=2),
        replace(VIEW, state=State.RUNNING, incident=CRASH),
        replace(VIEW, state=State.RUNNING, incident=LOST),
        replace(VIEW, state=State.RUNNING, incident=GROWTH),
        replace(VIEW, state=State.RUNNING, incident=GROWTH, spec=replace(VIEW.spec, max_batch_tokens=1)),
        replace(STOPPED, state=State.STOPPING),
        STOPPED,
        replace(STOPPED, state=State.FAILED, reason="broken"),
    ):
        events.note([view])
    events.note([])

    told = kinds(events)
    assert told == [
        "created",
        "starting",
        "running",
        "unhealthy",
        "crashed",
        "no_host",
        "over_memory",
        "updated",
        "stopping",
        "stopped",
        "failed",
        "deleted",
    ]
    of_others = {"unloaded", "evicted", "war", "scaled", "applied", "refused", "taken_back", "update_failed"}
    of_others |= {"reloaded", "reload_refused"}
    assert set(told) == set(EVENTS) - of_others
    (crashed,) = [event for event in events.since(0) if event.event == "crashed"]
    assert (crashed.reason, crashed.crash_report) == ("killed", "a-0.json")
    last = list(events.since(0))[-1]
    assert (last.id, last.instance, last.reason, last.tags) == (12, "a", "broken", {"team": "x"})


def test_an_instance_has_a_bounded_history_until_it_is_deleted() -> None:
    events = began()
    for number in range(KEPT_PER_INSTANCE + 5):
        events.note([replace(VIEW, state=(State.RUNNING, State.STOPPED)[number % 2], reason=str(number))])
    assert len(events.history("a")) == KEPT_PER_INSTANCE
    assert events.history("a")[-1].reason == str(KEPT_PER_INSTANCE + 4)
    events.note([])
    assert events.history("a") == []


def test_failures_that_repeat_are_one_event_with_a_count_and_bury_nothing() -> None:
    events = began(replace(VIEW, state=State.RUNNING))
    for pid in range(40):
        crash = replace(CRASH, reason=f"worker {pid} was killed", at=f"2026-03-04T12:00:00.{pid:06}Z")
        events.note([replace(VIEW, state=State.STARTING, incident=crash)])
        events.note([replace(VIEW, state=State.RUNNING, incident=crash)])
    other = replace(CRASH, reason="no memory", at="2026-03-04T12:01:00.000000Z")
    events.note([replace(VIEW, state=State.RUNNING, incident=other)])

    told = [(each.event, each.count, each.reason) for each in events.history("a")]
    assert told == [
        ("crashed", 40, "worker 39 was killed"),
        ("starting", 40, None),
        ("running", 40, None),
        ("crashed", 1, "no memory"),
    ]
    repeated = events.history("a")[0]
    assert repeated.replaces is not None
    assert repeated.replaces < repeated.id
    assert repeated.first_timestamp is not None
    assert repeated.first_timestamp <= repeated.timestamp
    assert [each.id for each in events.since(0)] == [each.id for each in events.history("a")], "the ring has the same"


async def test_a_follower_is_told_of_what_the_ring_dropped_and_of_nothing_that_was_folded() -> None:
    events = EventLog(kept=3)
    events.note([VIEW])
    for number in range(5):
        events.note([replace(VIEW, incident=replace(CRASH, at=str(number)))])
    folded = [(each.count, missed) async for each, missed in _closed(events).follow(1)]
    assert folded == [(5, 0)]

    events = EventLog(kept=3)
    events.note([VIEW])
    for number in range(8):
        events.note([replace(VIEW, state=(State.STOPPED, State.RUNNING)[number % 2])])
    assert [(each.id, missed) async for each, missed in _closed(events).follow(2)] == [(6, 3), (7, 0), (8, 0)]


def _closed(events: EventLog) -> EventLog:
    events.close()
    return events


def test_an_event_tells_who_ordered_it_until_its_effect_has_come() -> None:
    events = began()
    events.ordered("a", "key ops")
    for view in (VIEW, replace(VIEW, state=State.RUNNING), replace(VIEW, state=State.RUNNING, incident=CRASH), VIEW):
        events.note([view])
    events.ordered("a", "local")
    for state in (State.STOPPING, State.STOPPED, State.STARTING):
        events.note([replace(VIEW, state=state)])

    assert [(each.event, each.by) for each in events.since(0)] == [
        ("created", "key ops"),
        ("starting", "key ops"),
        ("running", None),
        ("crashed", None),
        ("starting", None),
        ("stopping", "local"),
        ("stopped", "local"),
        ("starting", None),
    ]


def test_the_ring_keeps_the_latest_and_numbers_go_on() -> None:
    events = EventLog(kept=3)
    events.note([])
    for state in (State.STARTING, State.RUNNING, State.STOPPED, State.STARTING):
        events.note([replace(VIEW, state=state)])
    assert [each.id for each in events.since(0)] == [3, 4, 5]
    assert events.latest == 5


async def test_a_follower_hears_what_was_and_what_comes_until_the_end() -> None:
    events = began()
    events.note([VIEW])
    heard: list[str] = []

    async def follow() -> None:
        async for each, _ in events.follow(1):
            heard.append(each.event)

    task = asyncio.create_task(follow())
    await eventually(lambda: heard)
    events.note([replace(VIEW, state=State.RUNNING)])
    await eventually(lambda: len(heard) == 2)
    events.close()
    await asyncio.wait_for(task, LIMIT_S)
    assert heard == ["starting", "running"]


def test_the_change_of_one_instance_is_found_without_the_others() -> None:
    events = EventLog()
    events.note([VIEW])

    events.note_one("new", replace(VIEW, spec=replace(VIEW.spec, name="new")))
    events.note_one(VIEW.spec.name, replace(VIEW, state=State.RUNNING))
    events.note_one(VIEW.spec.name, None)
    events.note_one("unknown", None)

    found = [(event.instance, event.event) for event in events.since(0)]
    assert found == [
        ("new", "created"),
        ("new", VIEW.state.value),
        (VIEW.spec.name, "running"),
        (VIEW.spec.name, "deleted"),
    ]


@pytest.mark.parametrize(
    ("kind", "reason", "told"),
    [
        ("evicted", "evicted a: value 1 < 2, resident 3 s; for b-x", "evicted a: value 1 < 2, resident 3 s; for {}"),
        (
            "war",
            "war: 'a' and 'b-x' evicted each other 4 times in 3 s; 'a' does not evict 'b-x' for 5 s: value 1 <= 2",
            "war: 'a' and {0} evicted each other 4 times in 3 s; 'a' does not evict {0} for 5 s: value 1 <= 2",
        ),
        ("unloaded", "no more can be: held by 'b-x', 'a-2'", "no more can be: held by {}, 'a-2'"),
        ("failed", "no model 'b-x'", None),
        ("unloaded", None, None),
    ],
)
def test_an_event_names_other_instances_only_to_those_who_may_know_them(
    kind: str, reason: str | None, told: str | None
) -> None:
    events = began(VIEW)
    events.note([replace(VIEW, incident=Incident(event=kind, reason=reason or "", at=GROWTH.at))])
    event = replace(next(events.since(0)), reason=reason)

    assert known_to(event, lambda name: True) == event
    expected = reason if told is None else told.format("another instance")
    assert known_to(event, lambda name: name.startswith("a")) == replace(event, reason=expected)


VIEW = InstanceView(spec=InstanceSpec(name="a", model_id="m", tags={"team": "x"}), state=State.STARTING)


async def written(file: EventFile, views: list[InstanceView], log: EventLog | None = None) -> EventLog:
    log = log or EventLog()
    log.note([])
    async with file.following(log):
        for view in views:
            log.note([view])
        log.close()
    return log


def crashes(number: int) -> list[InstanceView]:
    return [replace(VIEW, incident=Incident(event="crashed", reason="killed", at=str(at))) for at in range(number)]


async def test_the_next_daemon_goes_on_with_the_events_of_the_one_before(tmp_path: Path) -> None:
    file = EventFile(events_path(tmp_path / "state.toml"))
    before = await written(file, [VIEW, *crashes(3), replace(VIEW, state=State.RUNNING)])

    after = EventLog()
    after.restore(EventFile(file.path).read())

    assert list(after.since(0)) == list(before.since(0))
    assert after.history("a") == before.history("a")
    assert [(each.event, each.count) for each in after.since(0)][2] == ("crashed", 3)
    after.note([VIEW])
    after.note([replace(VIEW, state=State.STOPPED)])
    assert [each.id for each in after.since(before.latest)] == [before.latest + 1]
    assert file.path.stat().st_mode & 0o777 == 0o600


async def test_the_file_is_bounded_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "state.events.jsonl", max_bytes=2000)
    states = [State.RUNNING, State.STOPPED] * 50
    await written(file, [replace(VIEW, state=state) for state in states])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5000
    with file.path.open("ab") as torn:
        torn.write(b'{"id": 3}\n[1]\n{"id": 4, "timest')

    found = file.read()
    assert found[-1].id == 101
    assert [each.id for each in found] == [*range(found[0].id, 102)]


async def test_a_cut_line_does_not_take_the_next_event_with_it(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "state.events.jsonl")
    await written(file, [VIEW, replace(VIEW, state=State.RUNNING)])
    os.truncate(file.path, file.path.stat().st_size - 10)

    log = EventLog()
    log.restore(file.read())
    log.note([VIEW])
    async with file.following(log):
        log.note([replace(VIEW, state=State.STOPPED)])
        log.close()

    assert file.read()[-1] == list(log.since(0))[-1]


async def test_a_disk_that_refuses_is_an_alarm_and_costs_no_event_in_memory(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "absent" / "state.events.jsonl")
    log = await written(file, [VIEW])
    assert [each.event for each in log.since(0)] == ["created", "starting"]
    assert file.alarms() == [f"events cannot be saved: {file.path}: {os.strerror(2)}"]

    file.path.parent.mkdir()
    file.write(next(log.since(0)))
    assert not file.alarms()
