"""The daemon's task that scales replicas by the policy.

`figures` returns the load of every instance, also for external scalers such as KEDA.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from teimgr.control.background import KeptFile, regularly
from teimgr.control.capacity.history import Counters, Refusals, Stats, by_instance
from teimgr.control.capacity.policy import MIN_SAMPLES, Decision, Reading, Seen, Terms, adds, decide
from teimgr.control.ledger.footprints import engine_version
from teimgr.control.placement.planner import usable_cores
from teimgr.errors import TeimgrError
from teimgr.http.turns import LISTING
from teimgr.observability import catalogue
from teimgr.observability.exposition import Page, Sample
from teimgr.spec import Incident, InstanceView, State, WorkerView, now_rfc3339

log = logging.getLogger(__name__)

_SECTION = "rates"
_MAX_RATES = 10_000
_SAME = 0.05
"""A measurement that differs from the kept one by at most this fraction is not written."""
_MAX_SAMPLES = 100


def rates_key(view: InstanceView, workers: Iterable[WorkerView]) -> str:
    """Return the key of the rates of an instance's workers, as one text."""
    spec = view.spec
    device = f"cpu of {usable_cores()}" if any(each.gpu is None for each in workers) else "gpu"
    facts = (spec.model_id, spec.revision, spec.dtype, spec.max_batch_tokens, spec.threads, device, engine_version())
    return "|".join(map(str, facts))


class MeasuredRates:
    """Rates by `rates_key`, kept in a section of `kept`."""

    def __init__(self, kept: KeptFile) -> None:
        self._kept = kept
        self._rates: dict[str, tuple[float, dict[int, tuple[float, int]]]] = {}

    def restore(self) -> None:
        """Take over the rates of the file."""
        try:
            self._rates = {str(key): _of(record) for key, record in (self._kept.get(_SECTION) or {}).items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            log.warning("cannot read the measured rates; measuring again: %s", error)

    def seen(self, key: str) -> Seen:
        """Return the policy's initial state: only the measured rates."""
        if (known := self._rates.get(key)) is None:
            return Seen()
        return Seen(rate=known[0], totals=known[1])

    def learn(self, key: str, seen: Seen) -> None:
        """Keep rates that differ from those that are kept."""
        if seen.rate is None:
            return
        totals = {count: (value, min(_MAX_SAMPLES, samples)) for count, (value, samples) in seen.totals.items()}
        known = self._rates.get(key)
        if known is not None and not _differ(known[0], seen.rate) and _are_alike(known[1], totals):
            return
        self._rates.pop(key, None)
        self._rates[key] = seen.rate, totals
        while len(self._rates) > _MAX_RATES:
            del self._rates[next(iter(self._rates))]
        self._kept.put(_SECTION, {key: _record(*rates) for key, rates in self._rates.items()})


def _record(rate: float, totals: dict[int, tuple[float, int]]) -> dict[str, Any]:
    return {"rate": rate, "totals": {str(count): list(total) for count, total in totals.items()}}


def _of(record: Any) -> tuple[float, dict[int, tuple[float, int]]]:
    totals = {int(count): (float(value), int(samples)) for count, (value, samples) in record["totals"].items()}
    return float(record["rate"]), totals


def _are_alike(known: dict[int, tuple[float, int]], now: dict[int, tuple[float, int]]) -> bool:
    """True if the same numbers of replicas were measured as often as the policy needs, and alike."""
    enough = {count for count, (_, samples) in now.items() if samples >= MIN_SAMPLES}
    known_enough = {count for count, (_, samples) in known.items() if samples >= MIN_SAMPLES}
    return enough == known_enough and not any(_differ(known[count][0], now[count][0]) for count in enough)


def _differ(before: float, now: float) -> bool:
    return abs(now - before) > _SAME * max(before, 1e-9)


INTERVAL_S = 2.0
_HOLD_S = 60.0  # pause after a failed change of replicas
_START_S = 5.0  # assumed until measured
KNOWN_FOR_S = 90.0
"""How long the last figures of a worker without an answer count. It may be overloaded, and a scaler that polls every 30
seconds would remove a replica at the peak. A worker that hangs is replaced sooner."""


class Fleet(Protocol):
    """The manager of the instances."""

    def list(self) -> Sequence[InstanceView]: ...

    def scaled(self) -> Sequence[InstanceView]:
        """The instances whose replicas the load decides about."""

    async def update(self, name: str, changes: Mapping[str, Any]) -> InstanceView: ...

    def note(self, name: str, incident: Incident) -> None: ...


class Figures(NamedTuple):
    """The load of one instance; `tokens_per_second` is the rate of one replica while it computes.

    `silent_replicas` did not answer: their last figures count for `KNOWN_FOR_S`.
    """

    queued_tokens: int
    waiting_seconds: float
    tokens_per_second: float
    refused_per_second: float
    replicas: int
    silent_replicas: int
    wanted: int
    reason: str


_NO_REPLICAS = Figures(0, 0.0, 0.0, 0.0, 0, 0, 0, "the number of replicas is fixed")


class _Sums(NamedTuple):
    """Counters of one worker, or their differences."""

    computed: float
    held: float  # queued or running
    queued: float
    busy_s: float


@dataclass(slots=True)
class _Course:
    """The observations of an instance, and the change of replicas in progress."""

    seen: Seen = field(default_factory=Seen)
    workers: dict[str, _Sums] = field(default_factory=dict)
    decision: Decision | None = None
    asked: int | None = None
    asked_at: float = 0.0
    held_until: float = 0.0
    start_s: float = _START_S
    rates_key: str | None = None

    def ask(self, wanted: int, now: float) -> None:
        self.asked, self.asked_at = wanted, now

    def end(self, replicas: int, now: float) -> None:
        """The change that was asked for is over."""
        if self.asked is not None and replicas != self.asked:
            self.hold(now)
        elif self.asked is not None:
            self.start_s = max(0.5, now - self.asked_at)
        self.asked = None

    def hold(self, now: float) -> None:
        self.asked, self.held_until = None, now + _HOLD_S

    def read(self, found: Sequence[Counters], now: float) -> Reading | None:
        """The reading of these workers; None before the second one of any of them."""
        sums = {each.incarnation: _sums(each.counters) for each in found}
        known = [(sums[name], before) for name, before in self.workers.items() if name in sums]
        self.workers = sums
        if not known:
            return None
        computed = sum(new.computed - old.computed for new, old in known)
        held = sum(new.held - old.held for new, old in known)
        queued = sum(each.queued for each in sums.values())
        busy_s = sum(new.busy_s - old.busy_s for new, old in known)
        return Reading(now, len(sums), queued, max(0.0, computed + held), computed, busy_s)

    def decide(self, terms: Terms, reading: Reading) -> Decision:
        self.seen, self.decision = decide(terms, self.seen, reading)
        return self.decision


class Autoscaler:
    """Reads the reports of scaled instances' workers and changes replicas through `fleet`; `run` is its task."""

    def __init__(self, fleet: Fleet, stats: Stats, kept: KeptFile | None = None) -> None:
        self._fleet = fleet
        self._stats = stats
        self._rates = MeasuredRates(kept or KeptFile())
        self._courses: dict[str, _Course] = {}
        self._refusals = Refusals()
        self._reported: dict[str, tuple[float, _Sums]] = {}  # last report and its time by incarnation

    async def run(self) -> None:
        """Decide until cancelled."""
        await regularly(self.step, INTERVAL_S, "no decision about replicas", log)

    async def step(self) -> None:
        """Take one reading of each scaled instance and carry out what follows."""
        views = {view.spec.name: view for view in self._fleet.scaled()}
        self._courses = {name: self._courses.get(name) or _Course() for name in views}
        running = [name for name, view in views.items() if view.state is State.RUNNING]
        if not running:
            return
        found = by_instance(await self._stats(running))
        now = asyncio.get_running_loop().time()
        for view in self._fleet.scaled():  # read again: a user may have changed or deleted one
            if view.state is State.RUNNING and (course := self._courses.get(view.spec.name)) is not None:
                await self._step(view, course, found[view.spec.name], now)

    async def _step(self, view: InstanceView, course: _Course, found: Sequence[Counters], now: float) -> None:
        serving = _serving(view)
        if len(found) != len(serving) or (reading := course.read(found, now)) is None:
            return  # without all figures, do not scale
        key = rates_key(view, serving)
        if key != course.rates_key:
            course.rates_key, course.seen = key, self._rates.seen(key)
        decision = course.decide(_terms(view, course.start_s), reading)
        self._rates.learn(key, course.seen)
        if view.update is not None and view.update.state == "rolling":
            return
        course.end(reading.replicas, now)
        if decision.wanted == reading.replicas or reading.replicas != view.spec.replicas or now < course.held_until:
            return
        name = view.spec.name
        try:
            await self._fleet.update(name, {"replicas": decision.wanted})
        except TeimgrError as error:
            course.hold(now)
            log.warning("not scaled", extra={"instance": name, "reason": f"{decision.reason}; {error.message}"})
            return
        course.ask(decision.wanted, now)
        log.info("scaled", extra={"instance": name, "reason": decision.reason})
        self._fleet.note(name, Incident(event="scaled", reason=decision.reason, at=now_rfc3339()))

    def restore(self) -> None:
        """Take over the rates that an earlier daemon has measured."""
        self._rates.restore()

    def pays(self, name: str) -> bool:
        """True if one more replica of an instance may compute more; False where it was measured not to."""
        course = self._courses.get(name)
        return course is None or not course.seen.totals or adds(course.seen, max(course.seen.totals))

    async def figures(self) -> dict[str, Figures]:
        """The load of every instance, those without a replica included."""
        sums: defaultdict[str, list[_Sums]] = defaultdict(list)
        found = await self._stats(None)
        views, now = self._fleet.list(), asyncio.get_running_loop().time()
        answered = {each.incarnation: (now, _sums(each.counters)) for each in found}
        for each in found:
            sums[each.instance].append(answered[each.incarnation][1])
        present = {worker.incarnation for view in views for worker in view.workers}
        refused = self._refusals.read(found, now, present)
        known = self._reported | answered
        self._reported = {each: known[each] for each in present if each is not None and each in known}

        def figures_of(view: InstanceView) -> tuple[str, Figures]:
            name = view.spec.name
            silent = [each.incarnation for each in _serving(view) if each.incarnation not in answered]
            last = [self._reported[each] for each in silent if each in self._reported]
            sums[name] += [reported for at, reported in last if now - at <= KNOWN_FOR_S]
            return name, self._figures(view, sums[name], len(silent), refused.get(name, 0.0))

        return dict(await LISTING.listed(map(figures_of, views)))

    def _figures(self, view: InstanceView, workers: Sequence[_Sums], silent: int, refused: float) -> Figures:
        course = self._courses.get(view.spec.name)
        if course is None and not workers and view.state is State.UNLOADED:
            return _NO_REPLICAS
        busy_s, queued = sum(each.busy_s for each in workers), sum(each.queued for each in workers)
        rate = course.seen.rate if course else None
        if rate is None:
            rate = sum(each.computed for each in workers) / busy_s if busy_s else 0.0
        running = len(_serving(view))
        decision = course.decision if course and view.state is State.RUNNING else None
        waiting_s = (
            queued / (rate * len(workers)) if rate and workers else 0.0
        )  # late workers count with their last queue
        wanted, reason = (decision.wanted, decision.reason) if decision else (running, _NO_REPLICAS.reason)
        numbers = round(queued), round(waiting_s, 3), round(rate, 1), round(refused, 3)
        return Figures(*numbers, running, silent, wanted, reason)

    async def page(self) -> Page:
        """The metrics of scaling; a series of each instance, at zero replicas too."""
        found = [({"instance": name}, figures) for name, figures in (await self.figures()).items()]
        columns = {
            catalogue.SCALING_QUEUED: "queued_tokens",
            catalogue.SCALING_WAITING: "waiting_seconds",
            catalogue.SCALING_REFUSED: "refused_per_second",
            catalogue.SCALING_REPLICAS: "replicas",
            catalogue.SCALING_WANTED: "wanted",
        }
        return {
            family: await LISTING.listed(Sample("", labels, getattr(figures, column)) for labels, figures in found)
            for family, column in columns.items()
        }


def _terms(view: InstanceView, start_s: float) -> Terms:
    spec = view.spec
    return Terms(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        up_wait_s=spec.scale_up_wait_ms / 1000,
        down_wait_s=spec.scale_down_wait_ms / 1000,
        down_delay_s=spec.scale_down_delay_secs,
        start_s=start_s,
        shared_device=_share_a_device(view.workers),
    )


def _share_a_device(workers: Sequence[WorkerView]) -> bool:
    """True if replicas share a card or the cores of a host, as those on CPUs do in a fleet of one host.

    Of several hosts and cards each gets one first.
    """
    if all(each.gpu is None and each.node is None for each in workers):
        return True
    serving = [(each.node, each.gpu) for each in workers if each.role == "serving"]
    return len(set(serving)) < len(serving)


def _serving(view: InstanceView) -> list[WorkerView]:
    return [each for each in view.workers if each.role == "serving" and each.state is State.RUNNING]


def _sums(counters: Mapping[str, Any]) -> _Sums:
    queued = counters.get("queued_tokens", 0)
    return _Sums(
        counters.get("tokens", 0), queued + counters.get("running_tokens", 0), queued, counters.get("busy_s", 0)
    )
