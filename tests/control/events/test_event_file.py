"""Events on disk: what the next daemon reads, the bound of the file, lines and disks that fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from teimgr.control.events.event_file import EventFile, events_path
from teimgr.control.events.fleet_events import EventLog
from teimgr.spec import Incident, InstanceSpec, InstanceView, State

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
    assert file.alarms() == [f"events are not saved: {file.path}: {os.strerror(2)}"]

    file.path.parent.mkdir()
    file.write(next(log.since(0)))
    assert not file.alarms()
