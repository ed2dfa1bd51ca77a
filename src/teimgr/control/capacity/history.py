"""What an instance's workers reported over the last hour, and the observation of a window of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from teimgr.control.capacity.recommendations import Card, Observation
from teimgr.spec import InstanceSpec, InstanceView

INTERVAL_S = 15.0
HOUR_S = 3600.0
_KEPT = 2 + int(HOUR_S / INTERVAL_S)
_COUNTS = (
    *("taken", "texts", "tokens", "batches", "known_texts"),
    *("full_texts", "sampled_texts", "repeated_texts", "busy_s"),
)
_BUCKETS = 32  # of `by_tokens`
_KEYS = (
    *("model_id", "revision", "dtype", "max_batch_tokens", "cache_bytes", "gpu_id", "threads"),
    *("load", "idle_timeout_secs", "max_replicas"),
)

Sums = tuple[float, ...]


class Counters(Protocol):
    """What a worker reports about itself."""

    @property
    def instance(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def counters(self) -> Mapping[str, Any]: ...


class Memory(NamedTuple):
    """The memory of an instance as the ledger has it, and a card that has room for it."""

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
        keys = _keys_of(view.spec)
        if keys != self._keys:
            self._keys = keys
            self._readings.clear()
        last = self._readings[-1].sums if self._readings else ()
        workers = {each.incarnation: _sums(each.counters) for each in found}
        grown = list(last) or [0.0] * (len(_COUNTS) + _BUCKETS)
        for name, sums in workers.items():
            # One that the last reading did not have began since then; of the first reading only what follows counts.
            before = self._workers.get(name, () if last else sums)
            for i, value in enumerate(sums):
                grown[i] += max(0.0, value - (before[i] if before else 0.0))
        self._workers = workers
        queued = sum(each.counters.get("queued_tokens", 0) for each in found)
        self._readings.append(_Reading(now, tuple(grown), queued, len(found)))

    def observe(self, view: InstanceView, memory: Memory, window_s: float, pays: bool = True) -> Observation:
        """What was seen in the last `window_s` seconds, or since the last change of keys."""
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


def _keys_of(spec: InstanceSpec) -> tuple[object, ...]:
    """The keys on which its figures depend; `replicas` where the load does not set them."""
    return (*(getattr(spec, name) for name in _KEYS), spec.extra_args, None if spec.max_replicas else spec.replicas)


def _sums(counters: Mapping[str, Any]) -> Sums:
    buckets = [*counters.get("by_tokens", ())][:_BUCKETS]
    return (*(counters.get(name, 0) for name in _COUNTS), *buckets, *[0] * (_BUCKETS - len(buckets)))
