"""Policy of models on demand: which model is loaded, unloaded or evicted, and which call waits or is refused.

Only `decide` changes a `Fleet`: it takes an event and the time and returns decisions with their reasons. It reads no
clock and does no I/O, so simulations and tests run the same code as the daemon.

    UNLOADED --call--> LOADING --ready--> LOADED --idle or evicted--> UNLOADING --> UNLOADED
                          |  ^
                   no room v  | room
                         ROOM

FAILED and STOPPED refuse calls. What a model's phase is follows from what its owner reports, never from a guess of a
caller: who wants it asks, and is served or refused.

`Rehearsal` has a copy of the fleet decide for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from teimgr.control.residence.events import (
    Busy,
    CallAsked,
    Decision,
    Declared,
    Deny,
    Event,
    Kept,
    Left,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    NoRoom,
    Outgrown,
    Refusal,
    Refuse,
    Removed,
    Serve,
    Terms,
    Tick,
    Unload,
    Unloaded,
    Unloading,
    Used,
    UserStopped,
)
from teimgr.control.residence.model import (
    Fleet,
    Model,
    Phase,
    WaitingCall,
    doing,
    enter,
    idle_until,
    refuse_all,
    serve_all,
    time_left_s,
)
from teimgr.control.residence.room import NOT_WANTED, give_up, load, make_rooms, no_room, note_clash, outgrown, use_room

MAX_WAITING = 1024
"""Limit of waiting calls per model; a key's calls leave room for others (`leaves_room`)."""
COME_AGAIN_S = 5.0
"""Time after its `Retry-After` during which a refused caller's model stays loaded."""


def decide(fleet: Fleet, event: Event, now: float) -> list[Decision]:
    """Change the fleet by an event that happened at `now`; the result is what is to be done."""
    return list(_HANDLERS[type(event)](fleet, event, now))


# Declarations


def _declared(fleet: Fleet, event: Declared, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is None:
        fleet.models[event.model] = Model(event.model, event.terms, since=now, hits_at=now, used_at=now)
        return
    may_go = model.may_go
    model.declare(event.terms)
    if model.may_go and not may_go:
        yield from make_rooms(fleet, now)


def _removed(fleet: Fleet, event: Removed, now: float) -> Iterator[Decision]:
    model = fleet.models.pop(event.model, None)
    fleet.active.pop(event.model, None)
    if model is None:
        return
    for pair in [pair for pair in fleet.clashes if event.model in pair]:
        del fleet.clashes[pair]
    for call in model.serving:
        fleet.calls.pop(call, None)
    yield from refuse_all(fleet, model, Refusal.UNKNOWN, f"Instance '{model.name}' not found", None)
    yield from use_room(fleet, now)


# Calls


def _asked(fleet: Fleet, event: CallAsked, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is None:
        yield Refuse(event.call, Refusal.UNKNOWN, f"Instance '{event.model}' not found")
        return
    if model.phase is Phase.LOADED:
        model.serving.add(event.call)
        fleet.calls[event.call] = model.name
        yield Serve(event.call)
        return
    if (refusal := _closed(model, event.call, now)) is not None:
        yield refusal
        return
    model.count(1, now)
    yield from note_clash(fleet, model, now)
    left_s = time_left_s(model, now)
    if not model.has_place(event.key, MAX_WAITING):
        whose = "" if len(model.waiting) >= MAX_WAITING else ", too many of this key"
        reason = f"{len(model.waiting)} calls wait for '{model.name}' to be loaded{whose}"
        yield Refuse(event.call, Refusal.QUEUE, reason, left_s)
    elif event.deadline is not None and left_s is not None and now + left_s > event.deadline:
        given = max(0.0, event.deadline - now)
        reason = f"'{model.name}' is {doing(model)}, {left_s:.3g} s are left, and the call may wait for {given:.3g} s"
        yield Refuse(event.call, Refusal.LATE, reason, left_s)
        model.want_until(now + left_s + COME_AGAIN_S)  # the load begins for the caller's retry
    else:
        model.waiting[event.call] = WaitingCall(event.deadline, event.key)
        fleet.calls[event.call] = model.name
    if model.phase is Phase.UNLOADED:
        model.go_to(*event.devices)
        yield from load(fleet, model, "asked for by a call", now)


def _closed(model: Model, call: int, now: float) -> Refuse | None:
    """The refusal of a call for a model that no call loads."""
    name = model.name
    if model.phase is Phase.STOPPED:
        return Refuse(call, Refusal.STOPPED, f"Instance '{name}' is not running (status: stopped)")
    if model.phase is Phase.FAILED:
        left_s = None if model.retry_at is None else max(0.0, model.retry_at - now)
        return Refuse(call, Refusal.FAILED, model.reason, left_s, model.code)
    if not model.terms.on_demand and model.phase is Phase.UNLOADED:
        return Refuse(call, Refusal.STOPPED, f"Instance '{name}' is not running and is not loaded on demand")
    return None


def _left(fleet: Fleet, event: Left, now: float) -> Iterator[Decision]:
    model = fleet.models.get(fleet.calls.pop(event.call, ""))
    if model is None:
        return
    if event.call in model.serving:
        model.serving.discard(event.call)
        model.use(now)
    model.waiting.pop(event.call, None)
    if model.phase is Phase.ROOM and not model.is_wanted(now):
        yield from give_up(fleet, model, NOT_WANTED, now)
    yield from make_rooms(fleet, now)


def _kept(fleet: Fleet, event: Kept, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is not None and model.phase is Phase.LOADED:
        model.keep(event.key, event.seconds, now)
        model.use(now)
    return iter(())


def _used(fleet: Fleet, event: Used, now: float) -> Iterator[Decision]:
    if (model := fleet.models.get(event.model)) is not None:
        model.called_by(event.keys, now)
        if event.calls > 0:
            model.serve(event.calls)
            model.count(event.calls, now)
        elif event.under_way:
            model.use(now)
        if model.ends_calls(event.under_way):
            yield from make_rooms(fleet, now)


# Reports of the owner


def _loading(fleet: Fleet, event: Loading, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is not None:
        if model.phase is not Phase.LOADING:
            enter(fleet, model, Phase.LOADING, now)
        model.confirm_load()
    return iter(())


def _loaded(fleet: Fleet, event: Loaded, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is None or model.phase is Phase.LOADED:
        return
    if model.phase is Phase.UNLOADING:  # it had calls and keeps serving
        yield from _busy(fleet, Busy(model.name), now)
        return
    if model.phase is Phase.LOADING and model.load_began is not None and model.terms.load_s is None:
        model.declare(replace(model.terms, load_s=now - model.since))
    is_short = model.phase is Phase.ROOM and model.is_reported and model.needed_bytes > 0
    enter(fleet, model, Phase.LOADED, now)
    if is_short:  # one worker is ready, another waits for memory
        model.grow(True)
        model.begin_load(now)
    model.use(now)
    model.yield_to(None)
    model.begin_stay()
    yield from serve_all(model)
    yield from make_rooms(fleet, now)


def _not_loaded(fleet: Fleet, event: LoadFailed, now: float) -> Iterator[Decision]:
    if (model := fleet.models.get(event.model)) is None:
        return
    enter(fleet, model, Phase.FAILED, now)
    model.fail(event.reason, None if event.retry_s is None else now + event.retry_s, event.code)
    yield from refuse_all(fleet, model, Refusal.FAILED, model.reason, event.retry_s, model.code)
    yield from use_room(fleet, now)


def _unloading(fleet: Fleet, event: Unloading, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is not None and model.phase is not Phase.UNLOADING:
        enter(fleet, model, Phase.UNLOADING, now)
    return iter(())


def _unloaded(fleet: Fleet, event: Unloaded, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is None or model.phase is Phase.ROOM or (model.phase is Phase.LOADING and not model.is_reported):
        return  # a load has been ordered
    for call in model.serving:
        fleet.calls.pop(call, None)
    model.serving.clear()
    enter(fleet, model, Phase.UNLOADED, now)
    yield from use_room(fleet, now)
    if model.waiting and model.phase is Phase.UNLOADED:
        yield from load(fleet, model, "asked for by a call", now)


def _stopped(fleet: Fleet, event: UserStopped, now: float) -> Iterator[Decision]:
    if (model := fleet.models.get(event.model)) is None:
        return
    enter(fleet, model, Phase.STOPPED, now)
    reason = f"Instance '{model.name}' is not running (status: stopped)"
    yield from refuse_all(fleet, model, Refusal.STOPPED, reason, None)
    yield from use_room(fleet, now)


def _busy(fleet: Fleet, event: Busy, now: float) -> Iterator[Decision]:
    """It serves on. Who wanted its memory looks for other room."""
    model = fleet.models.get(event.model)
    if model is None or model.phase is not Phase.UNLOADING:
        return
    model.stay_loaded(now)
    yield from serve_all(model)
    yield from make_rooms(fleet, now)


# Time


def _tick(fleet: Fleet, event: Tick, now: float) -> Iterator[Decision]:
    for model in [*fleet.active.values()]:
        if (goes_at := idle_until(model)) is not None and goes_at <= now:
            reason = f"idle for {now - model.used_at:.3g} s"
            if (asked_s := model.stay()[1]) is not None:
                reason += f", kept for {asked_s:.3g} s as requested by a call"
            enter(fleet, model, Phase.UNLOADING, now, keep_since=True)
            yield Unload(model.name, reason)
        elif model.phase is Phase.ROOM and not model.is_wanted(now):
            yield from give_up(fleet, model, NOT_WANTED, now)
    yield from make_rooms(fleet, now)


_HANDLERS: dict[type, Callable[..., Iterator[Decision]]] = {
    Declared: _declared,
    Removed: _removed,
    CallAsked: _asked,
    Left: _left,
    Kept: _kept,
    Used: _used,
    Loading: _loading,
    Loaded: _loaded,
    LoadFailed: _not_loaded,
    Unloading: _unloading,
    Unloaded: _unloaded,
    UserStopped: _stopped,
    NoRoom: no_room,
    Outgrown: outgrown,
    Busy: _busy,
    Tick: _tick,
}


_MAX_TICKS = 1000


@dataclass(frozen=True, slots=True)
class Relief:
    """The result for a load without room. `again`: judge it again after the models in `unloaded` have gone.

    Otherwise it waits until the models in `waits_for` have no calls, or is refused if there are none.
    """

    again: bool
    unloaded: tuple[Unload, ...] = ()
    waits_for: tuple[str, ...] = ()


class Rehearsal:
    """A fleet in which the loads of a plan are tried one after another."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self._fleet = _copied(fleet)
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


def _copied(fleet: Fleet) -> Fleet:
    """Return a copy that shares nothing that changes. Most of thousands of models have no calls, and are copied one by
    one: to copy each in depth would take 50 µs."""
    busy = {name: model for name, model in fleet.models.items() if name in fleet.active or _has_calls(model)}
    made = deepcopy(replace(fleet, models=busy))
    made.models = {
        name: made.models.get(name) or replace(model, waiting={}, serving=set(), wishes={})
        for name, model in fleet.models.items()
    }
    return made


def _has_calls(model: Model) -> bool:
    return bool(model.waiting or model.serving or model.wishes)
