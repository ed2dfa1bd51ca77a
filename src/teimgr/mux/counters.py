"""Counts and latencies of the mux's calls."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class CallRecord:
    """State of one call while it runs: its method, its instance once found, the messages it answered."""

    __slots__ = ("began_s", "instance", "messages", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.instance = ""
        self.messages = 0
        self.began_s = time.perf_counter()


class CallLatency:
    """Histogram over `BOUNDS_S`, not cumulative, the last bucket for the rest; the sums of seconds and messages."""

    __slots__ = ("buckets", "messages", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.messages = 0
        self.sum_s = 0.0


class CallCounters:
    """Calls by method, instance and gRPC status; latency by method and instance.

    Only instances of the directory become labels: a call whose target was not found counts under the empty name.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._calls: dict[tuple[str, str, str], int] = {}
        self._latency: dict[tuple[str, str], CallLatency] = {}

    def begin(self, method: str) -> CallRecord:
        """Count a call as in flight; `end` must follow."""
        self.in_flight += 1
        return CallRecord(method)

    def end(self, record: CallRecord, status: str) -> None:
        """Count a finished call by the name of its gRPC status."""
        self.in_flight -= 1
        calls = (record.method, record.instance, status)
        self._calls[calls] = self._calls.get(calls, 0) + 1
        key = (record.method, record.instance)
        latency = self._latency.get(key)
        if latency is None:
            latency = self._latency[key] = CallLatency()
        duration_s = time.perf_counter() - record.began_s
        latency.buckets[bisect_left(BOUNDS_S, duration_s)] += 1
        latency.sum_s += duration_s
        latency.messages += record.messages

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "in_flight": self.in_flight,
            "calls": [
                {"method": method, "instance": instance, "status": status, "count": count}
                for (method, instance, status), count in self._calls.items()
            ],
            "latency": [
                {
                    "method": method,
                    "instance": instance,
                    "messages": latency.messages,
                    "sum_s": round(latency.sum_s, 6),
                    "buckets": latency.buckets,
                }
                for (method, instance), latency in self._latency.items()
            ],
            "bounds_s": BOUNDS_S,
        }
