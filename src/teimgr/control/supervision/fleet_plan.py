"""Plans for the running fleet: what would happen if instances were created or started, and how to do exactly that.

Also moves running workers without a gap: `Rebalancer` balances the fleet, by the moves that `rebalance` finds;
`HostDepartures` empties a host.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from teimgr.control.ledger.admission import reserve
from teimgr.control.ledger.ledger import Footprint, Ledger, Place, Shortage
from teimgr.control.ledger.system_memory import mib
from teimgr.control.placement.dry_run import (
    REFUSED,
    STARTS,
    WAITS,
    Eviction,
    FleetNow,
    FleetPlan,
    PlannedWorker,
    plan_fleet,
)
from teimgr.control.placement.hosts import Inventory
from teimgr.control.placement.planner import (
    FootprintOf,
    Others,
    Planner,
    decide,
    others_in,
    replica_count,
    with_batch_tokens,
)
from teimgr.control.residence.policy import Rehearsal
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.control.supervision.supervisor import Supervisor
from teimgr.errors import InstanceNotFound, TeimgrError, ValidationError
from teimgr.http.turns import SharedThreads
from teimgr.spec import Incident, InstanceSpec, State

PLANNED, MOVED, FAILED = "planned", "moved", "failed"


@dataclass(frozen=True, slots=True)
class Placed:
    """A running worker and its place. `fixed` is why it cannot be moved now, "" if it can."""

    spec: InstanceSpec
    replica: int
    place: Place
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """One worker that moves, why, and the outcome."""

    worker: Placed
    to: Place
    reason: str
    outcome: str = PLANNED


@dataclass(frozen=True, slots=True)
class Stay:
    """One worker that stays, and why."""

    worker: Placed
    reason: str


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """The moves in order, and the workers that stay."""

    moves: tuple[Move, ...]
    stays: tuple[Stay, ...]


def rebalance(
    workers: Sequence[Placed], inventory: Inventory, ledger: Ledger, alive: Mapping[str, int], footprint: FootprintOf
) -> Rebalancing:
    """Plan the moves of these workers, one after the other; `ledger` is a copy, and `alive` counts workers by host."""
    mixed = inventory.gpus and any(each.place.gpu is None for each in workers)
    if len(inventory.hosts) <= 1 and len(inventory.gpus) <= 1 and not mixed:
        device = f"GPU {inventory.gpus[0].index}" if inventory.gpus else "the CPU of one host"
        reason = f"there is one device: {device}"
        return Rebalancing((), tuple(Stay(each, each.fixed or reason) for each in workers))
    ledger.settle_all()
    fleet = _Fleet(inventory, ledger, Counter(alive), {(each.spec.name, each.replica): each.place for each in workers})
    moves: list[Move] = []
    stays: list[Stay] = []
    for worker in workers:
        found = fleet.move_of(worker, footprint)
        if isinstance(found, Move):
            moves.append(found)
        else:
            stays.append(Stay(worker, found))
    return Rebalancing(tuple(moves), tuple(stays))


@dataclass(slots=True)
class _Fleet:
    """The places of all workers after the moves planned so far."""

    inventory: Inventory
    ledger: Ledger
    alive: Counter[str]
    places: dict[tuple[str, int], Place]

    def move_of(self, worker: Placed, footprint: FootprintOf) -> Move | str:
        """The move of a worker, which is made here; else why it stays."""
        spec, here = worker.spec, worker.place
        if worker.fixed or spec.placement == "pack":
            return worker.fixed or "placement = 'pack' keeps the workers of a host together"
        others = self._others(worker, footprint)
        try:
            there, kind = decide(spec, self.inventory, others)
        except TeimgrError as error:
            return error.message
        if there == here:
            return "it is already in the best place"
        takes = footprint(spec, kind)
        if not (reason := self._gain(here, there, takes, others)):
            return "no other place would improve the balance"
        found = reserve(self.ledger, spec.name, worker.replica, takes, there)
        if isinstance(found, Shortage):
            return f"no room for a second copy during the move: {found.reason}"
        self.ledger.settle(found, takes)
        for held in self.ledger.held_by(spec.name):
            if held.replica == worker.replica and held is not found:
                self.ledger.release_unreported(held)
        self.alive[here.host] -= 1
        self.alive[there.host] += 1
        self.places[spec.name, worker.replica] = there
        return Move(worker, there, reason)

    def _others(self, worker: Placed, footprint: FootprintOf) -> Others:
        """The fleet without a worker, as a new one of it finds it."""
        without = self.ledger.copy()
        for held in without.held_by(worker.spec.name):
            if held.replica == worker.replica:
                without.release_unreported(held)
        beside = [
            where
            for (name, replica), where in self.places.items()
            if name == worker.spec.name and replica != worker.replica
        ]
        alive = self.alive.copy()
        alive[worker.place.host] -= 1
        return others_in(worker.spec, self.inventory, without, alive, footprint, beside)

    def _gain(self, here: Place, there: Place, takes: Footprint, others: Others) -> str:
        """Describe the gain of a move for the fleet; empty without one."""
        if here.gpu is None and there.gpu is not None:
            return "a card is there"
        for count, from_, to in (
            (others.beside_hosts, here.host, there.host),
            (others.beside, here.gpu or "", there.gpu or ""),
        ):
            if (now := count.get(from_, 0)) != (then := count.get(to, 0)):
                return f"other replicas: {now} here, {then} there" if now > then else ""
        if there.gpu is None:
            now_load, then_load = self._load(here.host), self._load(there.host, more=1)
            return (
                f"workers per core: {now_load:.3g} here now, {then_load:.3g} there after the move"
                if then_load < now_load
                else ""
            )
        left = others.free.get(there.gpu, 0) - takes.device_bytes
        now_left = self.ledger.free(here.gpu) if here.gpu is not None else None
        if now_left is None:
            now_left = -self.ledger.reserved(here.gpu or "")
        return f"{mib(now_left)} to spare here, {mib(left)} there then" if left > now_left else ""

    def _load(self, host: str, more: int = 0) -> float:
        cores = next((each.cores for each in self.inventory.hosts if each.name == host), 1)
        return (self.alive[host] + more) / cores


MAX_INSTANCES = 1000
"""Limit of one plan, which reads the file headers of each instance's model."""
MAX_WORKERS = 2000
"""Workers of one plan that are to be placed: each is placed beside all others, which takes seconds for these."""
_LOOKS_AT_A_TIME = 4
_MOVE_RETRY_S = 3.0
_RUNS = (State.STARTING, State.RUNNING)


class Planning:
    """Makes plans from the planner's inventory and ledger and the manager's `instances`."""

    def __init__(
        self, planner: Planner, instances: Mapping[str, ManagedInstance], tokens_per_gib: Callable[[], int]
    ) -> None:
        self._planner = planner
        self._instances = instances
        self._tokens_per_gib = tokens_per_gib
        self._rehearsal: Callable[[], Awaitable[Rehearsal]] | None = None
        self._recorded: list[list[Eviction]] = []
        self._threads = SharedThreads(1, "plan")  # several would take the GIL from the event loop

    def close(self) -> None:
        """Make no more plans."""
        self._threads.close()

    def rehearse_by(self, rehearsal: Callable[[], Awaitable[Rehearsal]]) -> None:
        """Set the function that predicts evictions; plans have none before that."""
        self._rehearsal = rehearsal

    @contextmanager
    def recording(self) -> Iterator[list[Eviction]]:
        """Record the evictions that happen within the block."""
        found: list[Eviction] = []
        self._recorded.append(found)
        try:
            yield found
        finally:
            self._recorded = [each for each in self._recorded if each is not found]

    async def noted(self, instance: str, incident: Incident | None, unloading: Awaitable[bool]) -> bool:
        """Await the end of an instance's workers; with an incident it is recorded as an eviction."""
        if incident is None:
            return await unloading
        eviction, recorded = Eviction(instance=instance, reason=incident.reason), self._recorded
        for each in recorded:
            each.append(eviction)
        if is_done := await unloading:
            return is_done
        for each in recorded:
            each.remove(eviction)
        return False

    async def plan(self, wanted: Sequence[InstanceSpec]) -> FleetPlan:
        """Return what would happen if these instances were created or started in this order; nothing changes.

        Raises:
            InvalidGpuId: a `gpu_id` is not one of the cards.
            ValidationError: they have too many workers.
        """
        inventory = await self._planner.refresh()
        placed = (spec for spec in wanted if spec.load != "on_demand" and not self._runs(spec.name))
        count = sum(replica_count(spec, inventory) for spec in placed)
        if count > MAX_WORKERS:
            raise ValidationError(f"instances: {count} workers are more than the {MAX_WORKERS} of a plan")
        specs = [with_batch_tokens(spec, inventory, self._tokens_per_gib()) for spec in wanted]
        await self._look_at(specs)
        memory = self._planner.memory
        rehearsal = await self._rehearsal() if self._rehearsal is not None else None
        now = FleetNow(
            inventory=inventory,
            ledger=memory.ledger.copy(),
            alive=Counter(self._planner.counts.alive),
            footprint=memory.footprints.snapshot().known,
            running={spec.name: memory.ledger.held_by(spec.name) for spec in specs if self._runs(spec.name)},
            rehearsal=rehearsal,
        )
        return await self._threads.run(plan_fleet, specs, now)

    def to_start(self) -> list[InstanceSpec]:
        """The instances that should run, in order of creation."""
        return [each.spec for each in self._instances.values() if each.spec.wanted_running]

    def happened(self, name: str) -> list[PlannedWorker]:
        """Return what happened to the workers of an instance, in the terms of a plan.

        Raises:
            InstanceNotFound: it was deleted meanwhile.
        """
        if (instance := self._instances.get(name)) is None:
            raise InstanceNotFound(name)
        return [self._became(name, each) for each in instance.workers]

    def is_placed(self, name: str) -> bool:
        """True if each worker of an instance has its memory, was refused it, or has ended."""
        instance = self._instances.get(name)
        return instance is None or all(each.is_placed for each in instance.workers)

    def _became(self, name: str, worker: Supervisor) -> PlannedWorker:
        held, gpu = worker.reservation, worker.gpu
        without = REFUSED if worker.is_placed else WAITS
        return PlannedWorker(
            instance=name,
            replica=worker.number,
            outcome=without if held is None else STARTS,
            node=worker.host or None,
            gpu=gpu,
            gpu_id=self._planner.index_of(gpu),
            host_bytes=held.footprint.host_bytes if held else 0,
            loading_bytes=held.footprint.peak_bytes if held else 0,
            device_bytes=held.footprint.device_bytes if held else 0,
            source=held.footprint.source if held else "",
            reason=worker.reason,
        )

    def _runs(self, name: str) -> bool:
        instance = self._instances.get(name)
        return instance is not None and instance.state in _RUNS

    async def _look_at(self, specs: Sequence[InstanceSpec]) -> None:
        limit = asyncio.Semaphore(_LOOKS_AT_A_TIME)

        async def look(spec: InstanceSpec) -> None:
            async with limit:
                await self._planner.memory.look(spec, self._planner.model_roots(spec))

        await asyncio.gather(*(look(spec) for spec in specs))


class Rebalancer:
    """Moves running workers of `instances` to better places, one rebalancing at a time."""

    def __init__(self, planner: Planner, instances: Mapping[str, ManagedInstance]) -> None:
        self._planner = planner
        self._instances = instances
        self._one_at_a_time = asyncio.Lock()

    async def plan(self) -> Rebalancing:
        """Return which workers would move, and why the others stay; nothing changes."""
        inventory = await self._planner.refresh()
        memory = self._planner.memory
        return rebalance(
            self._placed(), inventory, memory.ledger.copy(), self._planner.counts.alive, memory.footprints.known
        )

    async def carry_out(self) -> Rebalancing:
        """Make the moves of a plan: each new worker runs before the old one ends. If it fails, the old one stays."""
        async with self._one_at_a_time:
            planned = await self.plan()
            return replace(planned, moves=tuple([await self._move(each) for each in planned.moves]))

    async def _move(self, move: Move) -> Move:
        instance = self._instances.get(move.worker.spec.name)
        if instance is None:
            return replace(move, outcome=FAILED, reason="deleted during the rebalancing")
        try:
            await instance.move(move.worker.replica, move.to)
        except TeimgrError as error:
            return replace(move, outcome=FAILED, reason=error.message)
        return replace(move, outcome=MOVED)

    def _placed(self) -> list[Placed]:
        found = []
        for instance in self._instances.values():
            if instance.resting is not None:
                continue
            for worker in instance.workers:
                if worker.role == "serving" and worker.place is not None and worker.state is not State.STOPPED:
                    fixed = "" if worker.state is State.RUNNING else f"it is {worker.state.value}"
                    fixed = "an update is in progress" if instance.is_updating else fixed
                    found.append(Placed(instance.spec, worker.number, worker.place, fixed))
        return found

    def described(self, found: Rebalancing) -> dict[str, Any]:
        """Return the reply of `POST /rebalance`."""
        return {
            "moves": [
                self._named(each.worker)
                | {"from": self._where(each.worker.place), "to": self._where(each.to)}
                | {"outcome": each.outcome, "reason": each.reason}
                for each in found.moves
            ],
            "stays": [
                self._named(each.worker) | {"at": self._where(each.worker.place), "reason": each.reason}
                for each in found.stays
            ],
        }

    @staticmethod
    def _named(worker: Placed) -> dict[str, Any]:
        return {"instance": worker.spec.name, "replica": worker.replica}

    def _where(self, place: Place) -> dict[str, Any]:
        return {"node": place.host or None, "gpu": place.gpu, "gpu_id": self._planner.index_of(place.gpu)}


class HostDepartures:
    """Moves the workers of `instances` off a host, one instance after another, once `booted` is set.

    `in_background` runs a coroutine as a named task that it owns.
    """

    def __init__(
        self,
        instances: Mapping[str, ManagedInstance],
        booted: asyncio.Event,
        in_background: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._instances = instances
        self._booted = booted
        self._in_background = in_background
        self._hosts: set[str] = set()

    def begin(self, host: str, *, was_removed: bool = False) -> None:
        """Start to move the workers of a host elsewhere; no effect while that goes on.

        Workers that no other host takes keep serving; on a host that `was_removed` they are ended.
        """
        if host not in self._hosts:
            self._hosts.add(host)
            moving = self._in_background(self._move_off(host, was_removed), f"moving workers off host {host}")
            moving.add_done_callback(lambda _: self._hosts.discard(host))

    async def _move_off(self, host: str, was_removed: bool) -> None:
        await self._booted.wait()
        for instance in tuple(self._instances.values()):
            if not await instance.move_off(host, was_removed) and not was_removed:
                await asyncio.sleep(_MOVE_RETRY_S)
