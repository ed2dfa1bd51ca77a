"""The work of the daemon for one worker event does not depend on the number of instances."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.fleet import Fleet

import teimgr
from teimgr.control.supervision.lifecycle import Phase
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.mux.health import MuxHealth
from teimgr.spec import InstanceSpec, State
from teimgr.wire.routing.router import Router

Fleets = Callable[..., Fleet]
_PRODUCT = str(Path(teimgr.__file__).parent)


@contextmanager
def counted_lines() -> Iterator[Counter[str]]:
    """Counts the lines of the product that this thread executes, each turn of a loop anew, by function."""
    counts: Counter[str] = Counter()

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            counts[frame.f_code.co_qualname] += 1
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(_PRODUCT) else None

    sys.settrace(on_call)
    try:
        yield counts
    finally:
        sys.settrace(None)


async def lines_of_a_restart(fleet: Fleet, others: int) -> Counter[str]:
    """From the end of a worker to its successor's first answer, beside so many running instances."""
    fleet.store.open()
    fleet.store.save(
        InstanceSpec(name=f"i{n}", model_id="fake", port=24000 + n, prometheus_port=26000 + n, wanted_running=False)
        for n in range(others)
    )
    fleet.store.close()
    manager, router, events = fleet.manager, Router(), fleet.events
    await manager.boot()
    router.update(fleet.directory.snapshot())
    health = MuxHealth(PolicyInForce(Policy()))
    for follow in (router.apply, health.apply):
        fleet.directory.subscribe(follow)
    events.note(manager.list())
    beside = [manager._instances[f"i{n}"] for n in range(others)]
    for each in beside:  # without processes, which this machine has no room for
        for worker in each.workers:
            worker._replica = replace(worker._replica, phase=Phase.RUNNING)
        each.on_state_changed()
    await fleet.create()
    pid = (await fleet.running()).pid
    assert pid is not None
    with counted_lines() as counts:
        os.kill(pid, signal.SIGKILL)
        await fleet.running(not_pid=pid)
    for each in beside:
        for worker in each.workers:
            worker._replica = replace(worker._replica, phase=Phase.STOPPED)
        each.on_state_changed()
    assert "crashed" in {event.event for event in events.history("a")}
    await router.close()
    await fleet.end()
    return counts


async def test_the_cost_of_a_restart_is_independent_of_the_number_of_instances(fleets: Fleets) -> None:
    few = await lines_of_a_restart(fleets(), 10)
    many = await lines_of_a_restart(fleets(), 1000)

    grown = {name: count - few[name] for name, count in many.items() if count - few[name] > 500}
    assert not grown, f"{few.total()} lines beside 10 instances, {many.total()} beside 1,000"


async def test_instances_that_rest_have_no_task_and_looking_at_them_builds_no_views(fleets: Fleets) -> None:
    fleet, declared = fleets(), 200
    fleet.store.open()
    fleet.store.save(
        InstanceSpec(name=f"i{n}", model_id=f"org/{n}", port=24000 + n, prometheus_port=26000 + n, load="on_demand")
        for n in range(declared)
    )
    fleet.store.close()
    manager = fleet.manager
    await manager.boot()
    assert {view.state for view in manager.list()} == {State.UNLOADED}
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("supervisor of")]

    with counted_lines() as looking:
        manager.list()
        manager.alarms()
    assert looking["ManagedInstance._present_view"] == 0
    assert looking.total() < 50 * declared

    await manager.update("i7", {"tags": {"a": "b"}})  # what has changed is seen
    assert manager.list()[7].spec.tags == {"a": "b"}
    await manager.stop("i7")
    assert [view.spec.name for view in manager.list() if view.state is State.STOPPED] == ["i7"]
    await manager.delete("i8")
    assert "i8" not in {view.spec.name for view in manager.list()}
    await fleet.end()
