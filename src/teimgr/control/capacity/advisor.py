"""The daemon's task that watches instances, recommends changes, and reverts applied changes without effect.

The rules are in `recommendations`. Applied changes are kept across restarts until they are judged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from teimgr.control.background import KeptFile, regularly
from teimgr.control.capacity.history import HOUR_S, INTERVAL_S, History, Memory, Stats, by_instance, unseen
from teimgr.control.capacity.recommendations import Card, Expectation, Observation, Recommendation, recommend, verdict
from teimgr.control.ledger.admission import Admission
from teimgr.control.placement.hosts import Inventory, InventorySource
from teimgr.errors import InstanceNotFound, ObjectNotFound, TeimgrError
from teimgr.spec import Incident, InstanceSpec, InstanceView, known, now_rfc3339

log = logging.getLogger(__name__)

DEFAULT_WINDOW_S = 600
SEEN_PART = 0.5  # fraction of a window that must be observed
MAX_WINDOW_S = int(HOUR_S)
_SECTION = "applied"
_KEPT = 100
_MAX_TRIES = 3  # to revert a change
_MAX_EXTENSIONS = 3  # of the window, if there is too little work to judge
_NOT_AGAIN_S = 86400.0  # after a revert
_CARD_PER_HELD = 2  # bytes of a card per byte on the host


class Fleet(Protocol):
    """The manager of the instances."""

    def get(self, name: str) -> InstanceView:
        """One instance.

        Raises:
            InstanceNotFound.
        """

    async def update(self, name: str, changes: Mapping[str, Any]) -> InstanceView: ...

    def note(self, name: str, incident: Incident) -> None: ...


@dataclass(slots=True, kw_only=True)
class Applied:
    """An applied recommendation; `before` are the old values of its keys, `until` is when it is judged (Unix time).

    `state` is `watched`, `kept`, `taken_back`, `refused` (its update failed, or every revert failed) or `superseded`
    (the keys were changed since); `result` is the reason. `reversal` are the figures that caused the revert in
    progress, the `tries`-th one.
    """

    id: str
    instance: str
    finding: str
    patch: dict[str, Any]
    before: dict[str, Any]
    expects: Expectation
    applied_at: str
    window_secs: float
    until: float
    extensions: int = 0
    state: str = "watched"
    result: str | None = None
    reversal: str | None = None
    tries: int = 0

    def ends(self, state: str, result: str) -> None:
        self.state, self.result = state, result

    def follow_clock(self, now: float) -> None:
        """Judge it within its window, even if the clock was ahead when it was applied and was set back since."""
        self.until = min(self.until, now + self.window_secs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"expects": self.expects._asdict()}


class Advisor:
    """Recommendations for `fleet` from its workers' reports; `run` is its task."""

    def __init__(
        self,
        fleet: Fleet,
        stats: Stats,
        memory: Admission,
        cards: InventorySource,
        kept: KeptFile | None = None,
        pays: Callable[[str], bool] = lambda name: True,
        clock: Callable[[], float] = time.time,
        seen_part: float = SEEN_PART,
    ) -> None:
        self._seen_part = seen_part
        self._fleet = fleet
        self._stats = stats
        self._memory = memory
        self._cards = cards
        self._kept = kept or KeptFile()
        self._pays = pays
        self._clock = clock
        self._histories: dict[str, History] = {}
        self._applied: list[Applied] = []

    def restore(self) -> None:
        """Take over what an earlier daemon has applied."""
        try:
            records = [
                Applied(**known(Applied, record) | {"expects": Expectation(**record["expects"])})
                for record in self._kept.get(_SECTION) or ()
            ]
        except (TypeError, KeyError, ValueError) as error:
            log.warning("cannot read the applied recommendations of an earlier daemon: %s", error)
            return
        self._applied = records[-_KEPT:]

    async def run(self) -> None:
        """Watch until cancelled."""
        await regularly(self._look_and_judge, INTERVAL_S, "no recommendations", log)

    async def _look_and_judge(self) -> None:
        await self.look()
        await self.judge()

    async def look(self) -> None:
        """Take a reading of every instance with workers."""
        found = by_instance(await self._stats(None))
        now = asyncio.get_running_loop().time()
        before, self._histories = self._histories, {}
        for name in dict.fromkeys((*before, *found)):
            with suppress(InstanceNotFound):
                view, history = self._fleet.get(name), before.get(name) or History()
                if workers := found[name]:
                    history.add(view, workers, now)
                if workers or any(each.incarnation for each in view.workers):  # late workers keep their counts
                    self._histories[name] = history

    async def recommendations(
        self, window_s: float = DEFAULT_WINDOW_S, only: Callable[[str], bool] = lambda name: True
    ) -> list[Recommendation]:
        """What to change now, by the last `window_s` seconds, of the instances that `only` covers.

        None of an instance that was seen for less than half of them, or whose last change is still watched, and none
        that was taken back within a day.
        """
        await self.look()
        cards = await self._cards.read()
        watched = {each.instance for each in self._applied if each.state == "watched"}
        self._follow_clock()
        recent = [each for each in self._applied if self._clock() < each.until + _NOT_AGAIN_S]
        vain = {each.id for each in recent if each.state == "taken_back"}
        found: list[Recommendation] = []
        for name in self._histories:
            if name not in watched and only(name):
                with suppress(InstanceNotFound):
                    seen = self._observe(name, cards, window_s)
                    found += recommend(seen) if seen.span_s >= self._seen_part * window_s else ()
        return [each for each in found if each.id not in vain]

    async def find(self, id: str, window_s: float = DEFAULT_WINDOW_S) -> Recommendation:
        """A recommendation of now by its id.

        Raises:
            ObjectNotFound: it is not recommended, or not any more.
        """
        _, _, name = id.partition(".")
        for each in await self.recommendations(window_s, name.__eq__):
            if each.id == id:
                return each
        raise ObjectNotFound("recommendation", id)

    def applied(self) -> list[Applied]:
        """What was applied, the latest last."""
        return [*self._applied]

    def watch(self, made: Recommendation, before: InstanceSpec, window_s: float) -> Applied:
        """Watch a recommendation whose PATCH was accepted: it is judged after `window_s`."""
        assert made.patch is not None
        assert made.expects is not None
        record = Applied(
            id=made.id,
            instance=made.instance,
            finding=made.finding,
            patch=dict(made.patch),
            before={name: getattr(before, name) for name in made.patch},
            expects=made.expects,
            applied_at=now_rfc3339(),
            window_secs=window_s,
            until=self._clock() + window_s,
        )
        self._applied = [*self._applied, record][-_KEPT:]
        self._keep()
        self._tell(record, "applied", f"{made.finding}; {_words(record.patch)}, expected: {made.effect}")
        return record

    async def judge(self) -> None:
        """Judge what has had its window: keep it, or take it back."""
        self._follow_clock()
        due = [each for each in self._applied if each.state == "watched"]
        before = [(each.state, each.until) for each in due]
        cards = await self._cards.read() if due else Inventory()
        for each in due:
            try:
                view = self._fleet.get(each.instance)
                if view.update is None or view.update.state != "rolling":
                    await self._judge(each, view, cards)
            except InstanceNotFound:  # before, or while it was judged
                each.ends("superseded", "the instance was deleted")
        if before != [(each.state, each.until) for each in due]:
            self._keep()

    async def _judge(self, record: Applied, view: InstanceView, cards: Inventory) -> None:
        now, update = {name: getattr(view.spec, name) for name in record.patch}, view.update
        has_failed = update is not None and update.state == "failed" and {*update.changes} == {*now}
        if record.reversal is not None and now == record.before:
            record.ends("taken_back", record.reversal)
            record.until = self._clock()
            self._tell(record, "taken_back", f"{_words(record.patch)} is reverted: {record.result}")
            return
        if now != record.patch:
            if update and has_failed and now == record.before:
                record.ends("refused", update.reason or "the update failed")
                self._tell(record, "refused", f"{_words(record.patch)} is not applied: {record.result}")
            else:
                record.ends("superseded", f"changed by a user to {_words(now)}")
            return
        if record.reversal is not None and update and has_failed:
            record.reversal, record.result = None, f"not taken back: {update.reason or 'the update failed'}"
            log.warning("not taken back", extra={"instance": record.instance, "reason": update.reason})
        if self._clock() < record.until:
            return
        seen = self._observe(record.instance, cards, record.window_secs * (1 + record.extensions))
        least_s = self._seen_part * record.window_secs
        is_met, figures = verdict(record.expects, seen, least_s)
        is_unseen = seen.span_s < least_s  # after a restart of the daemon; not counted as an extension
        if is_met is None and (is_unseen or record.extensions < _MAX_EXTENSIONS):
            record.extensions += not is_unseen
            record.until = self._clock() + record.window_secs
        elif is_met:
            record.ends("kept", figures)
            log.info("recommendation kept", extra={"instance": record.instance, "reason": figures})
        elif record.tries == _MAX_TRIES:
            record.ends("refused", record.result or "the update failed")
            self._tell(record, "refused", f"{_words(record.before)} is not applied: {record.result}")
        else:
            await self._take_back(record, figures, cards)

    async def _take_back(self, record: Applied, figures: str, cards: Inventory) -> None:
        """Begin the update that restores the keys: it is over at a later reading, or tried again after a window."""
        record.reversal, record.tries, record.until = figures, record.tries + 1, self._clock() + record.window_secs
        try:
            await self._fleet.update(record.instance, record.before)
        except InstanceNotFound:
            raise
        except TeimgrError as error:
            record.reversal, record.result = None, f"not taken back: {error.message}"
            log.warning("not taken back", extra={"instance": record.instance, "reason": error.message})
            return
        view = self._fleet.get(record.instance)
        if view.update is None or view.update.state != "rolling":  # no worker was replaced
            await self._judge(record, view, cards)

    def _observe(self, name: str, cards: Inventory, window_s: float) -> Observation:
        view, history = self._fleet.get(name), self._histories.get(name)
        memory = self._memory_of(view, cards)
        if history is None:
            return unseen(view, memory)
        return history.observe(view, memory, window_s, self._pays(name))

    def _memory_of(self, view: InstanceView, cards: Inventory) -> Memory:
        held = self._memory.ledger.held_by(view.spec.name)
        size = sum(each.footprint.host_bytes + each.footprint.device_bytes for each in held)
        if not held or any(each.place.gpu is not None for each in held):
            return Memory(size)
        batch = max(0, self._memory.footprints.room_for_a_batch(view.spec) - view.spec.cache_bytes)
        own = [card for card in cards.gpus if card.node == held[0].place.host]
        free = {card.uuid: self._memory.ledger.free(card.uuid) for card in own}
        card = max(own, key=lambda each: free[each.uuid] or 0, default=None)
        room = 0 if card is None else free[card.uuid] or 0
        if card is None or room < _CARD_PER_HELD * size / len(held):
            return Memory(size, batch * len(held))
        return Memory(size, batch * len(held), Card(card.index, card.name, room))

    def _follow_clock(self) -> None:
        for each in self._applied:
            each.follow_clock(self._clock())

    def _keep(self) -> None:
        self._kept.put(_SECTION, [each.to_dict() for each in self._applied])

    def _tell(self, record: Applied, event: str, reason: str) -> None:
        log.info(event, extra={"instance": record.instance, "reason": reason})
        self._fleet.note(record.instance, Incident(event=event, reason=f"{record.id}: {reason}", at=now_rfc3339()))


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in keys.items())
