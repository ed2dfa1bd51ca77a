"""What a plan says is what then happens, in random fleets over workers that exist in memory alone."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.supervision.storm_fleet import SkippingLoop, StormLauncher, StormStore
from tests.support.fleet import settings_for

from teimgr.control.ledger.ledger import Footprint
from teimgr.control.placement import planner as placement
from teimgr.control.placement.dry_run import REFUSED, FleetPlan, PlannedWorker
from teimgr.control.placement.hosts import Gpu, GpuInventory, Inventory
from teimgr.control.residence.residence import Residence
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.control.supervision.manager import Manager
from teimgr.errors import TeimgrError
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, State
from teimgr.wire.routing.directory import Directory

MIB = 1 << 20
SEEDS = 30
LONG_SEEDS = 1000
TURNS = 10
"""Of the event loop between two looks at a fleet: a look takes as long as many turns."""
_LOOK_S = 0.05  # of the loop's clock, which passes while all wait


class KnownFootprints:
    """A footprint for each model, as if all were measured."""

    def __init__(self, seed: float) -> None:
        self._seed = seed
        self._of: dict[str, Footprint] = {}

    async def look(self, spec: Any, roots: object = None) -> None:
        await asyncio.sleep(0)

    def snapshot(self) -> KnownFootprints:
        return self

    def known(self, spec: Any, device_kind: str = "cpu") -> Footprint:
        if spec.model_id not in self._of:
            rng = random.Random(f"{self._seed} {spec.model_id}")
            host = rng.randrange(20, 700)
            peak, card = host + rng.randrange(300), rng.randrange(100, 3000)
            source = rng.choice(("measured", "predicted", "predicted", "assumed"))
            self._of[spec.model_id] = Footprint(
                host_bytes=host * MIB,
                loading_bytes=peak * MIB,
                device_bytes=card * MIB,
                source=source,  # type: ignore[arg-type]
            )
        found = self._of[spec.model_id]
        return replace(found, device_bytes=0) if device_kind == "cpu" else found

    def room_for_a_batch(self, spec: Any, device_kind: str = "cpu") -> int:
        return 0

    def learn(self, *args: Any) -> None: ...
    def learn_load(self, *args: Any) -> None: ...
    def load_seconds(self, spec: Any) -> None: ...
    def load(self) -> None: ...
    async def close(self) -> None: ...


class AtOnce:
    """Runs what a thread would: the loop's clock skips ahead while it waits for one."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def close(self) -> None: ...


class DrawnFleet:
    """A manager over drawn cards and budgets."""

    def __init__(self, folder: Path, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.rng = rng
        free = rng.choice((None, rng.randrange(500, 6000) * MIB))
        patch.setattr(placement, "free_memory_bytes", lambda: free)
        patch.setattr(placement, "host_memory", lambda: (0, 0))
        patch.setattr(placement, "memory_label", lambda: "host memory")
        self.cards = rng.choice((0, 0, 1, 2, 3))
        names = [rng.choice(("", "H100", "L4")) for _ in range(self.cards)]
        totals = [rng.choice((None, rng.randrange(1000, 9000) * MIB)) for _ in names]
        inventory = Inventory(
            tuple(
                Gpu(i, f"GPU-{i}", totals[i] or 0, name=names[i], memory_total_bytes=totals[i])
                for i in range(len(names))
            )
        )
        budgets = {
            "host_memory_budget_mib": rng.choice((None, rng.randrange(200, 4000))),
            "gpu_memory_budget_mib": rng.choice((None, rng.randrange(500, 8000))),
        }
        settings = settings_for(
            folder, restart_backoff_secs=3600, restart_backoff_max_secs=3600, max_instances=None, **budgets
        )
        launcher, gpus = StormLauncher(rng), GpuInventory({}, lambda: inventory)
        directory = Directory()
        self.manager = Manager(
            settings,
            launcher,
            directory,
            StormStore(rng),
            gpus,
            DaemonMetrics(),
            cores=rng.choice((1, 2, 8)),  # type: ignore[arg-type]
        )
        patch.setattr(self.manager._planner.memory, "footprints", KnownFootprints(rng.random()))
        patch.setattr(self.manager._planning, "_threads", AtOnce())
        self.residence = Residence(self.manager, directory, TenantRegistry(folder, folder / "state.toml"))
        self.manager.memory.relieve_by(self.residence.relieve)
        self.manager.plan_evictions_by(self.residence.rehearsal)

    async def call(self, name: str) -> None:
        """A call, answered at once, of a model on demand."""
        try:
            async with self.residence.loaded(name, 10.0):
                pass
        except TeimgrError:  # it does not fit
            pass

    def instances(self, prefix: str, count: int) -> list[InstanceSpec]:
        return [self._instance(f"{prefix}{number}") for number in range(count)]

    def _instance(self, name: str) -> InstanceSpec:
        rng = self.rng
        gpu_id = rng.randrange(self.cards) if self.cards and rng.random() < 0.2 else None
        return InstanceSpec(
            name=name,
            model_id=f"fake-{rng.randrange(6)}",
            replicas=rng.choice((1, 1, 1, 2, 3, "per-gpu" if gpu_id is None else 1)),
            placement=rng.choice(("spread", "pack")),
            gpu_id=gpu_id,
            load=rng.choice(("eager", "on_demand")) if name.startswith("old") else "eager",
            pinned=rng.random() < 0.1,
        )

    async def rest(self) -> None:
        """Return when nothing loads or ends."""
        end = asyncio.get_running_loop().time() + 60.0
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if not self._is_busy():
                return
            assert asyncio.get_running_loop().time() < end, [(it.spec.name, it.state) for it in self.manager.list()]
            await asyncio.sleep(_LOOK_S)

    def _is_busy(self) -> bool:
        ledger, busy = self.manager._planner.memory.ledger, {State.STARTING, State.STOPPING}
        if any(ledger.is_loading(device) for device in ledger.accounts):
            return True
        return any(worker.state in busy for view in self.manager.list() for worker in view.workers)


def outcomes(workers: Iterable[PlannedWorker]) -> Counter[tuple[object, ...]]:
    """What became of the workers; the replicas of an instance are equal."""
    found: Counter[tuple[object, ...]] = Counter()
    for each in workers:
        is_refused = each.outcome == REFUSED
        found[each.instance, each.outcome, each.gpu, each.reason if is_refused else each.host_bytes] += 1
    return found


async def compare(folder: Path, seed: int, patch: pytest.MonkeyPatch) -> FleetPlan:
    """The plan for a drawn fleet, which is what then happened.

    Raises:
        AssertionError: it is not.
    """
    rng = random.Random(seed)
    fleet = DrawnFleet(folder, rng, patch)
    manager = fleet.manager
    await manager.boot()
    deciding = asyncio.create_task(fleet.residence.run())
    try:
        for spec in fleet.instances("old", rng.randrange(9)):
            await manager.create(spec)
            await fleet.rest()
            for _ in range(rng.choice((0, 1, 1, 5)) if spec.load == "on_demand" else 0):
                await fleet.call(spec.name)
        await fleet.rest()
        for view in manager.list():
            if rng.random() < 0.2:
                try:
                    await manager.stop(view.spec.name)
                except TeimgrError:
                    await manager.delete(view.spec.name)
        await fleet.rest()
        # Past every minimum residence: a plan and its execution a moment later would see different ones.
        patch.setattr(fleet.residence, "_now", lambda: asyncio.get_running_loop().time() + 3600.0)
        return await carry_out(fleet, seed)
    finally:
        await manager.shutdown(at_once=True)
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)
        ledger = manager.memory.ledger
        assert not any(account.held for account in ledger.accounts.values()), f"seed {seed}"


async def carry_out(fleet: DrawnFleet, seed: int) -> FleetPlan:
    rng, manager = fleet.rng, fleet.manager
    again = [view.spec for view in manager.list() if view.state in (State.STOPPED, State.RUNNING)]
    wanted = [*again, *fleet.instances("new", rng.randrange(1, 9))]
    running = {view.spec.name for view in manager.list() if view.state is State.RUNNING}
    wanted = [spec for spec in wanted if spec.load == "eager" or spec.name in running]
    rng.shuffle(wanted)

    before = manager.memory.ledger.copy()
    planned = await manager.plan(wanted)
    assert {d: a.reserved_bytes for d, a in before.accounts.items()} == {
        d: a.reserved_bytes for d, a in manager.memory.ledger.accounts.items()
    }, "a plan changes nothing"
    happened = await manager.carry_out(wanted)
    assert outcomes(happened.workers) == outcomes(planned.workers), f"seed {seed}"
    assert [without_times(each.reason) for each in happened.evictions] == [
        without_times(each.reason) for each in planned.evictions
    ], f"seed {seed}"
    await fleet.rest()
    assert {use.device: use.planned_bytes for use in planned.devices} == {
        device: account.reserved_bytes for device, account in manager.memory.ledger.accounts.items()
    }, f"seed {seed}"
    return planned


def without_times(reason: str) -> str:
    """The reason of an eviction without its value and the time, which go on: the model, and for which one."""
    return re.sub(r": value .* s;", ";", reason)


@pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(LONG_SEEDS, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_what_a_plan_says_is_what_then_happens(seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = refused = evicted = 0
    for seed in range(seeds):
        with monkeypatch.context() as patch, asyncio.Runner(loop_factory=SkippingLoop) as runner:
            found = runner.run(compare(tmp_path, seed, patch))
        workers, evicted = workers + len(found.workers), evicted + len(found.evictions)
        refused += sum(worker.outcome == REFUSED for worker in found.workers)
    assert refused > seeds / 3, "too few fleets have a load that does not fit"
    assert workers - refused > seeds, "nearly all are refused"
    assert evicted > seeds / 5, "too few evict a model"
