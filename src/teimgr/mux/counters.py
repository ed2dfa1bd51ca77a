"""Counts and latencies of the mux, cheap enough for every call."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LatencyHistogram:
    """How many calls took up to each of `BOUNDS_S` (not cumulative; the last bucket is for the rest), and their sum."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one call."""
        self.buckets[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s


class CallRecord:
    """What is known of one call while it runs: its method, its instance once found, the messages it answered."""

    __slots__ = ("began_s", "instance", "messages", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.instance = ""
        self.messages = 0
        self.began_s = time.perf_counter()


class CallCounters:
    """Calls by method, instance and gRPC status; latency by method and instance.

    Only instances of the directory become labels: a call whose target was not found counts under the empty name.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._calls: dict[tuple[str, str, str], int] = {}
        self._messages: dict[tuple[str, str], int] = {}
        self._latency: dict[tuple[str, str], LatencyHistogram] = {}

    def begin(self, method: str) -> CallRecord:
        """A call came in; `end` must follow."""
        self.in_flight += 1
        return CallRecord(method)

    def end(self, note: CallRecord, status: str) -> None:
        """The call is over with the gRPC status of that name."""
        self.in_flight -= 1
        key = (note.method, note.instance)
        calls = (*key, status)
        self._calls[calls] = self._calls.get(calls, 0) + 1
        self._messages[key] = self._messages.get(key, 0) + note.messages
        histogram = self._latency.get(key)
        if histogram is None:
            histogram = self._latency[key] = LatencyHistogram()
        histogram.observe(time.perf_counter() - note.began_s)

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
                    "messages": self._messages[method, instance],
                    "sum_s": round(histogram.sum_s, 6),
                    "buckets": histogram.buckets,
                }
                for (method, instance), histogram in self._latency.items()
            ],
            "bounds_s": BOUNDS_S,
        }
