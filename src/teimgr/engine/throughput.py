"""Throughput of a lane while work waits in it: what turns the tokens ahead of a call into an expected wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from teimgr.engine.job import Lane

_SAMPLE_S = 0.1  # batches shorter than this are counted together
_SAMPLES = 32
_MOST_AGE_S = 30.0
# Fewer are no estimate: the first batches after a start are slow, and one slow text would stand for all.
_LEAST_SAMPLES = 4


@dataclass(slots=True)
class _Sample:
    at: float
    seconds: float = 0.0
    tokens: int = 0


class LaneThroughput:
    """Tokens that left the lanes, and the time in which more were waiting. Times are monotonic seconds.

    Only that time counts: a batch that took all that waited may have been small, and its cost per token high. Whatever
    slows a lane is in it: the device, the tokenizer, the other lane, other processes.
    """

    def __init__(self) -> None:
        self._samples: dict[Lane, deque[_Sample]] = {lane: deque(maxlen=_SAMPLES) for lane in Lane}
        self._last: tuple[float, Lane, int, Collection[Lane]] | None = None

    def took(self, now: float, lane: Lane, tokens: int, waiting: Collection[Lane]) -> None:
        """A batch of `lane` leaves the queue; in the lanes `waiting` more is left."""
        if self._last is not None:
            began, last_lane, last_tokens, waited = self._last
            for one in waited:
                self._add(one, began, now, last_tokens if one is last_lane else 0)
        self._last = now, lane, tokens, waiting

    def tokens_per_s(self, lane: Lane, now: float) -> float | None:
        """None where the lane had no backlog of late. The slowest sample does not count."""
        recent = [one for one in self._samples[lane] if one.seconds >= _SAMPLE_S and now - one.at < _MOST_AGE_S]
        if len(recent) < _LEAST_SAMPLES:
            return None
        slowest = min(recent, key=lambda one: one.tokens / one.seconds)
        counted = [one for one in recent if one is not slowest]
        return sum(one.tokens for one in counted) / sum(one.seconds for one in counted) or None

    def _add(self, lane: Lane, began: float, now: float, tokens: int) -> None:
        samples = self._samples[lane]
        if not samples or samples[-1].seconds >= _SAMPLE_S:
            samples.append(_Sample(now))
        samples[-1].at = now
        samples[-1].seconds += now - began
        samples[-1].tokens += tokens
