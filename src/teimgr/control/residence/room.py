"""Room for models: which loaded ones are evicted for another, the least valuable first, and who waits or is refused.

A model stays for as long as its load took, a more valuable one longer, and goes only without calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from teimgr.control.residence.events import Decision, Load, NoRoom, Refusal, Refuse, Unload
from teimgr.control.residence.model import (
    Fleet,
    Model,
    Phase,
    doing,
    enter,
    on_device,
    refuse_all,
    time_left_s,
    waiting_for_room,
)

MIN_RESIDENCE = 1.0
"""How long a model stays at least, in times of its own load; a more valuable one `MAX_PROTECTION` times as long."""
MAX_PROTECTION = 8.0


def load(fleet: Fleet, model: Model, reason: str, now: float) -> Iterator[Decision]:
    """Begin to load a model; behind those that wait for room already while theirs is being made."""
    model.begin_load(now)
    if any(each.evicted_for for each in on_device(fleet, model.terms.device) if each.phase is Phase.UNLOADING):
        enter(fleet, model, Phase.ROOM, now)
        model.lack(0, 0)  # not asked yet
        return
    enter(fleet, model, Phase.LOADING, now)
    yield Load(model.name, reason)


def no_room(fleet: Fleet, event: NoRoom, now: float) -> Iterator[Decision]:
    model = fleet.models.get(event.model)
    if model is None or model.phase is not Phase.LOADING or model.is_reported:
        return
    enter(fleet, model, Phase.ROOM, now)
    model.lack(event.needed_bytes, event.free_bytes)
    if model.is_wanted(now):
        yield from make_room(fleet, model, now)
    else:
        enter(fleet, model, Phase.UNLOADED, now)


def use_room(fleet: Fleet, device: str, now: float) -> Iterator[Decision]:
    """Memory was released: the models that wait for room try again, the first one first."""
    if any(each.evicted_for and each.phase is Phase.UNLOADING for each in on_device(fleet, device)):
        return
    for model in waiting_for_room(fleet, device):
        enter(fleet, model, Phase.LOADING, now)
        yield Load(model.name, "asked for by a call")


def make_rooms(fleet: Fleet, device: str, now: float) -> Iterator[Decision]:
    """Look for victims again, for the models that wait for room and have none that is ending."""
    ending = {each.evicted_for for each in on_device(fleet, device) if each.phase is Phase.UNLOADING} - {None}
    for model in waiting_for_room(fleet, device):
        if model.needed_bytes and model.name not in ending:
            yield from make_room(fleet, model, now)
        elif not ending:
            enter(fleet, model, Phase.LOADING, now)
            yield Load(model.name, "asked for by a call")


def make_room(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    """Evict what a model needs, the least valuable first; else it waits, or is refused where waiting is of no use."""
    model.retry_from(None)
    others = [each for each in on_device(fleet, model.terms.device) if each is not model and each.terms.bytes]
    movable = [each for each in others if each.terms.on_demand and not each.terms.pinned]
    spared = model.peace[0] if model.peace is not None and now < model.peace[1] else None
    idle = [each for each in movable if each.phase is Phase.LOADED and not each.is_busy]
    free_at = {each.name: _stays_until(each, model, now) for each in idle}
    victims = _least_valuable([each for each in idle if free_at[each.name] <= now and each.name != spared], model, now)
    if victims is not None:
        yield from (_evict(fleet, victim, model, now) for victim in victims)
        return
    reach = model.free_bytes + sum(each.terms.bytes for each in movable if each.phase is not Phase.ROOM)
    if reach < model.needed_bytes:
        held = ", ".join(f"'{each.name}'" for each in others if each not in movable) or "other programs"
        reason = (
            f"'{model.name}' needs {_mib(model.needed_bytes)} and {_mib(model.free_bytes)} are free; "
            f"no more can be: the rest is held by {held}"
        )
        yield from _give_up(fleet, model, Refusal.NO_ROOM, reason, None, now)
    elif spared is not None and model.peace is not None:
        left_s = model.peace[1] - now
        reason = f"'{model.name}' and '{spared}' evicted each other again and again: '{model.name}' is refused"
        yield from _give_up(fleet, model, Refusal.WAR, f"{reason} for {left_s:.3g} s", left_s, now)
    else:
        model.retry_from(min((at for at in free_at.values() if at > now), default=None))
        yield from _refuse_late(fleet, model, now)


def _evict(fleet: Fleet, victim: Model, model: Model, now: float) -> Unload:
    mine, theirs = victim.value(now), model.value(now)
    sign = "<" if mine < theirs else "=" if mine == theirs else ">"
    reason = f"evicted {victim.name}: value {mine:.3g} {sign} {theirs:.3g}, resident {now - victim.since:.3g} s"
    enter(fleet, victim, Phase.UNLOADING, now, keep_since=True)
    victim.yield_to(model.name)
    return Unload(victim.name, reason, model.name)


def _least_valuable(candidates: Iterable[Model], model: Model, now: float) -> list[Model] | None:
    """The least valuable ones that make enough room, none of them needlessly; None where all are too little."""
    missing = model.needed_bytes - model.free_bytes
    chosen: list[Model] = []
    for each in sorted(candidates, key=lambda each: (each.value(now), each.used_at)):
        if missing <= 0:
            break
        chosen.append(each)
        missing -= each.terms.bytes
    if missing > 0:
        return None
    for each in sorted(chosen, key=lambda each: each.value(now), reverse=True):
        if missing + each.terms.bytes <= 0:
            chosen.remove(each)
            missing += each.terms.bytes
    return chosen


def _stays_until(victim: Model, model: Model, now: float) -> float:
    """Until when a loaded model is not evicted for another: a more valuable one stays longer."""
    mine, theirs = victim.value(now), model.value(now)
    protection = min(MAX_PROTECTION, max(1.0, mine / theirs)) if theirs > 0 else MAX_PROTECTION
    return victim.since + MIN_RESIDENCE * victim.load_s * protection


def _give_up(
    fleet: Fleet, model: Model, why: Refusal, reason: str, retry_after_s: float | None, now: float
) -> Iterator[Decision]:
    enter(fleet, model, Phase.UNLOADED, now)
    yield from refuse_all(fleet, model, why, reason, retry_after_s)


def _refuse_late(fleet: Fleet, model: Model, now: float) -> Iterator[Decision]:
    """Refuse the calls that cannot be served in time any more."""
    left_s = time_left_s(model, now)
    if left_s is None:
        return
    for call, deadline in [*model.waiting.items()]:
        if deadline is not None and now + left_s > deadline:
            del model.waiting[call]
            fleet.calls.pop(call, None)
            reason = f"'{model.name}' is {doing(model)}, and {left_s:.3g} s are left"
            yield Refuse(call, Refusal.LATE, reason, left_s)
    if not model.is_wanted(now):
        enter(fleet, model, Phase.UNLOADED, now)


def _mib(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"
