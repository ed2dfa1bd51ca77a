"""A rehearsal of loads, for a plan: a copy of the fleet decides by the daemon's policy, and nothing else happens.

Time passes in the copy alone: a victim that may not go yet is waited for, as the daemon does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from teimgr.control.residence.events import (
    Decision,
    Declared,
    Deny,
    Event,
    Load,
    Loaded,
    Loading,
    NoRoom,
    Terms,
    Tick,
    Unload,
    Unloaded,
    Unloading,
)
from teimgr.control.residence.model import Fleet, Phase
from teimgr.control.residence.policy import decide

_MAX_TICKS = 1000


@dataclass(frozen=True, slots=True)
class Relief:
    """What is done for a load without room. `again`: it is judged again, after the models of `unloaded` are gone.

    Not `again`: it is refused, or, where `waits_for` names models, it waits until they have no calls.
    """

    again: bool
    unloaded: tuple[Unload, ...] = ()
    waits_for: tuple[str, ...] = ()


class Rehearsal:
    """A fleet in which the loads of a plan are tried, one after the other."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self._fleet = deepcopy(fleet)
        self._now = now

    def begin(self, name: str, terms: Terms) -> None:
        """An instance begins to load, as its owner would report."""
        self._tell(Declared(name, terms), Loading(name))

    def end(self, name: str, is_loaded: bool) -> None:
        """Its load is over; one that has failed is tried no more."""
        self._tell(Loaded(name) if is_loaded else Unloaded(name))

    def relieve(self, name: str, needed_bytes: int, free_bytes: int, held: Mapping[str, int]) -> Relief:
        """Return what `Residence.relieve` would do for a load that the ledger has refused."""
        unloaded: list[Unload] = []
        pending = self._tell(NoRoom(name, needed_bytes, free_bytes, held))
        for _ in range(_MAX_TICKS):
            if (again := self._carry_out(name, pending, unloaded)) is not None:
                return Relief(again, tuple(unloaded))
            if not waits(self._fleet, name):
                return Relief(False, tuple(unloaded))
            if (due := self._fleet.due()) is None:
                break
            self._now = max(self._now, due)
            pending = self._tell(Tick())
        busy = [other for other in held if other != name and self._is_busy(other)]
        return Relief(False, tuple(unloaded), tuple(busy))

    def _carry_out(self, name: str, decisions: Iterable[Decision], unloaded: list[Unload]) -> bool | None:
        """Have models unloaded at once; the answer to the load of `name`, None if it is not decided yet."""
        pending, answer = [*decisions], None
        while pending:
            match pending.pop(0):
                case Unload() as decision:
                    unloaded.append(decision)
                    pending += self._tell(Unloading(decision.model), Unloaded(decision.model))
                case Load(model) if model == name:
                    answer = True
                case Deny(model) if model == name:
                    answer = False
        return answer

    def _is_busy(self, name: str) -> bool:
        model = self._fleet.models.get(name)
        return model is not None and model.terms.on_demand and (model.is_busy or model.phase is not Phase.LOADED)

    def _tell(self, *events: Event) -> list[Decision]:
        return [decision for event in events for decision in decide(self._fleet, event, self._now)]


def waits(fleet: Fleet, name: str) -> bool:
    """True if a refused load of this model waits for room, or for the end of its unloading."""
    model = fleet.models.get(name)
    return model is not None and (model.waits_for_room or model.phase is Phase.UNLOADING)
