"""The daemon's metrics, and the whole page of `GET /metrics`: the daemon's own and those of muxes, workers and GPUs.

Names, labels and buckets are in `catalogue.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from teimgr.observability import catalogue
from teimgr.observability.catalogue import Family
from teimgr.observability.exposition import Page, Sample, add, histogram
from teimgr.observability.memory import resident_bytes
from teimgr.spec import InstanceView, State

# A series `…_created` for every counter would double the page; Prometheus does not need it.
disable_created_metrics()  # type: ignore[no-untyped-call]

CollectorT = TypeVar("CollectorT", Counter, Gauge, Histogram)


class DaemonMetrics:
    """The metrics of one daemon: `count`, `set` and `observe` record values of families of the catalogue.

    `sources` are asked for what they add to each page: metrics of other processes, and gauges that are read when the
    page is made, such as those of the batches.
    The counters of a deleted instance stay, as Prometheus expects of counters, unless they are dropped.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], Awaitable[Page]]] = []
        self._registry = CollectorRegistry()
        self._collectors: dict[Family, Counter | Gauge | Histogram] = {}
        self._labelled: dict[tuple[Family, tuple[str, ...]], Counter | Gauge | Histogram] = {}
        self._muxes: dict[str, Mapping[str, Any]] = {}
        self.fleet(())
        self.set(catalogue.ALARMS, 0)

    def fleet(self, views: Iterable[InstanceView]) -> None:
        """Set the gauges of instances by state."""
        states = Count(view.state for view in views)
        self.set(catalogue.INSTANCES, states.total())
        for state in State:
            self.set(catalogue.BY_STATE, states[state], state.value)

    def mux_stats(self, mux: str, stats: Mapping[str, Any]) -> None:
        """Keep the latest reply of one mux process to `stats`."""
        self._muxes[mux] = stats

    def mux_gone(self, mux: str) -> None:
        self._muxes.pop(mux, None)

    async def page(self) -> Page:
        """Return all metrics, including those of `sources`, in the order of the catalogue."""
        self.set(catalogue.DAEMON_MEMORY, resident_bytes())
        own = {
            family: [
                Sample(sample.name.removeprefix(family.name), sample.labels, sample.value)
                for metric in collector.collect()
                for sample in metric.samples
            ]
            for family, collector in self._collectors.items()
        }
        pages = [own, mux_page(self._muxes), *await asyncio.gather(*(source() for source in self.sources))]
        whole = {family: samples for page in pages for family, samples in page.items()}
        return {family: whole[family] for family in catalogue.FAMILIES.values() if family in whole}

    def count(self, family: Family, *labels: str, by: float = 1) -> None:
        """Increase a counter; `labels` in the order of the catalogue."""
        self._series(Counter, family, labels).inc(by)

    def set(self, family: Family, value: float, *labels: str) -> None:
        self._series(Gauge, family, labels).set(value)

    def observe(self, family: Family, value: float, *labels: str) -> None:
        self._series(Histogram, family, labels).observe(value)

    def drop(self, instance: str) -> None:
        """Remove the series of an instance."""
        for family, labels in [key for key in self._labelled if key[0].labels[:1] == ("instance",)]:
            if labels[0] == instance:
                del self._labelled[family, labels]
                self._collectors[family].remove(*labels)

    def _series(self, kind: type[CollectorT], family: Family, labels: tuple[str, ...]) -> CollectorT:
        """Return the collector of `family` for these labels; families are registered on first use."""
        known = self._labelled.get((family, labels))
        if known is None:
            known = self._labelled[family, labels] = self._new_series(kind, family, labels)
        assert isinstance(known, kind)
        return known

    def _new_series(self, kind: type[CollectorT], family: Family, labels: tuple[str, ...]) -> CollectorT:
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
    """The page of the muxes' last replies to `stats`, by mux name."""
    page: Page = {}
    for mux, stats in sorted(muxes.items()):
        add(page, catalogue.MUX_IN_FLIGHT, stats.get("in_flight", 0), mux=mux)
        add(page, catalogue.MUX_LOOP_HELD, stats.get("loop_held", 0), mux=mux)
        add(page, catalogue.MUX_MEMORY, stats.get("resident_bytes", 0), mux=mux)
        for row in stats.get("links", ()):
            for family, key in _OF_LINKS.items():
                add(page, family, row[key], mux=mux, instance=row["instance"])
        for row in stats.get("calls", ()):
            labels = {key: row[key] for key in ("method", "instance", "status")}
            add(page, catalogue.MUX_CALLS, row["count"], mux=mux, **labels)
        for row in stats.get("latency", ()):
            labels = {"mux": mux, "method": row["method"], "instance": row["instance"]}
            add(page, catalogue.MUX_MESSAGES, row["messages"], **labels)
            buckets = histogram(stats["bounds_s"], row["buckets"], row["sum_s"], labels)
            page.setdefault(catalogue.MUX_SECONDS, []).extend(buckets)
    return page
