"""Workers that no instance owns are found, by their handle, run file or parent, and ended with an alarm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from tests.support.fleet import LIMIT_S, Fleet
from tests.support.polling import eventually

from teimgr.control.launch.process_handle import all_worker_paths, look_up
from teimgr.control.launch.strays import Sweep, without_handle
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceSpec, WorkerSpec


async def test_a_worker_without_an_instance_is_ended_at_the_second_look(fleet: Fleet) -> None:
    await fleet.create()
    owned = await fleet.running()
    stray = await fleet.launcher.launch(WorkerSpec(name="a", model_id="fake"))
    fleet.pids.add(stray.pid)
    [view] = fleet.manager.list()
    incarnations = {str(each.incarnation) for each in view.workers}
    sweep = Sweep(fleet.launcher.strays, lambda: incarnations)

    await sweep.look()
    assert look_up(stray.pid) is not None, "it may have been launched just now"
    assert not sweep.alarms()
    await sweep.look()

    assert look_up(stray.pid) is None
    assert look_up(owned.pid or 0) is not None
    [alarm] = sweep.alarms()
    assert f"a worker that no instance owns was ended (pid {stray.pid})" in alarm


async def test_workers_that_the_launcher_has_lost_are_found_by_run_file_and_by_their_parent(fleet: Fleet) -> None:
    await fleet.create()
    await fleet.create(name="b")
    first, second = await fleet.running(), await fleet.running("b")
    nursery = (fleet.launcher.nursery.pid, fleet.launcher.nursery.standby_pid)
    paths = {json.loads(each.run_file.read_text())["pid"]: each for each in all_worker_paths(fleet.settings.run_dir)}
    paths[second.pid or 0].run_file.unlink()

    found = without_handle(fleet.settings.run_dir, (), [pid for pid in nursery if pid], nursery)

    assert {(stray.pid, stray.instance) for stray in found} == {(first.pid, "a"), (second.pid, "")}
    for stray in found:
        await stray.end()
        assert look_up(stray.pid) is None


async def test_after_a_storm_on_one_name_exactly_the_wanted_processes_live(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets()
    manager = fleet.manager
    await manager.boot()
    commands = [
        lambda: manager.create(InstanceSpec(name="a", model_id="fake")),
        lambda: manager.delete("a"),
        lambda: manager.restart("a"),
        lambda: manager.update("a", {"dtype": "bfloat16"}),
        lambda: manager.stop("a"),
        lambda: manager.start("a"),
        lambda: manager.update("a", {"replicas": 2}),
    ]
    for round in range(3):
        order = commands[round:] + commands[:round]
        calls = [asyncio.ensure_future(order[number * 3 % len(order)]()) for number in range(14)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert not isinstance(outcome, BaseException) or isinstance(outcome, TeimgrError)

    def living() -> set[int]:
        folder = fleet.settings.run_dir
        pids = (
            json.loads(each.run_file.read_text())["pid"] for each in all_worker_paths(folder) if each.run_file.exists()
        )
        return {pid for pid in pids if look_up(pid)}

    def wanted() -> set[int | None]:
        return {each.pid for view in manager.list() if view.spec.wanted_running for each in view.workers}

    await eventually(lambda: living() == wanted() and None not in wanted(), LIMIT_S)
    for view in manager.list():
        await manager.delete(view.spec.name)
    assert not living()
