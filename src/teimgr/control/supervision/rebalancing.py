"""Moves of running workers without a gap: `Rebalancer` makes the fleet more even, `HostDepartures` empties a host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from teimgr.control.ledger.ledger import Place
from teimgr.control.placement.moves import FAILED, MOVED, Move, Placed, Rebalancing, rebalance
from teimgr.control.placement.planner import Planner
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.errors import TeimgrError
from teimgr.spec import State


class Rebalancer:
    """Moves running workers of `instances` to better places; a second rebalancing waits for the one under way."""

    def __init__(self, planner: Planner, instances: Mapping[str, ManagedInstance]) -> None:
        self._planner = planner
        self._instances = instances
        self._one_at_a_time = asyncio.Lock()

    async def plan(self) -> Rebalancing:
        """What would move, and why the rest stays; nothing changes."""
        inventory = await self._planner.refresh()
        memory = self._planner.memory
        return rebalance(
            self._placed(), inventory, memory.ledger.copy(), self._planner.counts.alive, memory.footprints.known
        )

    async def carry_out(self) -> Rebalancing:
        """Make the moves of a plan: each new worker runs before the old one ends. One that fails leaves the old one."""
        async with self._one_at_a_time:
            planned = await self.plan()
            return replace(planned, moves=tuple([await self._move(each) for each in planned.moves]))

    async def _move(self, move: Move) -> Move:
        instance = self._instances.get(move.worker.spec.name)
        if instance is None:
            return replace(move, outcome=FAILED, reason="it was deleted meanwhile")
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
                    fixed = "an update is under way" if instance.is_updating else fixed
                    found.append(Placed(instance.spec, worker.number, worker.place, fixed))
        return found

    def described(self, found: Rebalancing) -> dict[str, Any]:
        """The reply of `POST /rebalance`."""
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


# Before another attempt to move workers that no other host took.
_MOVE_PAUSE_S = 3.0


class HostDepartures:
    """Moves the workers of `instances`, one instance after the other, once `booted` is set.

    `in_background` runs a coroutine under a name, and owns its task.
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
        self._hosts: set[str] = set()  # whose workers are being moved

    def begin(self, host: str, *, was_removed: bool = False) -> None:
        """Begin to move the workers of a host elsewhere; no effect while that goes on.

        Those that no other host takes serve on; of a host that `was_removed` they are ended.
        """
        if host not in self._hosts:
            self._hosts.add(host)
            moving = self._in_background(self._move_off(host, was_removed), f"moving workers off host {host}")
            moving.add_done_callback(lambda _: self._hosts.discard(host))

    async def _move_off(self, host: str, was_removed: bool) -> None:
        await self._booted.wait()
        for instance in tuple(self._instances.values()):
            if not await instance.move_off(host, was_removed) and not was_removed:
                await asyncio.sleep(_MOVE_PAUSE_S)
