"""Measured rates of replicas, kept across restarts: tokens a second of one, and of several that share a host.

A rate is of one model and revision, element type, batch budget, threads, kind of device, number of cores, and version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from teimgr.control.capacity.kept_file import KeptFile
from teimgr.control.capacity.policy import MIN_SAMPLES, Seen
from teimgr.control.ledger.footprints import engine_version
from teimgr.control.placement.planner import usable_cores
from teimgr.spec import InstanceView, WorkerView

log = logging.getLogger(__name__)

_SECTION = "rates"
_MAX_RATES = 10_000
_SAME = 0.05
"""A later measurement within this part of the kept one is not written again."""
_MAX_SAMPLES = 100


def rates_key(view: InstanceView, workers: Iterable[WorkerView]) -> str:
    """What the rates of an instance's workers are of, as one text."""
    spec = view.spec
    device = f"cpu of {usable_cores()}" if any(each.gpu is None for each in workers) else "gpu"
    facts = (spec.model_id, spec.revision, spec.dtype, spec.max_batch_tokens, spec.threads, device, engine_version())
    return "|".join(map(str, facts))


class MeasuredRates:
    """The rates by `rates_key`, in a section of `kept`."""

    def __init__(self, kept: KeptFile) -> None:
        self._kept = kept
        self._rates: dict[str, tuple[float, dict[int, tuple[float, int]]]] = {}

    def restore(self) -> None:
        """Take over the rates of the file."""
        try:
            self._rates = {str(key): _of(record) for key, record in (self._kept.get(_SECTION) or {}).items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            log.warning("measured rates cannot be read, and are measured again: %s", error)

    def seen(self, key: str) -> Seen:
        """What the policy begins with: the measured rates, and nothing else."""
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
        sums = {key: {str(count): list(each) for count, each in of.items()} for key, (_, of) in self._rates.items()}
        self._kept.put(_SECTION, {key: {"rate": self._rates[key][0], "totals": each} for key, each in sums.items()})


def _of(record: Any) -> tuple[float, dict[int, tuple[float, int]]]:
    totals = {int(count): (float(value), int(samples)) for count, (value, samples) in record["totals"].items()}
    return float(record["rate"]), totals


def _are_alike(known: dict[int, tuple[float, int]], now: dict[int, tuple[float, int]]) -> bool:
    """Whether the same numbers of replicas were measured as often as the policy needs, and alike."""
    enough = {count for count, (_, samples) in now.items() if samples >= MIN_SAMPLES}
    known_enough = {count for count, (_, samples) in known.items() if samples >= MIN_SAMPLES}
    return enough == known_enough and not any(_differ(known[count][0], now[count][0]) for count in enough)


def _differ(before: float, now: float) -> bool:
    return abs(now - before) > _SAME * max(before, 1e-9)
