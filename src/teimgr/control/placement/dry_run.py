"""Plan of a fleet: what would run where, how much of each device it would use, what would be evicted, and why.

A pure function with the daemon's own rules: `decide` chooses the card or host of each worker, a copy of the ledger
decides whether it fits, and a rehearsal of the residence policy decides which models on demand are evicted for it.
Instances are planned in the daemon's start order, each as if the earlier ones had loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from teimgr.control.ledger.admission import reserve
from teimgr.control.ledger.ledger import Ledger, Place, Reservation
from teimgr.control.placement.hosts import Inventory
from teimgr.control.placement.planner import FootprintOf, decide, others_in, replica_count
from teimgr.control.residence.events import Unload, eviction_reason, terms_of
from teimgr.control.residence.policy import Rehearsal, Relief
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceSpec

RUNS, STARTS, WAITS, ON_DEMAND, REFUSED = "runs", "starts", "waits", "on_demand", "refused"
"""Outcomes of a worker: it `runs` already, `starts`, `waits` until models on demand can be evicted, is loaded only
by calls, or has no place or memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """One worker: where it runs, or why it does not. `source` is the origin of its figures."""

    instance: str
    replica: int
    outcome: str
    node: str | None = None
    gpu: str | None = None
    gpu_id: int | None = None
    host_bytes: int = 0
    loading_bytes: int = 0
    device_bytes: int = 0
    source: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One device: bytes reserved before and after, and bytes then free; None if unlimited."""

    device: str
    label: str
    budget_bytes: int | None
    total_bytes: int | None
    reserved_bytes: int
    planned_bytes: int
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """An instance that would be evicted, and why."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The result of a plan."""

    workers: tuple[PlannedWorker, ...]
    evictions: tuple[Eviction, ...]
    devices: tuple[DeviceUse, ...]

    @property
    def fits(self) -> bool:
        """True if every worker runs."""
        return all(worker.outcome not in (REFUSED, WAITS) for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        """The plan in the form of the reply of `POST /plan`."""
        workers = without_evicted(self.workers, self.evictions)
        return {"fits": self.fits, **asdict(replace(self, workers=tuple(workers)))}


@dataclass(slots=True)
class FleetNow:
    """The fleet at the start of a plan. `alive` counts workers by host; planning fills the ledger, which is a copy.

    Without a `rehearsal`, nothing is evicted.
    """

    inventory: Inventory
    ledger: Ledger
    alive: Counter[str]
    footprint: FootprintOf
    running: Mapping[str, Sequence[Reservation]] = field(default_factory=dict)
    rehearsal: Rehearsal | None = None
    evicted: list[Eviction] = field(default_factory=list)


def plan_fleet(wanted: Sequence[InstanceSpec], now: FleetNow) -> FleetPlan:
    """Plan these instances in their order, beside what runs; those that run already stay as they are."""
    before = {device: account.reserved_bytes for device, account in now.ledger.accounts.items()}
    now.ledger.settle_all()
    workers: list[PlannedWorker] = []
    for spec in wanted:
        if held := now.running.get(spec.name):
            workers += [_worker(each, RUNS, now.inventory) for each in held]
        elif spec.load == "on_demand":
            workers.append(PlannedWorker(instance=spec.name, replica=0, outcome=ON_DEMAND, reason="loaded by calls"))
        else:
            workers += _start(spec, now)
    devices = [
        DeviceUse(
            device=device,
            label=account.label,
            budget_bytes=account.budget_bytes,
            total_bytes=account.total_bytes,
            reserved_bytes=before.get(device, 0),
            planned_bytes=account.reserved_bytes,
            free_bytes=now.ledger.free(device),
        )
        for device, account in now.ledger.accounts.items()
    ]
    return FleetPlan(tuple(workers), tuple(now.evicted), tuple(devices))


def without_evicted(workers: Sequence[PlannedWorker], evicted: Sequence[Eviction]) -> list[PlannedWorker]:
    """The workers, those that ran and were evicted as what they are then: loaded by their next calls."""
    reasons = {each.instance: each.reason for each in evicted}
    return [
        PlannedWorker(instance=each.instance, replica=each.replica, outcome=ON_DEMAND, reason=reasons[each.instance])
        if each.outcome == RUNS and each.instance in reasons
        else each
        for each in workers
    ]


def _start(spec: InstanceSpec, now: FleetNow) -> list[PlannedWorker]:
    """Start the workers of an instance, each once the one before it has its memory or was refused it."""
    if now.rehearsal is not None:
        now.rehearsal.begin(spec.name, terms_of(spec))
    beside: list[Place] = []
    workers = [_start_one(spec, replica, beside, now) for replica in range(replica_count(spec, now.inventory))]
    if now.rehearsal is not None:
        now.rehearsal.end(spec.name, any(worker.outcome == STARTS for worker in workers))
    return workers


def _start_one(spec: InstanceSpec, replica: int, beside: list[Place], now: FleetNow) -> PlannedWorker:
    """Place one worker, and reserve its memory as if it had loaded; models on demand may be evicted for it."""
    others = others_in(spec, now.inventory, now.ledger, now.alive, now.footprint, beside)
    try:
        where, kind = decide(spec, now.inventory, others)
    except TeimgrError as error:
        return PlannedWorker(instance=spec.name, replica=replica, outcome=REFUSED, reason=error.message)
    footprint = now.footprint(spec, kind)
    relief = Relief(again=True)
    while True:
        found = reserve(now.ledger, spec.name, replica, footprint, where)
        if isinstance(found, Reservation):
            now.ledger.settle(found, footprint)
            now.alive[where.host] += 1
            beside.append(where)
            return _worker(found, STARTS, now.inventory)
        if now.rehearsal is None or not relief.again:
            break
        held = now.ledger.held_on(found.device)
        relief = now.rehearsal.relieve(spec.name, found.needed_bytes, found.free_bytes, held)
        _unload(relief.unloaded, now)
    wanted = Reservation(spec.name, replica, where, footprint)
    if not relief.waits_for:
        return _worker(wanted, REFUSED, now.inventory, found.reason)
    reason = f"{found.reason}; waits until {', '.join(relief.waits_for)} can go"
    return _worker(wanted, WAITS, now.inventory, reason)


def _unload(unloaded: Sequence[Unload], now: FleetNow) -> None:
    for each in unloaded:
        for held in now.ledger.held_by(each.model):
            now.ledger.release_unreported(held)
            now.alive[held.place.host] -= 1
        if each.evicted_for is not None:
            now.evicted.append(Eviction(instance=each.model, reason=eviction_reason(each.reason, each.evicted_for)))


def _worker(held: Reservation, outcome: str, inventory: Inventory, reason: str | None = None) -> PlannedWorker:
    takes = held.footprint
    return PlannedWorker(
        instance=held.instance,
        replica=held.replica,
        outcome=outcome,
        node=held.place.host or None,
        gpu=held.place.gpu,
        gpu_id=next((card.index for card in inventory.gpus if card.uuid == held.place.gpu), None),
        host_bytes=takes.host_bytes,
        loading_bytes=takes.peak_bytes,
        device_bytes=takes.device_bytes,
        source=takes.source,
        reason=reason,
    )
