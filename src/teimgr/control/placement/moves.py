"""Rebalancing: which running workers would serve better elsewhere, and why the others stay.

A pure function by the rules of placement: each worker is placed again in a copy of the ledger, beside all others. It
moves where that makes the fleet more even: off a host or card with more replicas of its instance, off a host with more
workers for each core, off a card with less to spare, or from the CPU to a card. After a move the new place is never
worse off than the old one was, so a second rebalancing finds nothing. Old and new worker run side by side for a
moment, and the memory must hold both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from teimgr.control.ledger.admission import reserve
from teimgr.control.ledger.ledger import Footprint, Ledger, Place, Shortage
from teimgr.control.ledger.system_memory import mib
from teimgr.control.placement.decision import FootprintOf, Others, decide, others_in
from teimgr.control.placement.gpus import Inventory
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceSpec

PLANNED, MOVED, FAILED = "planned", "moved", "failed"


@dataclass(frozen=True, slots=True)
class Placed:
    """A running worker and where it is. `fixed` is why it is not moved now, empty for one that may be."""

    spec: InstanceSpec
    replica: int
    place: Place
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """One worker that moves, why, and what became of it."""

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
    """Where all workers are, once those before have moved."""

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
            return "it is where it would be placed now"
        takes = footprint(spec, kind)
        if not (reason := self._gain(here, there, takes, others)):
            return "no other place would be better off with it"
        found = reserve(self.ledger, spec.name, worker.replica, takes, there)
        if isinstance(found, Shortage):
            return f"no room while it still runs here: {found.reason}"
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
                return f"{now} other replicas of it are here, {then} there" if now > then else ""
        if there.gpu is None:
            now_load, then_load = self._load(here.host), self._load(there.host, more=1)
            return f"{now_load:.3g} workers a core here, {then_load:.3g} there then" if then_load < now_load else ""
        left = others.free.get(there.gpu, 0) - takes.device_bytes
        now_left = self.ledger.free(here.gpu) if here.gpu is not None else None
        if now_left is None:
            now_left = -self.ledger.reserved(here.gpu or "")
        return f"{mib(now_left)} to spare here, {mib(left)} there then" if left > now_left else ""

    def _load(self, host: str, more: int = 0) -> float:
        cores = next((each.cores for each in self.inventory.hosts if each.name == host), 1)
        return (self.alive[host] + more) / cores
