"""The autoscaling policy: the number of replicas of an instance by seconds of waiting work.

Pure: `decide` takes the terms, the observations so far and a new reading, and returns the decision with its reason. A
replica is added if the work expected to wait when it would be ready exceeds the target, judged over a short window.
Replicas are removed if fewer would have been enough for a long window during the whole delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

LONG_WINDOW_S = 60.0
SHORT_WINDOW_S = 6.0
FILL_UP = 0.9
FILL_DOWN = 0.8
"""Target utilization of replicas when scaling up and when scaling down."""
MIN_SAMPLES = 3  # readings before the measured rate of n replicas counts
PAYS = 1.1
"""A replica pays if the rate with it is at least this many times the rate without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The limits of an instance: its replicas, and the seconds of work that may wait for each.

    `start_s` is the startup time of a replica. With `shared_device`, replicas share a card or the cores of a host: one
    is added after the current ones were measured, and stays only if it was measured to pay.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    up_wait_s: float = 2.0
    down_wait_s: float = 0.5
    down_delay_s: float = 300.0
    start_s: float = 5.0
    shared_device: bool = False

    def __post_init__(self) -> None:
        if self.down_wait_s >= self.up_wait_s:
            raise ValueError("down_wait_s must be below up_wait_s")


@dataclass(frozen=True, slots=True)
class Reading:
    """One report of an instance's replicas.

    `arrived` and `computed` are tokens since the previous reading, `queued` is the number waiting, `busy_s` the
    computing time of all replicas since then.
    """

    at: float
    replicas: int
    queued: float
    arrived: float
    computed: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The policy's state of an instance: readings of the long window, recently desired replicas, measured rates.

    `rate` is the tokens per second of one replica while it computes; `totals` are, by n, the tokens per second of n
    replicas that all had work, and the number of readings.
    """

    readings: tuple[Reading, ...] = ()
    wanted: tuple[tuple[float, int], ...] = ()
    rate: float | None = None
    totals: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def total(self, replicas: int) -> float | None:
        """The measured tokens a second of that many replicas; None until it was measured often enough."""
        value, samples = self.totals.get(replicas, (0.0, 0))
        return value if samples >= MIN_SAMPLES else None

    def capacity(self, replicas: int) -> float | None:
        """Tokens a second of that many replicas: as measured, else of as many times one; None if none was measured."""
        if (known := self.total(replicas)) is not None:
            return known
        return None if self.rate is None else self.rate * replicas


@dataclass(frozen=True, slots=True)
class Decision:
    """The desired replicas of an instance; `reason` is shown in log, event, API and page."""

    wanted: int
    reason: str
    waiting_s: float
    rate: float | None


def decide(terms: Terms, seen: Seen, reading: Reading) -> tuple[Seen, Decision]:
    """Take in a reading; the decision's `wanted` is its `replicas` where nothing is to change."""
    seen = _learn(seen, reading)
    low, high = max(1, terms.min_replicas), max(1, terms.min_replicas, terms.max_replicas)
    now, fast = reading.replicas, _arrival(seen, SHORT_WINDOW_S)
    capacity = seen.capacity(now) or 0.0
    waiting_s = reading.queued / capacity if capacity else 0.0
    expected_s = waiting_s + max(0.0, fast - capacity) * terms.start_s / capacity if capacity else 0.0
    drains = fast < capacity and waiting_s - terms.up_wait_s < (1 - fast / capacity) * (2 * terms.start_s + 1)
    numbers = _numbers(reading.queued, fast, seen.rate)

    def answer(wanted: int, why: str) -> tuple[Seen, Decision]:
        change = f"{now} → {wanted}: " if wanted != now else ""
        return seen, Decision(wanted, change + why, waiting_s, seen.rate)

    calm = now
    if waiting_s <= terms.down_wait_s:
        calm = max(low, min(now, _needed(seen, _arrival(seen, LONG_WINDOW_S), FILL_DOWN, now, high)))
    seen = replace(seen, wanted=(*_recent(seen.wanted, reading.at - terms.down_delay_s), (reading.at, calm)))
    if now < low:
        return answer(low, f"min_replicas is {low}")
    if now > high:
        return answer(high, f"max_replicas is {high}")
    if terms.shared_device and now > low and (loss := _does_not_pay(seen, now)):
        return answer(now - 1, loss)
    if expected_s > terms.up_wait_s and not drains:
        more = max(now + 1, _needed(seen, fast, FILL_UP, now, high))
        if now >= high:
            return answer(now, f"{expected_s:.1f} s of work would wait, but max_replicas is {high} ({numbers})")
        if loss := _does_not_pay(seen, now + 1):
            return answer(now, loss)
        if terms.shared_device:
            more = now + 1
            if seen.total(now) is None:
                return answer(now, f"{expected_s:.1f} s of work would wait; {now} are measured before another starts")
        return answer(min(more, high), f"{expected_s:.1f} s of work would wait > {terms.up_wait_s:g} s ({numbers})")
    fewer = max(count for _, count in seen.wanted)
    if fewer < now and reading.at - seen.wanted[0][0] >= terms.down_delay_s:
        return answer(fewer, f"{fewer} would have been enough for the last {terms.down_delay_s:g} s ({numbers})")
    return answer(now, f"{waiting_s:.1f} s of work waits ({numbers})")


def _numbers(queued: float, arrived_per_s: float, rate: float | None) -> str:
    known = f"one replica computes {rate:,.0f}" if rate else "no replica was measured yet"
    return f"{queued:,.0f} tokens queued, {arrived_per_s:,.0f} tokens/s arrive, {known}"


def _learn(seen: Seen, reading: Reading) -> Seen:
    """Keep the reading, and the rates that it shows."""
    before = seen.readings[-1] if seen.readings else None
    readings = (*(each for each in seen.readings if each.at > reading.at - LONG_WINDOW_S), reading)
    seen = replace(seen, readings=readings)
    if before is None or before.replicas < reading.replicas:
        return replace(seen, wanted=())  # restart the delay before scaling down
    if before.replicas != reading.replicas:
        return seen
    span_s = reading.at - before.at
    if reading.busy_s > 0.05 * span_s:
        seen = replace(seen, rate=_blend(seen.rate, reading.computed / reading.busy_s))
    if min(before.queued, reading.queued) > 0 and reading.busy_s > 0.9 * span_s * reading.replicas:
        value, samples = seen.totals.get(reading.replicas, (None, 0))
        total = _blend(value, reading.computed / span_s)
        seen = replace(seen, totals={**seen.totals, reading.replicas: (total, samples + 1)})
    return seen


def _blend(before: float | None, new: float) -> float:
    return new if before is None else 0.8 * before + 0.2 * new


def _arrival(seen: Seen, window_s: float) -> float:
    """Tokens that arrived per second, in the last `window_s` seconds."""
    last = seen.readings[-1].at
    pairs = [(a, b) for a, b in pairwise(seen.readings) if b.at > last - window_s]
    span_s = sum(b.at - a.at for a, b in pairs)
    return sum(b.arrived for _, b in pairs) / span_s if span_s else 0.0


def _needed(seen: Seen, arrived_per_s: float, fill: float, present: int, most: int) -> int:
    """The least replicas whose capacity the arrivals fill to `fill`; the present ones where none was measured."""
    for count in range(1, most + 1):
        capacity = seen.capacity(count)
        if capacity is None:
            return present
        if arrived_per_s <= fill * capacity:
            return count
    return most


def adds(seen: Seen, count: int) -> bool:
    """True if the last of `count` replicas is worth its place, as far as it was measured."""
    return _does_not_pay(seen, count) is None


def _does_not_pay(seen: Seen, count: int) -> str | None:
    """Why one of `count` replicas is not worth its place, if measurements show that."""
    with_it, without = seen.total(count), seen.total(count - 1)
    if with_it is None or without is None or with_it >= PAYS * without:
        return None
    measured = f"{count} computed {with_it:,.0f} tokens/s, {count - 1} {without:,.0f}"
    return f"replica {count} does not pay on this host: {measured}"


def _recent(wanted: tuple[tuple[float, int], ...], since: float) -> tuple[tuple[float, int], ...]:
    """Those since then, and the last one before, without which the time between two readings would be missing."""
    before = [each for each in wanted if each[0] < since][-1:]
    return (*before, *(each for each in wanted if each[0] >= since))
