"""Live figures of the fleet: rates, latency, queue and memory of each instance over the last minutes and the last hour.

A sampler reads the workers' counters every 2 s while a page is open, otherwise every 15 s, so that a page opened during
an incident shows its history. Histories are bounded rings of 32-bit floats, about 17 kB per instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from teimgr.api.rest.probes import Scraper, WorkerStats
from teimgr.control.background import in_background
from teimgr.control.placement.hosts import InventorySource
from teimgr.observability.catalogue import DURATION_BOUNDS
from teimgr.spec import InstanceView, State

log = logging.getLogger(__name__)

WATCHED_S = 2.0
UNWATCHED_S = 15.0
FINE_POINTS = 150  # 5 min
COARSE_POINTS = 240  # 1 h
LATENCY_WINDOW_S = 60.0
OVERLOADED_S = 300.0
"""Refusals for this time raise an alarm; one minute without any ends it."""
_CALM_S = 60.0
_LINGER_S = 20.0  # of the 2 s interval after a view without a stream
_NAN = float("nan")


class Point(NamedTuple):
    """Figures of an instance over one interval; unknown latencies and rates are NaN.

    `time` is Unix time in seconds; rates are per second, latencies in seconds, memory in bytes, `busy` is a fraction.
    `refused` calls, for which workers were full, are not counted in `failures`.
    """

    time: float
    requests: float
    failures: float
    texts: float
    tokens: float
    p50: float
    p99: float
    queue: float
    memory: float
    busy: float
    refused: float


WIDTH = len(Point._fields) - 1


class Ring:
    """The last `most` points, as arrays, since objects would take too much memory for a thousand instances."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times = array("d")
        self._values = array("f")

    def __len__(self) -> int:
        return len(self._times)

    def append(self, point: Point) -> None:
        if len(self._times) == self._most:
            del self._times[0]
            del self._values[:WIDTH]
        self._times.append(point.time)
        self._values.extend(point[1:])

    def after(self, moment: float) -> Iterator[Point]:
        """The points after a time, oldest first."""
        for index, when in enumerate(self._times):
            if when > moment:
                yield Point(when, *self._values[index * WIDTH : (index + 1) * WIDTH])

    def last(self, count: int, column: str) -> list[float]:
        """One figure of the last points, oldest first."""
        at = Point._fields.index(column) - 1
        return list(self._values[at::WIDTH][-count:])


class _Interval(NamedTuple):
    """Calls of an interval by duration, for latencies over several intervals."""

    time: float
    by_duration: list[int]


class Figures:
    """The figures of one instance."""

    def __init__(self) -> None:
        self.fine = Ring(FINE_POINTS)
        self.coarse = Ring(COARSE_POINTS)
        self.now: Point | None = None
        self.answered: Point | None = None  # last point with a worker's answer
        self._intervals: deque[_Interval] = deque(maxlen=math.ceil(LATENCY_WINDOW_S / WATCHED_S) + 1)
        self._coarse_at = float("-inf")
        self._refusing_since: float | None = None
        self._refused_at = float("-inf")

    @property
    def refuses_for_s(self) -> float:
        """Return the seconds for which calls have been refused, with pauses of at most a minute; 0 if none are."""
        return self.now.time - self._refusing_since if self.now and self._refusing_since is not None else 0.0

    def append(self, point: Point, by_duration: list[int], *, is_fine: bool) -> None:
        self.now = point
        if not math.isnan(point.tokens):
            self.answered = point
        if point.refused > 0:
            self._refused_at = point.time
            if self._refusing_since is None:
                self._refusing_since = point.time
        elif point.time - self._refused_at > _CALM_S:
            self._refusing_since = None
        if any(by_duration):
            self._intervals.append(_Interval(point.time, by_duration))
        if is_fine:
            self.fine.append(point)
        if point.time - self._coarse_at >= UNWATCHED_S - WATCHED_S / 2:
            self._coarse_at = point.time
            self.coarse.append(point)

    def percentile(self, share: float, now: float) -> float:
        """Latency in seconds over the last minute; NaN without a call."""
        recent = [each.by_duration for each in self._intervals if each.time > now - LATENCY_WINDOW_S]
        return percentile([sum(counts) for counts in zip(*recent, strict=True)], share)


def percentile(counts: Sequence[int], share: float) -> float:
    """A quantile of calls by duration (`DURATION_BOUNDS`), between the bounds of its bucket; NaN without any.

    Above all bounds it is the last one: the scale ends there.
    """
    total = sum(counts)
    if not total:
        return _NAN
    wanted, before = share * total, 0
    for index, count in enumerate(counts):
        if count and before + count >= wanted:
            high = DURATION_BOUNDS[min(index, len(DURATION_BOUNDS) - 1)]
            low = DURATION_BOUNDS[index - 1] if index else 0.0
            return min(low, high) + (high - min(low, high)) * (wanted - before) / count
        before += count
    return DURATION_BOUNDS[-1]


_COUNTERS = ("requests", "failures", "refused", "texts", "tokens", "busy_s")


class Sampler:
    """Samples all instances: `run` is its task, `watching` keeps the 2 s interval.

    Args:
        scraper: Reads the workers' counters.
        views: The current instances.
        gpus: Reads the cards and the memory of their processes.
    """

    def __init__(self, scraper: Scraper, views: Callable[[], Sequence[InstanceView]], gpus: InventorySource) -> None:
        self.version = 0
        self.figures: dict[str, Figures] = {}
        self._scraper = scraper
        self._views = views
        self._gpus = gpus
        self._before: dict[str, tuple[float, Mapping[str, Any]]] = {}  # by incarnation
        self._answered: dict[str, float] = {}  # by incarnation, in Unix time
        self._sampled_at = 0.0
        self._watchers = 0
        self._seen_at = float("-inf")
        self._wake = asyncio.Event()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sample while the block runs."""
        return in_background(self._run, "sampler of the page")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A page is open within the block."""
        self._watchers += 1
        self._wake.set()
        try:
            yield
        finally:
            self._watchers -= 1
            self.seen()

    def seen(self) -> None:
        """A view was sent, whose stream will follow."""
        self._seen_at = time.monotonic()
        self._wake.set()

    def of(self, name: str) -> Figures:
        """The figures of an instance; empty ones for an unknown name."""
        return self.figures.get(name) or Figures()

    def silent_since(self, incarnation: str | None) -> float | None:
        """The Unix time of a worker's last answer, if it did not answer the last time."""
        answered = self._answered.get(incarnation or "", self._sampled_at)
        return answered if answered < self._sampled_at else None

    def alarms(self) -> list[str]:
        """Instances that have refused calls for `OVERLOADED_S`."""
        return [
            f"{name}: overloaded for {each.refuses_for_s / 60:.0f} min: it refuses calls that exceed its capacity"
            for name, each in self.figures.items()
            if each.refuses_for_s >= OVERLOADED_S
        ]

    async def sample(self) -> None:
        """Read all workers once."""
        is_fine = self._is_watched
        stats = await self._scraper.stats()
        on_cards = {pid: held for gpu in (await self._gpus.read()).gpus for pid, held in gpu.memory_of.items()}
        now, clock = time.time(), time.monotonic()
        views = {view.spec.name: view for view in self._views()}
        running = {each.incarnation for view in views.values() for each in view.workers if each.state is State.RUNNING}
        self._answered |= {each.incarnation: now for each in stats}
        self._answered = {key: at for key, at in self._answered.items() if key in running}
        self._sampled_at = now
        by_instance: dict[str, list[WorkerStats]] = {}
        for each in stats:
            by_instance.setdefault(each.instance, []).append(each)
        for name in self.figures.keys() - views.keys():
            del self.figures[name]
        # The next answer of a late worker is compared with its last one.
        known = self._before
        self._before = {key: each for key, each in known.items() if clock - each[0] < LATENCY_WINDOW_S}
        for name, view in views.items():
            workers = by_instance.get(name, ())
            if not workers and view.state is State.UNLOADED and name not in self.figures:
                continue  # instances that were never loaded have no figures
            memory = _memory(view, on_cards, workers) or _NAN
            point, by_duration = self._point(now, clock, workers, known, memory)
            self.figures.setdefault(name, Figures()).append(point, by_duration, is_fine=is_fine)
        self.version += 1

    def _point(
        self,
        now: float,
        clock: float,
        workers: Sequence[WorkerStats],
        known: Mapping[str, tuple[float, Mapping[str, Any]]],
        memory: float,
    ) -> tuple[Point, list[int]]:
        # A new worker has no rates yet.
        is_known = any(worker.incarnation in known for worker in workers)
        rates = dict.fromkeys(_COUNTERS, 0.0 if is_known else _NAN)
        durations = [0] * (len(DURATION_BOUNDS) + 1)
        queue = 0.0 if workers else _NAN
        for worker in workers:
            counters = worker.counters
            self._before[worker.incarnation] = (clock, counters)
            queue += counters.get("queued_texts", 0)
            before_at, before = known.get(worker.incarnation, (clock, counters))
            seconds = max(clock - before_at, 1e-3)
            for key in _COUNTERS:
                rates[key] += max(0.0, counters.get(key, 0) - before.get(key, 0)) / seconds
            then = before.get("by_duration") or ()
            for index, (count, earlier) in enumerate(zip(counters.get("by_duration") or (), then, strict=False)):
                durations[index] += max(0, count - earlier)
        busy = min(1.0, rates["busy_s"] / len(workers)) if is_known else _NAN
        latencies = percentile(durations, 0.5), percentile(durations, 0.99)
        requests, failures, refused, texts, tokens, _ = rates.values()
        failed = max(0.0, failures - refused) if is_known else _NAN
        return Point(now, requests, failed, texts, tokens, *latencies, queue, memory, busy, refused), durations

    @property
    def _is_watched(self) -> bool:
        return self._watchers > 0 or time.monotonic() - self._seen_at < _LINGER_S

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.sample()
            except Exception:  # the page also works without figures
                log.exception("sampling of the fleet failed")
            while True:
                self._wake.clear()
                rest_s = began + (WATCHED_S if self._is_watched else UNWATCHED_S) - time.monotonic()
                if rest_s <= 0:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await self._wake.wait()


def _memory(view: InstanceView, on_cards: Mapping[int, int], stats: Sequence[WorkerStats]) -> int:
    """Memory of an instance's workers in bytes: their own in RAM, or on their cards.

    Where the driver does not report processes, as in containers, that of torch's allocator counts.
    """
    if not any(worker.gpu for worker in view.workers):
        return sum(_own_bytes(each.counters) for each in stats)
    known = [on_cards[worker.pid] for worker in view.workers if worker.pid is not None and worker.pid in on_cards]
    return sum(known) or sum(int(each.counters.get("device_bytes", 0)) for each in stats)


def _own_bytes(counters: Mapping[str, Any]) -> int:
    own = counters.get("private_bytes")
    return int(counters.get("resident_bytes", 0) if own is None else own)
