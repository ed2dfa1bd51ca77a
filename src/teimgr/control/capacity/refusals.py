"""Calls per second that full workers have refused over the last minute, by instance, from the workers' counters."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from teimgr.control.capacity.history import Counters

WINDOW_S = 60.0
_APART_S = 1.0  # of two readings that are kept
_KEPT = 2 + int(WINDOW_S / _APART_S)


class Refusals:
    """Readings of the last minute; the first one of an instance gives no rate yet."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, float]] = {}
        self._readings: dict[str, deque[tuple[float, float]]] = {}

    def read(self, found: Sequence[Counters], now: float) -> dict[str, float]:
        """Take what the workers report, and return the rates of their instances."""
        by_instance: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for each in found:
            by_instance[each.instance][each.incarnation] = each.counters.get("refused", 0)
        before = self._workers
        self._workers = dict(by_instance)
        self._readings = {name: self._readings.get(name) or deque(maxlen=_KEPT) for name in by_instance}
        return {
            name: _add(self._readings[name], _grown(workers, before.get(name)), now)
            for name, workers in by_instance.items()
        }


def _grown(workers: dict[str, float], before: dict[str, float] | None) -> float:
    """What was refused since the reading before; of a worker that it did not have, all."""
    if before is None:
        return 0.0
    return sum(max(0.0, refused - before.get(name, 0.0)) for name, refused in workers.items())


def _add(readings: deque[tuple[float, float]], grown: float, now: float) -> float:
    """The rate from the oldest reading of the window to this one."""
    total = (readings[-1][1] if readings else 0.0) + grown
    if len(readings) > 1 and now - readings[-2][0] < _APART_S:
        readings.pop()
    readings.append((now, total))
    while len(readings) > 2 and now - readings[1][0] >= WINDOW_S:
        readings.popleft()
    began, first = readings[0]
    return (total - first) / (now - began) if now > began else 0.0
