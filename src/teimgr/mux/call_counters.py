"""Counts and latencies of a mux's calls: `CallCounters`, and the record of one call for it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container
from typing import Any

from teimgr.observability.catalogue import MUX_SECONDS
from teimgr.wire.spaces import Marks

_BOUNDS_S = MUX_SECONDS.bounds


class CallRecord:
    """State of one call while it runs: its method, its instance once known, the number of answered messages, and the
    space of its vectors."""

    __slots__ = ("began_s", "instance", "marks", "messages", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.instance = ""
        self.marks: Marks = ()
        self.messages = 0
        self.began_s = time.perf_counter()

    def found(self, instance: str) -> None:
        self.instance = instance

    def count(self) -> None:
        """Count one more answered message."""
        self.messages += 1

    def has(self, marks: Marks) -> None:
        """Record the space of the call's vectors."""
        self.marks = marks

    def restart(self) -> None:
        """Restart the clock: the time of a client's upload is not part of our latency."""
        self.began_s = time.perf_counter()


class CallLatency:
    """Non-cumulative histogram over the bounds of `MUX_SECONDS`, with an overflow bucket; sums of seconds and
    messages."""

    __slots__ = ("buckets", "messages", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS_S) + 1)
        self.messages = 0
        self.sum_s = 0.0


class CallCounters:
    """Calls by method, instance and gRPC status; latency by method and instance.

    Only names in `instances` become labels: a call whose target was not found, or was deleted meanwhile, is counted
    under the empty name. `drop` removes the counters of a deleted instance.
    """

    def __init__(self, instances: Container[str]) -> None:
        self.in_flight = 0
        self._instances = instances
        self._calls: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._latency: defaultdict[str, dict[str, CallLatency]] = defaultdict(dict)

    def begin(self, method: str) -> CallRecord:
        """Count a call as in flight; `end` must follow."""
        self.in_flight += 1
        return CallRecord(method)

    def end(self, record: CallRecord, status: str) -> None:
        """Count a finished call by the name of its gRPC status."""
        self.in_flight -= 1
        instance = record.instance if record.instance in self._instances else ""
        self._calls[instance][record.method, status] += 1
        latency = self._latency[instance].get(record.method)
        if latency is None:
            latency = self._latency[instance][record.method] = CallLatency()
        duration_s = time.perf_counter() - record.began_s
        latency.buckets[bisect_left(_BOUNDS_S, duration_s)] += 1
        latency.sum_s += duration_s
        latency.messages += record.messages

    def drop(self, instance: str) -> None:
        self._calls.pop(instance, None)
        self._latency.pop(instance, None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "calls": [
                {"method": method, "instance": instance, "status": status, "count": count}
                for instance, calls in self._calls.items()
                for (method, status), count in calls.items()
            ],
            "latency": [
                {
                    "method": method,
                    "instance": instance,
                    "messages": latency.messages,
                    "sum_s": round(latency.sum_s, 6),
                    "buckets": latency.buckets,
                }
                for instance, latencies in self._latency.items()
                for method, latency in latencies.items()
            ],
            "bounds_s": _BOUNDS_S,
        }
