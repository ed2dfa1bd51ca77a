"""Wars: two models that evict each other again and again while calls wait for both; the less valuable one loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from teimgr.control.residence.events import Decision, Notice
from teimgr.control.residence.model import Fleet, Model, Phase

WAR_SWITCHES = 2
"""A war: so often each of two models was evicted for the other, and asked for again before that had answered."""
WAR_WINDOW = 30.0
"""Such evictions count for this time, and `PEACE` is how long the loser of a war is refused: in times of a load."""
PEACE = 10.0
MIN_PEACE_S = 5.0


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
        return  # another call during the same load
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
