"""Eviction of models to make room for another, the least valuable first; which loads wait or are refused; wars.

A model without calls may be evicted after a minimum stay: its load time, or longer if it is more valuable. It may go
sooner if only the calls that loaded it have come, or if all models together exceed the budget.

In a war, two models keep evicting each other while calls wait for both. The less valuable one loses: for a while, its
peace, it does not evict the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from teimgr.control.ledger.system_memory import mib
from teimgr.control.residence.events import (
    Decision,
    Deny,
    Held,
    Load,
    NoRoom,
    Notice,
    Outgrown,
    Refusal,
    Refuse,
    Unload,
)
from teimgr.control.residence.model import Fleet, Model, Phase, doing, enter, refuse_all, time_left_s, waiting_for_room

MIN_RESIDENCE = 1.0
"""Minimum stay in load times; up to `MAX_PROTECTION` times longer for more valuable models."""
MAX_PROTECTION = 8.0
MAX_STAY_S = 10.0
"""Limit of minimum stays longer than one load time, since a load time may include the fork server's start."""
UNUSED = 0.1
"""A model that is not clearly more valuable and had only the calls that loaded it may be evicted this part of its load
time after the last of them. So a caller that alternates between two models does not wait for the minimum stay."""
_CLEARLY_MORE = 2.0
WAR_SWITCHES = 2
"""A war begins after each of two models was evicted for the other this often and called again before the other had
answered a call."""
WAR_WINDOW, PEACE = 30.0, 10.0
"""How long such an eviction counts, and how long the loser of a war is refused, in longer load times."""
MIN_PEACE_S = 5.0
_HOLDERS_LOGGED = 20

NOT_WANTED = "no call is waiting for it"


def load(fleet: Fleet, model: Model, reason: str, now: float) -> Iterator[Decision]:
    """Begin to load a model; behind those that wait for room on its device already while theirs is being made."""
    model.begin_load(now)
    if _is_ending_for(fleet, model):
        enter(fleet, model, Phase.ROOM, now)
        model.lack(0, 0, {})
        return
    enter(fleet, model, Phase.LOADING, now)
    yield Load(model.name, reason)


def no_room(fleet: Fleet, event: NoRoom, now: float) -> Iterator[Decision]:
    """A load was refused by the ledger: evict others for it, or wait until that is possible.

    One more worker of a loaded model has the same done for it, while the model serves on.
    """
    model = fleet.models.get(event.model)
    if model is None or model.phase not in (Phase.LOADING, Phase.LOADED):
        return
    for name, count in event.held.items():
        if name in fleet.models:
            fleet.models[name].hold(count)
    if model.phase is Phase.LOADED:
        model.grow(True)
    else:
        enter(fleet, model, Phase.ROOM, now)
    model.begin_load(now)
    model.lack(event.needed_bytes, event.free_bytes, event.held)
    model.go_to(event.device)
    if model.is_wanted(now):
        yield from make_room(fleet, model, now)
    else:
        yield from give_up(fleet, model, NOT_WANTED, now)


def outgrown(fleet: Fleet, event: Outgrown, now: float) -> Iterator[Decision]:
    """Loaded models exceed the budget: evict the least valuable idle ones at once, even before their minimum stay."""
    grown = fleet.models.get(event.model)
    if grown is None:
        return
    grown.go_to(event.device)
    for name, count in event.held.items():
        if name in fleet.models:
            fleet.models[name].hold(count)
    others = [fleet.models[name] for name in event.held if name in fleet.models and name != grown.name]
    excess = event.excess_bytes - sum([each.bytes for each in others if each.phase is Phase.UNLOADING])
    idle = [each for each in _movable(others) if each.phase is Phase.LOADED and not each.is_busy]
    victims = _least_valuable(idle, excess, now)
    for victim in idle if victims is None else victims:
        yield _evict(fleet, victim, grown, now, f"all models exceed the budget by {mib(event.excess_bytes)}, ")


def use_room(fleet: Fleet, now: float) -> Iterator[Decision]:
    """Memory was released: the models that wait for room try again, the first one first.

    Each once no victim is ending on its device.
    """
    for model in waiting_for_room(fleet):
        model.doubt()
        if not _is_ending_for(fleet, model):
            yield from _try_again(fleet, model, now)


def make_rooms(fleet: Fleet, now: float) -> Iterator[Decision]:
    """Look for victims again, for the models that wait for room and have none that is ending.

    One whose figures are outdated tries again instead: of two victims one may have gone, and one had a call.
    """
    ending = _ending(fleet)
    for model in waiting_for_room(fleet):
        if model.is_outdated:
            if not _is_ending_for(fleet, model):
                yield from _try_again(fleet, model, now)
        elif model.name not in ending:
            yield from make_room(fleet, model, now)


def make_room(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    """Evict what a model needs, the least valuable first; else it waits, or is refused where waiting is of no use."""
    model.retry_from(None)
    others = [fleet.models[name] for name in model.held if name in fleet.models and name != model.name]
    movable = _movable(others)
    spared, peace_left_s = model.spared(now)
    idle = [each for each in movable if each.phase is Phase.LOADED and not each.is_busy]
    free_at = {each.name: _stays_until(each, model, now) for each in idle}
    ready = [each for each in idle if free_at[each.name] <= now and each.name != spared]
    victims = _least_valuable(ready, model.needed_bytes - model.free_bytes, now)
    if victims is not None:
        for victim in victims:
            yield _evict(fleet, victim, model, now)
        if not victims:
            yield from _try_again(fleet, model, now)
    elif (most := model.free_bytes + sum(each.bytes for each in movable)) < model.needed_bytes:
        staying = sorted([each for each in others if each not in movable], key=lambda each: each.bytes, reverse=True)
        count = f"{len(staying)} other instances, which stay" if len(staying) > 1 else "another instance, which stays"
        held = f"{mib(sum(each.bytes for each in staying))} are held by {count}"
        why = f": {held}" if staying else "" if movable else ": no other instance holds any"
        reason = (
            f"'{model.name}' needs {mib(model.needed_bytes)} and {mib(model.free_bytes)} are free; "
            f"{f'at most {mib(most)}' if movable else 'no more'} can be{why}"
        )
        yield Held(model.name, tuple(each.name for each in staying[:_HOLDERS_LOGGED]))
        yield from give_up(fleet, model, reason, now, Refusal.NO_ROOM)
    elif spared is not None:
        reason = (
            f"'{model.name}' and another instance keep evicting each other: '{model.name}' is refused for "
            f"{peace_left_s:.3g} s"
        )
        yield from give_up(fleet, model, reason, now, Refusal.WAR, peace_left_s)
    else:
        model.retry_from(min((at for at in free_at.values() if at > now), default=None))
        yield from _refuse_late(fleet, model, now)


def note_clash(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    """Count a call for a model whose evictor has not answered yet; enough of them, in both directions, are a war."""
    winner = fleet.models.get(model.evicted_for or "")
    if winner is None or winner.phase not in (Phase.LOADING, Phase.ROOM):
        return
    if model.phase is Phase.UNLOADED:
        model.yield_to(None)
    pair = frozenset((model.name, winner.name))
    clashes = fleet.clashes.setdefault(pair, deque(maxlen=8 * WAR_SWITCHES))
    if clashes and clashes[-1] == (winner.since, model.name):
        return
    clashes.append((winner.since, model.name))
    longest_s = max(model.load_s, winner.load_s)
    while clashes and now - clashes[0][0] > WAR_WINDOW * longest_s:
        clashes.popleft()
    if min(sum(name == each for _, name in clashes) for each in pair) < WAR_SWITCHES:
        return
    loser, other = sorted((model, winner), key=lambda each: (each.value(now), each is winner))
    peace_s = max(MIN_PEACE_S, PEACE * longest_s)
    loser.spare(other.name, now + peace_s)
    reason = (
        f"war: '{model.name}' and '{winner.name}' evicted each other {len(clashes)} times in "
        f"{now - clashes[0][0]:.3g} s; '{loser.name}' does not evict '{other.name}' for {peace_s:.3g} s: "
        f"value {loser.value(now):.3g} <= {other.value(now):.3g}"
    )
    del fleet.clashes[pair]
    yield Notice(loser.name, reason)


def give_up(
    fleet: Fleet,
    model: Model,
    reason: str,
    now: float,
    why: Refusal = Refusal.NO_ROOM,
    retry_after_s: float | None = None,
) -> Iterator[Decision]:
    """Load a model no further that waits for room, and refuse the calls that wait for it."""
    yield from refuse_all(fleet, model, why, reason, retry_after_s)
    if model.is_growing:
        model.grow(False)
        yield Deny(model.name, reason)
    elif not model.is_reported:
        enter(fleet, model, Phase.UNLOADED, now)
    elif model.terms.on_demand:
        enter(fleet, model, Phase.UNLOADING, now)
        yield Unload(model.name, reason)
    else:
        enter(fleet, model, Phase.LOADING, now)
        yield Deny(model.name, reason)


def _try_again(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    if model.is_growing:
        model.grow(False)
        yield Load(model.name, "one more worker")
        return
    enter(fleet, model, Phase.LOADING, now)
    yield Load(model.name, "asked for by a call")


def _ending(fleet: Fleet) -> set[str]:
    """The models for which another one is ending."""
    return {each.evicted_for for each in fleet.active.values() if each.evicted_for and each.phase is Phase.UNLOADING}


def _is_ending_for(fleet: Fleet, model: Model) -> bool:
    """True if a model is ending for another one on a device that this one needs, or may need."""
    return any(model.may_share(fleet.models.get(name)) for name in _ending(fleet))


def _movable(models: Iterable[Model]) -> list[Model]:
    return [each for each in models if each.may_go]


def _evict(fleet: Fleet, victim: Model, model: Model, now: float, why: str = "") -> Unload:
    mine, theirs = victim.value(now), model.value(now)
    sign = "<" if mine < theirs else "=" if mine == theirs else ">"
    reason = f"evicted {victim.name}: {why}value {mine:.3g} {sign} {theirs:.3g}, resident {now - victim.since:.3g} s"
    enter(fleet, victim, Phase.UNLOADING, now, keep_since=True)
    victim.yield_to(model.name)
    return Unload(victim.name, reason, model.name)


def _least_valuable(candidates: Iterable[Model], missing: int, now: float) -> list[Model] | None:
    """The least valuable ones that hold `missing` bytes, none of them needlessly; None if all together hold less."""
    chosen: list[Model] = []
    for each in sorted(candidates, key=lambda each: (each.value(now), each.used_at)):
        if missing <= 0:
            break
        chosen.append(each)
        missing -= each.bytes
    if missing > 0:
        return None
    for each in sorted(chosen, key=lambda each: each.value(now), reverse=True):
        if missing + each.bytes <= 0:
            chosen.remove(each)
            missing += each.bytes
    return chosen


def _stays_until(victim: Model, model: Model, now: float) -> float:
    """Until when a loaded model is not evicted for another: a more valuable one stays longer, an unused one shorter."""
    load_s = victim.load_s
    mine, theirs = victim.value(now), model.value(now)
    if model.terms.load_s is None:  # assumed to load as long as the victim
        theirs *= load_s / model.load_s
    protection = min(MAX_PROTECTION, max(1.0, mine / theirs)) if theirs > 0 else MAX_PROTECTION
    until = victim.since + min(MIN_RESIDENCE * load_s * protection, max(load_s, MAX_STAY_S))
    if protection < _CLEARLY_MORE and not victim.is_used_again:
        return min(until, victim.used_at + UNUSED * load_s)
    return until


def _refuse_late(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    """Refuse the calls that cannot be served in time any more."""
    left_s = time_left_s(model, now)
    if left_s is None:
        return
    for call, (deadline, _) in [*model.waiting.items()]:
        if deadline is not None and now + left_s > deadline:
            del model.waiting[call]
            fleet.calls.pop(call, None)
            reason = f"'{model.name}' is {doing(model)}, and {left_s:.3g} s are left"
            yield Refuse(call, Refusal.LATE, reason, left_s)
    if not model.is_wanted(now):
        yield from give_up(fleet, model, NOT_WANTED, now)
