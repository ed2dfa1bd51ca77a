"""Crash reports of real worker processes: what they hold, who may read them, how many are kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import Fleet
from tests.support.polling import eventually

from teimgr import __version__
from teimgr.control.events.fleet_events import EventLog, FleetEvent
from teimgr.control.supervision import crash_reports
from teimgr.control.supervision.crash_reports import KEPT_PER_INSTANCE, Crash, CrashReports, report_name, stacks
from teimgr.control.supervision.fleet_records import FleetRecords
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.spec import State

NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)


def folder_of(fleet: Fleet) -> Path:
    return fleet.settings.log_dir / "crashes"


async def crashed(events: EventLog, folder: Path) -> tuple[FleetEvent, dict[str, Any]]:
    """The event of a crash, and its report."""
    async for event, _ in events.follow(0):
        if event.event == "crashed":
            assert event.crash_report is not None
            report = folder / event.crash_report
            await eventually(report.exists)
            return event, json.loads(report.read_text())
    raise AssertionError("the log of events was closed")


@pytest.fixture
def events(fleet: Fleet) -> EventLog:
    fleet.events.note(fleet.manager.list())
    return fleet.events


async def test_a_crash_leaves_a_report_that_its_event_and_the_log_name(
    fleet: Fleet, events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.create()
    view = await fleet.running()
    assert view.pid is not None
    os.kill(view.pid, signal.SIGSEGV)

    event, report = await crashed(events, folder_of(fleet))

    assert (event.instance, event.reason) == ("a", report["reason"])
    assert report["reason"].startswith("the worker was killed by SIGSEGV")
    assert (report["instance"], report["replica"], report["pid"]) == ("a", 0, view.pid)
    assert (report["model_id"], report["versions"]["teimgr"]) == ("fake", __version__)
    assert (report["exit_status"], report["signal"]) == (None, "SIGSEGV")
    assert 0 < report["ran_secs"] < 60
    assert report["stacks"][0] == "Fatal Python error: Segmentation fault"
    assert any("tests/support/fakes/worker.py" in line for line in report["stacks"])
    assert any(line.endswith("of a: []") for line in report["log"])
    assert [each["event"] for each in report["events"]] == ["created", "starting", "running"]
    assert (folder_of(fleet) / str(event.crash_report)).stat().st_mode & 0o777 == 0o600
    assert folder_of(fleet).stat().st_mode & 0o777 == 0o700
    assert any(getattr(record, "crash_report", None) == event.crash_report for record in caplog.records)
    await fleet.running(not_pid=view.pid)


async def test_a_crash_is_recorded_once_together_with_the_change_of_state(
    fleet: Fleet, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[State] = []
    changed = FleetRecords.changed

    def counted(records: FleetRecords, instance: ManagedInstance) -> None:
        if instance.view().incident is not None:
            recorded.append(instance.state)
        changed(records, instance)

    monkeypatch.setattr(FleetRecords, "changed", counted)
    await fleet.create()
    view = await fleet.running()
    assert view.pid is not None
    os.kill(view.pid, signal.SIGKILL)
    await fleet.running(not_pid=view.pid)

    assert recorded.count(State.RUNNING) == 1  # of the successor
    kinds = [(event.event, event.status) for event in events.history("a")]
    assert kinds[-3:] == [("crashed", "running"), ("starting", "starting"), ("running", "running")]


async def test_a_worker_that_is_killed_as_hung_leaves_a_report(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(max_failures_before_restart=1)
    await fleet.manager.boot()
    fleet.events.note(fleet.manager.list())
    await fleet.create("first-only,fail-probe")

    _, report = await crashed(fleet.events, folder_of(fleet))

    assert "health probes in a row failed" in report["reason"]
    assert report["signal"] == "SIGKILL"


async def test_a_crash_of_one_replica_is_an_event_though_the_instance_runs(fleet: Fleet, events: EventLog) -> None:
    await fleet.create(replicas=2)
    await fleet.until(lambda entry: len(entry.endpoints) == 2)
    pid = fleet.manager.get("a").workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    event, report = await crashed(events, folder_of(fleet))

    assert (event.status, report["replica"], report["stacks"]) == ("running", 1, [])


async def test_an_ordered_end_leaves_none(fleet: Fleet) -> None:
    await fleet.create()
    pid = (await fleet.running()).pid
    await fleet.manager.restart("a")
    await fleet.running(not_pid=pid)
    await fleet.manager.delete("a")

    assert not folder_of(fleet).exists()


def test_the_oldest_of_an_instance_are_removed_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = CrashReports(tmp_path / "crashes")

    def write(instance: str, minute: int) -> str:
        now = NOON + timedelta(minutes=minute)
        crash = Crash(instance=instance, replica=minute % 2, pid=1, started_at=0.0, status=1, reason="x")
        name = report_name(instance, crash.replica, now)
        reports.write(crash, now, name)
        return name

    other = write("a-0", 0)
    names = [write("a", minute) for minute in range(1, KEPT_PER_INSTANCE + 4)]
    (tmp_path / "crashes" / "notes.txt").touch()

    kept = {path.name for path in (tmp_path / "crashes").iterdir()}
    assert kept == {other, "notes.txt", *names[3:]}

    monkeypatch.setattr(crash_reports, "KEPT", 5)
    last = write("b", 60)
    assert {path.name for path in (tmp_path / "crashes").iterdir()} == {"notes.txt", *names[-4:], last}


async def test_a_disk_that_refuses_costs_the_report_alone(fleet: Fleet, events: EventLog) -> None:
    await fleet.create()
    view = await fleet.running()
    folder_of(fleet).touch()  # a file in the folder's place
    assert view.pid is not None
    os.kill(view.pid, signal.SIGKILL)

    await fleet.running(not_pid=view.pid)
    await asyncio.sleep(0)
    assert [event.event for event in events.since(0)].count("crashed") == 1


def test_stacks_are_dumps_and_tracebacks_without_what_lies_between() -> None:
    dump = ["Fatal Python error: Aborted", "", "Current thread 0x0 (most recent call first):", '  File "a.py", line 1']
    traceback = ["Traceback (most recent call last):", '  File "b.py", line 2', "    raise ValueError", "ValueError"]
    log = ["before", *dump, '{"level": "info"}', "between", *traceback, '{"level": "info"}', "after"]

    assert stacks(log) == dump + traceback
