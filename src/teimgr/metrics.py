"""Every metric of the daemon by name, and what each method of `Metrics` says happened.

The names that start with `tei_manager_` are tei-manager's, so that its dashboards keep working.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from teimgr.spec import InstanceSpec, InstanceView, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
START_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# Its companion `…_created` of every counter doubles the page and says nothing that Prometheus asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The daemon's registry; each daemon, and each test, has its own.

    The per-instance counters of a deleted instance stay, as Prometheus expects of counters.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._created = Counter(
            "tei_manager_instances_created", "Instances created", ("instance", "model"), registry=self.registry
        )
        self._deleted = Counter(
            "tei_manager_instances_deleted", "Instances deleted", ("instance",), registry=self.registry
        )
        self._restarts = Counter(
            "tei_manager_instance_restarts", "Restarts that the daemon decided", ("instance",), registry=self.registry
        )
        self._probe_failures = Counter(
            "tei_manager_health_check_failures", "Failed health probes", ("instance",), registry=self.registry
        )
        self._count = Gauge("tei_manager_instances_count", "Instances known", registry=self.registry)
        self._by_state = Gauge("teimgr_instances", "Instances by state", ("state",), registry=self.registry)
        self._start = Histogram(
            "teimgr_worker_start_seconds",
            "From the launch of a worker to its proof of readiness",
            ("instance",),
            buckets=START_BUCKETS_S,
            registry=self.registry,
        )
        self._requests = Histogram(
            "teimgr_rest_request_seconds",
            "REST requests, by route and status",
            ("method", "route", "status"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._fetches = Counter(
            "teimgr_model_downloads",
            "Downloads by the registry, by outcome",
            ("outcome",),
            registry=self.registry,
        )
        self._fetched_bytes = Counter(
            "teimgr_model_download_bytes", "Bytes of models that came over the network", registry=self.registry
        )
        self._trials = Counter(
            "teimgr_model_trials", "Trials of models, by outcome", ("outcome",), registry=self.registry
        )
        self._alarms = Gauge("teimgr_alarms", "Alarms that /health shows", registry=self.registry)
        self._mux = MuxFigures()
        self.registry.register(self._mux)
        self.fleet(())

    def instance_created(self, spec: InstanceSpec) -> None:
        """A user created an instance."""
        self._created.labels(spec.name, spec.model_id).inc()

    def instance_deleted(self, name: str) -> None:
        """A user deleted an instance."""
        self._deleted.labels(name).inc()

    def instance_restarted(self, name: str) -> None:
        """The daemon, not a user, decided to restart an instance."""
        self._restarts.labels(name).inc()

    def health_check_failed(self, name: str) -> None:
        """A probe of an instance failed or timed out."""
        self._probe_failures.labels(name).inc()

    def worker_started(self, name: str, seconds: float) -> None:
        """A worker proved that it is ready, `seconds` after its launch."""
        self._start.labels(name).observe(seconds)

    def model_fetched(self, outcome: str, size_bytes: int) -> None:
        """A download of the model registry ended (`done` or `failed`) after so many bytes."""
        self._fetches.labels(outcome).inc()
        self._fetched_bytes.inc(size_bytes)

    def model_tried(self, outcome: str) -> None:
        """A trial of a model ended: `verified` or `failed`."""
        self._trials.labels(outcome).inc()

    def fleet(self, views: Iterable[InstanceView]) -> None:
        """These are all the instances there are now."""
        states = Count(view.state for view in views)
        self._count.set(states.total())
        for state in State:
            self._by_state.labels(state.value).set(states[state])

    def rest_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A REST request was answered; `route` is the route's template, never a caller's path."""
        self._requests.labels(method, route, str(status)).observe(seconds)

    def alarms(self, number: int) -> None:
        """So many alarms are on."""
        self._alarms.set(number)

    def mux_stats(self, mux: str, figures: Mapping[str, Any]) -> None:
        """The counters that one multiplexer process answers to `stats`, as they are now."""
        self._mux.latest[mux] = figures

    def mux_gone(self, mux: str) -> None:
        """A multiplexer process ended; its figures are no longer shown."""
        self._mux.latest.pop(mux, None)

    def render(self) -> bytes:
        """All of it, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)


class MuxFigures(Collector):
    """What the multiplexer processes last said of themselves; the shape is that of their answer to `stats`."""

    def __init__(self) -> None:
        self.latest: dict[str, Mapping[str, Any]] = {}

    def collect(self) -> Iterable[Metric]:
        """Calls, messages, latency and load, labelled by process, method and instance."""
        in_flight = GaugeMetricFamily("teimgr_mux_in_flight", "Calls that are running", labels=["mux"])
        calls = CounterMetricFamily(
            "teimgr_mux_calls", "Calls by gRPC status", labels=["mux", "method", "instance", "status"]
        )
        messages = CounterMetricFamily("teimgr_mux_messages", "Messages answered", labels=["mux", "method", "instance"])
        seconds = HistogramMetricFamily(
            "teimgr_mux_call_seconds", "Duration of calls", labels=["mux", "method", "instance"]
        )
        for mux, figures in sorted(self.latest.items()):
            in_flight.add_metric([mux], figures.get("in_flight", 0))
            for row in figures.get("calls", ()):
                calls.add_metric([mux, row["method"], row["instance"], row["status"]], row["count"])
            for row in figures.get("latency", ()):
                labels = [mux, row["method"], row["instance"]]
                messages.add_metric(labels, row["messages"])
                seconds.add_metric(labels, _cumulative(figures["bounds_s"], row["buckets"]), row["sum_s"])
        return in_flight, calls, messages, seconds


def _cumulative(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts per bucket, the last of them beyond every bound, as Prometheus wants them."""
    limits = (*(str(float(bound)) for bound in bounds_s), "+Inf")
    return list(zip(limits, accumulate(counts), strict=True))
