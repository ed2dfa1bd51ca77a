"""What the daemon counts, and the whole page of metrics: its own numbers and those it is given by others.

Names, labels and buckets are those of `catalogue.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from teimgr.observability import catalogue
from teimgr.observability.catalogue import Family
from teimgr.observability.exposition import Page, Sample, histogram, text
from teimgr.spec import InstanceSpec, InstanceView, State

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """What of it lies in RAM, shared parts included; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


# The companion `…_created` of every counter doubles the page and says nothing that Prometheus asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]


CollectorT = TypeVar("CollectorT", Counter, Gauge, Histogram)


class Metrics:
    """The daemon's numbers; each daemon, and each test, has its own. `sources` give more pages when one is made.

    The per-instance counters of a deleted instance stay, as Prometheus expects of counters.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], Awaitable[Page]]] = []
        self._registry = CollectorRegistry()
        self._collectors: dict[Family, Counter | Gauge | Histogram] = {}
        self._muxes: dict[str, Mapping[str, Any]] = {}
        self.fleet(())
        self.alarms(0)

    def instance_created(self, spec: InstanceSpec) -> None:
        """A user created an instance."""
        self.count(catalogue.CREATED, spec.name, spec.model_id)

    def instance_deleted(self, name: str) -> None:
        """A user deleted an instance."""
        self.count(catalogue.DELETED, name)

    def instance_restarted(self, name: str) -> None:
        """The daemon, not a user, decided to restart an instance."""
        self.count(catalogue.RESTARTS, name)

    def health_check_failed(self, name: str) -> None:
        """A probe of an instance failed or timed out."""
        self.count(catalogue.PROBE_FAILURES, name)

    def worker_started(self, name: str, seconds: float) -> None:
        """A worker proved that it is ready, `seconds` after its launch."""
        self.observe(catalogue.WORKER_START, seconds, name)

    def model_fetched(self, outcome: str, size_bytes: int) -> None:
        """A download of the model registry ended (`done` or `failed`) after so many bytes."""
        self.count(catalogue.DOWNLOADS, outcome)
        self.count(catalogue.DOWNLOAD_BYTES, by=size_bytes)

    def model_tried(self, outcome: str) -> None:
        """A trial of a model ended: `verified` or `failed`."""
        self.count(catalogue.TRIALS, outcome)

    def fleet(self, views: Iterable[InstanceView]) -> None:
        """These are all the instances there are now."""
        states = Count(view.state for view in views)
        self.set(catalogue.INSTANCES, states.total())
        for state in State:
            self.set(catalogue.BY_STATE, states[state], state.value)

    def rest_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A REST request was answered; `route` is the route's template, never a caller's path."""
        self.observe(catalogue.REST_REQUESTS, seconds, method, route, str(status))

    def alarms(self, number: int) -> None:
        """So many alarms are on."""
        self.set(catalogue.ALARMS, number)

    def mux_stats(self, mux: str, figures: Mapping[str, Any]) -> None:
        """The counters that one multiplexer process answers to `stats`, as they are now."""
        self._muxes[mux] = figures

    def mux_gone(self, mux: str) -> None:
        """A multiplexer process ended; its figures are no longer shown."""
        self._muxes.pop(mux, None)

    async def page(self) -> Page:
        """Everything, that of `sources` included, in the order of the catalogue."""
        self.set(catalogue.DAEMON_MEMORY, resident_bytes())
        pages = [self._own(), mux_page(self._muxes), *await asyncio.gather(*(source() for source in self.sources))]
        whole = {family: samples for page in pages for family, samples in page.items()}
        return {family: whole[family] for family in catalogue.FAMILIES.values() if family in whole}

    def render(self) -> bytes:
        """What this process counts and the muxes said, as text, without `sources`."""
        return text(self._own() | mux_page(self._muxes)).encode()

    def count(self, family: Family, *labels: str, by: float = 1) -> None:
        """`by` more of a counter; `labels` in the order of the catalogue."""
        self._series(Counter, family, labels).inc(by)

    def set(self, family: Family, value: float, *labels: str) -> None:
        """What a gauge is now."""
        self._series(Gauge, family, labels).set(value)

    def observe(self, family: Family, value: float, *labels: str) -> None:
        """One more value of a histogram."""
        self._series(Histogram, family, labels).observe(value)

    def _series(self, kind: type[CollectorT], family: Family, labels: tuple[str, ...]) -> CollectorT:
        """The collector of `family` for these labels; a family is registered when it is first heard of."""
        if family not in self._collectors:
            more = {"buckets": family.bounds} if kind is Histogram else {}
            self._collectors[family] = kind(
                family.name,
                family.help,
                family.labels,
                registry=self._registry,
                **more,  # type: ignore[arg-type]
            )
        collector = self._collectors[family]
        assert isinstance(collector, kind)
        return collector.labels(*labels) if labels else collector

    def _own(self) -> Page:
        return {family: list(_samples(family, collector)) for family, collector in self._collectors.items()}


def _samples(family: Family, collector: Counter | Gauge | Histogram) -> Iterator[Sample]:
    for metric in collector.collect():
        for sample in metric.samples:
            yield Sample(sample.name.removeprefix(family.name), sample.labels, sample.value)


_OF_LINKS = {
    catalogue.LINK_IN_FLIGHT: "in_flight",
    catalogue.LINK_IN_FLIGHT_BYTES: "in_flight_bytes",
    catalogue.LINK_REQUESTS: "requests",
    catalogue.LINK_SENT: "sent_bytes",
    catalogue.LINK_RECEIVED: "received_bytes",
    catalogue.LINK_CONNECTS: "connects",
    catalogue.LINK_LOST: "losses",
    catalogue.LINK_EXPIRED: "expired",
}


def mux_page(muxes: Mapping[str, Mapping[str, Any]]) -> Page:
    """What multiplexers last answered to `stats`, by their names."""
    page: Page = {}

    def add(family: Family, value: float, **labels: str) -> None:
        page.setdefault(family, []).append(Sample("", labels, value))

    for mux, figures in sorted(muxes.items()):
        add(catalogue.MUX_IN_FLIGHT, figures.get("in_flight", 0), mux=mux)
        add(catalogue.MUX_MEMORY, figures.get("resident_bytes", 0), mux=mux)
        for row in figures.get("links", ()):
            for family, key in _OF_LINKS.items():
                add(family, row[key], mux=mux, instance=row["instance"])
        for row in figures.get("calls", ()):
            labels = {key: row[key] for key in ("method", "instance", "status")}
            add(catalogue.MUX_CALLS, row["count"], mux=mux, **labels)
        for row in figures.get("latency", ()):
            labels = {"mux": mux, "method": row["method"], "instance": row["instance"]}
            add(catalogue.MUX_MESSAGES, row["messages"], **labels)
            buckets = histogram(figures["bounds_s"], row["buckets"], row["sum_s"], labels)
            page.setdefault(catalogue.MUX_SECONDS, []).extend(buckets)
    return page
