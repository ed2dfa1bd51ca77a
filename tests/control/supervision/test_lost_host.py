"""A host that is lost while a model is loaded there on demand, or while an instance is scaled to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.control.supervision.test_manager import TwoHosts
from tests.support.fleet import LIMIT_S, Fleet, settings_for
from tests.support.polling import eventually

from teimgr.control.residence.residence import Residence
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.spec import State, WorkerView


@asynccontextmanager
async def two_hosts(folder: Path) -> AsyncIterator[tuple[Fleet, Residence, TwoHosts]]:
    """A fleet whose first host has a worker already, so that the next one goes to `two`; and its residence."""
    hosts = TwoHosts()
    fleet = Fleet(folder, settings_for(folder), inventory=hosts)
    registry = TenantRegistry(folder / "run", folder / "state.toml")
    residence = Residence(fleet.manager, fleet.directory, registry)
    deciding = asyncio.create_task(residence.run())
    try:
        await fleet.manager.boot()
        await fleet.create(name="first", node="one")
        await fleet.running("first")
        yield fleet, residence, hosts
    finally:
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)
        await fleet.end()


def on(fleet: Fleet, name: str, host: str) -> list[WorkerView]:
    """The workers of an instance that have a process on a host."""
    return [each for each in fleet.manager.get(name).workers if each.node == host and each.pid]


async def lose(fleet: Fleet, hosts: TwoHosts, name: str) -> None:
    """Host `two` takes no workers any more, and those that it has are gone."""
    await eventually(lambda: bool(on(fleet, name, "two")), LIMIT_S)
    hosts.problem = "no answer"
    for worker in on(fleet, name, "two"):
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)


async def test_a_model_that_was_loading_on_a_lost_host_is_loaded_on_another_for_the_calls_that_wait(
    folder: Path,
) -> None:
    async with two_hosts(folder) as (fleet, residence, hosts):
        await fleet.create("first-only,never-ready", load="on_demand")
        answered = asyncio.Event()

        async def call() -> None:
            async with residence.loaded("a", LIMIT_S):
                answered.set()

        async with asyncio.TaskGroup() as calls:
            for _ in range(3):
                calls.create_task(call())
            await eventually((fleet.settings.run_dir / "a.seen").exists, LIMIT_S)  # `first-only` has counted it
            await lose(fleet, hosts, "a")
        view = await fleet.running("a")
        assert (view.state, [each.node for each in view.workers]) == (State.RUNNING, ["one"])
        assert residence.phases()["a"] == "loaded"


async def test_replicas_that_were_starting_on_a_lost_host_start_on_another_and_the_first_one_serves_on(
    folder: Path,
) -> None:
    async with two_hosts(folder) as (fleet, _, hosts):
        await fleet.create("slow-successor=2", node="one")
        before = await fleet.running("a")
        await fleet.manager.update("a", {"node": None})
        gaps: list[str] = []
        fleet.directory.subscribe(
            lambda name, entry: None if entry is not None and entry.endpoints else gaps.append(name)
        )
        scaling = asyncio.create_task(fleet.manager.update("a", {"replicas": 3}, wait=True))
        await lose(fleet, hosts, "a")
        await asyncio.gather(scaling, return_exceptions=True)
        await eventually(lambda: len(on(fleet, "a", "one")) == fleet.manager.get("a").spec.replicas, LIMIT_S)
        assert before.pid in [each.pid for each in on(fleet, "a", "one")]
        assert not gaps
