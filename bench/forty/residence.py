"""How long models stayed loaded, by the events of a daemon and the calls of its only callers.

A model whose load takes a second is not evicted within a second where calls came beside those that it was loaded for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_TOLERANCE = 0.8
"""Of a load time: events are written a moment after what they report."""
_HEARD_S = 0.2
"""A call that ended so long before an eviction was counted when the victim was chosen."""
_EVICTED = re.compile(r"resident (\S+) s; for (\S+)")


@dataclass(frozen=True)
class Stay:
    """One time in memory that an eviction ended. `least_s` is the load time that it had to last."""

    model: str
    seconds: float
    least_s: float
    reason: str
    is_used_again: bool

    @property
    def is_too_short(self) -> bool:
        """One without further calls may be short."""
        return self.is_used_again and self.seconds < _TOLERANCE * self.least_s


@dataclass(frozen=True)
class Answered:
    """A call that a model has answered, with the times of its begin and end."""

    model: str
    began: float
    ended: float


def stays(events: Sequence[Mapping[str, Any]], answered: Iterable[Answered]) -> list[Stay]:
    """Every stay that an eviction ended, in order.

    The load time of a model is that of its fastest load, from the moment when the last one evicted for it was gone.

    Raises:
        ValueError: events are missing in between, or an eviction has no length of the stay.
    """
    if events:
        missing = events[-1]["id"] - events[0]["id"] + 1 - len(events)
        if missing > sum(event["count"] - 1 for event in events):  # equal ones may have become one
            raise ValueError(f"{missing} events are missing")
    calls: defaultdict[str, list[Answered]] = defaultdict(list)
    for call in answered:
        calls[call.model].append(call)
    began: dict[str, float] = {}
    running: dict[str, float] = {}
    load_s: dict[str, float] = {}
    goes_for: dict[str, str] = {}
    found: list[Stay] = []
    for event in events:
        name, at = event["instance"], datetime.fromisoformat(event["timestamp"]).timestamp()
        match event["event"]:
            case "starting":
                began[name] = at
            case "running" if name in began:
                running[name] = at
                load_s[name] = min(load_s.get(name, at - began[name]), at - began.pop(name))
            case "unloaded" if (other := goes_for.pop(name, "")) in began:
                began[other] = at
            case "evicted" if name in running:
                told = _EVICTED.search(event["reason"])
                if told is None:
                    raise ValueError(f"an eviction without a time or its cause: {event['reason']}")
                since, goes_for[name] = running.pop(name), told[2]
                again = any(call.began > since and call.ended < at - _HEARD_S for call in calls[name])
                found.append(Stay(name, float(told[1]), load_s[name], event["reason"], again))
    return found
