"""Reports of workers: the `History` of an instance's last hour, and `Refusals` per second by full workers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from teimgr.control.capacity.recommendations import Card, Observation
from teimgr.spec import InstanceView

INTERVAL_S = 15.0
HOUR_S = 3600.0
_KEPT = 2 + int(HOUR_S / INTERVAL_S)
_COUNTS = (
    *("taken", "texts", "tokens", "batches", "known_texts"),
    *("full_texts", "sampled_texts", "repeated_texts", "busy_s"),
)
_BUCKETS = 32  # in `by_tokens`
_KEYS = (
    *("model_id", "revision", "dtype", "max_batch_tokens", "cache_bytes", "gpu_id", "threads"),
    *("load", "idle_timeout_secs", "max_replicas"),
)

Sums = tuple[float, ...]
_NOTHING = (0.0,) * (len(_COUNTS) + _BUCKETS)


class Counters(Protocol):
    """A worker's report."""

    @property
    def instance(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def counters(self) -> Mapping[str, Any]: ...


Stats = Callable[[Collection[str] | None], Awaitable[Sequence[Counters]]]
"""Reads the reports of the workers of these instances, or of all if None."""


def by_instance(found: Iterable[Counters]) -> defaultdict[str, list[Counters]]:
    """The reports of workers, by the name of their instance."""
    named = defaultdict[str, list[Counters]](list)
    for each in found:
        named[each.instance].append(each)
    return named


class Memory(NamedTuple):
    """The memory of an instance in the ledger, and a card that has room for it."""

    held_bytes: int = 0
    batch_bytes: int = 0
    card: Card | None = None


class _Reading(NamedTuple):
    at: float
    sums: Sums
    queued: float
    replicas: int


class History:
    """The readings of one instance since its keys were last changed."""

    def __init__(self) -> None:
        self._keys: tuple[object, ...] = ()
        self._workers: dict[str, Sums] = {}
        self._readings: deque[_Reading] = deque(maxlen=_KEPT)

    def add(self, view: InstanceView, found: Sequence[Counters], now: float) -> None:
        """Take what the workers report; a change of keys forgets what was before."""
        spec, replicas = view.spec, None if view.spec.max_replicas else view.spec.replicas
        keys = *(getattr(spec, name) for name in _KEYS), spec.extra_args, replicas
        if keys != self._keys:
            self._keys = keys
            self._readings.clear()
        last = self._readings[-1].sums if self._readings else ()
        grown = [*(last or _NOTHING)]
        present = {each.incarnation for each in view.workers}
        workers = {
            name: sums for name, sums in self._workers.items() if name in present
        }  # including workers without a reading
        for each in found:
            # A worker without an earlier reading started since the last one, unless this is the first reading.
            sums = _sums(each.counters)
            before = self._workers.get(each.incarnation, _NOTHING if last else sums)
            workers[each.incarnation] = (*map(max, sums, before),)  # overlapping readings may arrive in any order
            grown = [a + max(0.0, b - c) for a, b, c in zip(grown, sums, before, strict=True)]
        self._workers = workers
        queued = sum(each.counters.get("queued_tokens", 0) for each in found)
        self._readings.append(_Reading(now, tuple(grown), queued, len(found)))

    def observe(self, view: InstanceView, memory: Memory, window_s: float, pays: bool = True) -> Observation:
        """Return the observations of the last `window_s` seconds, or since the last change of keys."""
        readings = [each for each in self._readings if each.at >= self._readings[-1].at - window_s]
        if not readings:
            return unseen(view, memory)
        first, last = readings[0], readings[-1]
        sums = [b - a for a, b in zip(first.sums, last.sums, strict=True)]
        count = dict(zip(_COUNTS, sums, strict=False))
        rate = count["tokens"] / count["busy_s"] if count["busy_s"] else 0.0
        waits_s = [each.queued / (rate * each.replicas) if rate and each.replicas else 0.0 for each in readings]
        up_s = view.spec.scale_up_wait_ms / 1000
        return Observation(
            spec=view.spec,
            model=view.model,
            span_s=last.at - first.at,
            replicas=last.replicas,
            on_card=any(each.gpu is not None for each in view.workers),
            calls=round(count["taken"]),
            **{name: round(count[name]) for name in _COUNTS[1:-1]},
            busy_s=count["busy_s"],
            by_tokens=tuple(round(value) for value in sums[len(_COUNTS) :]),
            queued_tokens=sum(each.queued for each in readings) / len(readings),
            waiting_s=sum(waits_s) / len(waits_s),
            waited_share=sum(wait > up_s for wait in waits_s) / len(waits_s),
            held_bytes=memory.held_bytes,
            batch_bytes=memory.batch_bytes,
            card=memory.card,
            pays=pays,
        )


def unseen(view: InstanceView, memory: Memory) -> Observation:
    """The observation of an instance without a worker that reports."""
    return Observation(spec=view.spec, model=view.model, span_s=0.0, replicas=0, held_bytes=memory.held_bytes)


def _sums(counters: Mapping[str, Any]) -> Sums:
    buckets = [*counters.get("by_tokens", ())][:_BUCKETS]
    return (*(counters.get(name, 0) for name in _COUNTS), *buckets, *[0] * (_BUCKETS - len(buckets)))


REFUSALS_WINDOW_S = 60.0
_APART_S = 1.0  # between kept readings
_KEPT_REFUSALS = 2 + int(REFUSALS_WINDOW_S / _APART_S)


class Refusals:
    """Readings of the last minute; an instance has no rate after its first one."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, float]] = {}
        self._readings: dict[str, deque[tuple[float, float]]] = {}

    def read(self, found: Sequence[Counters], now: float, present: Container[str | None] = ()) -> dict[str, float]:
        """Take what the workers report, and return the rates of their instances; `present` are those there are."""
        last, grown = self._workers, defaultdict[str, float](float)
        kept = {name: {key: n for key, n in known.items() if key in present} for name, known in last.items()}
        workers = defaultdict[str, dict[str, float]](dict, {name: known for name, known in kept.items() if known})
        for each in found:
            refused = each.counters.get("refused", 0)
            # The first reading of an instance is the baseline; a later worker counts from 0.
            before = last[each.instance].get(each.incarnation, 0.0) if each.instance in last else refused
            grown[each.instance] += max(0, refused - before)
            workers[each.instance][each.incarnation] = max(refused, before)  # readings may arrive in any order
        self._workers = dict(workers)
        self._readings = {name: self._readings.get(name) or deque(maxlen=_KEPT_REFUSALS) for name in workers}
        return {name: _add(readings, grown[name], now) for name, readings in self._readings.items()}


def _add(readings: deque[tuple[float, float]], grown: float, now: float) -> float:
    """The rate from the oldest reading of the window to this one."""
    total = (readings[-1][1] if readings else 0.0) + grown
    if len(readings) > 1 and now - readings[-2][0] < _APART_S:
        readings.pop()
    readings.append((now, total))
    while len(readings) > 2 and now - readings[1][0] >= REFUSALS_WINDOW_S:
        readings.popleft()
    began, first = readings[0]
    return (total - first) / (now - began) if now > began else 0.0
