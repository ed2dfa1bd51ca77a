"""Figures of instances: latencies from buckets, rates from counters of workers that come and go, bounded histories."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from teimgr.api.page import views
from teimgr.api.page.figures import FINE_POINTS, WIDTH, Figures, Point, Ring, Sampler, percentile
from teimgr.api.rest.probes import WorkerStats
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.observability.catalogue import DURATION_BOUNDS
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerView

NONE = [0] * (len(DURATION_BOUNDS) + 1)


def at_bucket(index: int, count: int) -> list[int]:
    return [count if place == index else 0 for place in range(len(NONE))]


def point(time: float, value: float = 1.0) -> Point:
    return Point(time, *[value] * WIDTH)


def test_a_quantile_lies_in_its_bucket() -> None:
    assert math.isnan(percentile(NONE, 0.99))
    assert DURATION_BOUNDS[9] < percentile(at_bucket(10, 5), 0.5) <= DURATION_BOUNDS[10]
    assert 0 < percentile(at_bucket(0, 1), 0.99) <= DURATION_BOUNDS[0]
    assert percentile(at_bucket(len(DURATION_BOUNDS), 3), 0.99) == DURATION_BOUNDS[-1]
    mixed = [a + b for a, b in zip(at_bucket(5, 98), at_bucket(20, 2), strict=True)]
    assert percentile(mixed, 0.5) <= DURATION_BOUNDS[5]
    assert DURATION_BOUNDS[19] < percentile(mixed, 0.99) <= DURATION_BOUNDS[20]


def test_a_ring_keeps_the_last_points() -> None:
    ring = Ring(3)
    for moment in range(5):
        ring.append(point(moment, moment * 2.0))
    assert len(ring) == 3
    assert [(each.time, each.tokens) for each in ring.after(2)] == [(3.0, 6.0), (4.0, 8.0)]
    assert ring.last(2, "tokens") == [6.0, 8.0]
    assert ring.last(9, "busy") == [4.0, 6.0, 8.0]


def test_latency_is_that_of_the_last_minute() -> None:
    figures = Figures()
    figures.append(point(1000.0), at_bucket(20, 10), is_fine=True)
    figures.append(point(1050.0), at_bucket(5, 10), is_fine=True)
    assert figures.percentile(0.99, 1055.0) > DURATION_BOUNDS[19]
    assert figures.percentile(0.99, 1070.0) <= DURATION_BOUNDS[5]
    assert math.isnan(figures.percentile(0.99, 1111.0))
    for moment in range(3 * FINE_POINTS):
        figures.append(point(2000.0 + moment * 2), NONE, is_fine=True)
    assert len(figures.fine) == FINE_POINTS
    moments = [each.time for each in figures.coarse.after(2000)]
    assert {b - a for a, b in pairwise(moments)} == {14.0}, "every seventh"


class Workers:
    """Answers of workers that the test writes."""

    def __init__(self) -> None:
        self.now: list[WorkerStats] = []

    async def stats(self) -> list[WorkerStats]:
        return self.now


def stats(incarnation: str, **counters: Any) -> WorkerStats:
    known = {"requests": 0, "failures": 0, "refused": 0, "texts": 0, "tokens": 0, "busy_s": 0.0, "queued_texts": 0}
    return WorkerStats("a", incarnation, known | {"by_duration": NONE} | counters)


async def test_rates_are_those_of_the_same_worker() -> None:
    workers = Workers()
    view = InstanceView(
        spec=InstanceSpec(name="a", model_id="m"),
        state=State.RUNNING,
        workers=(WorkerView(replica=0, role="serving", state=State.RUNNING),),
    )
    views = [view]
    gpus = GpuInventory({}, lambda: Inventory(reason="none"))
    sampler = Sampler(workers, lambda: views, gpus)  # type: ignore[arg-type]

    workers.now = [stats("one", tokens=10_000, queued_texts=3)]
    await sampler.sample()
    first = sampler.of("a").now
    assert first is not None
    assert math.isnan(first.tokens), "ten thousand tokens of before are no rate"
    assert first.queue == 3

    workers.now = [stats("one", tokens=10_500, by_duration=at_bucket(7, 4)), stats("two", tokens=70_000)]
    await sampler.sample()
    second = sampler.of("a").now
    assert second is not None
    seconds = max(second.time - first.time, 1e-3)
    assert 0 < second.tokens <= 500 / (seconds * 0.2)
    assert DURATION_BOUNDS[6] < second.p99 <= DURATION_BOUNDS[7]

    workers.now = [stats("three", tokens=5)]  # the others are gone
    await sampler.sample()
    third = sampler.of("a").now
    assert third is not None
    assert math.isnan(third.tokens)

    workers.now, views[:] = [], [replace(view, state=State.STOPPED, workers=())]
    await sampler.sample()
    stopped = sampler.of("a").now
    assert stopped is not None
    assert all(math.isnan(value) for value in (stopped.tokens, stopped.memory, stopped.queue, stopped.busy))

    views.clear()
    await sampler.sample()
    assert sampler.figures == {}
    assert sampler.version == 5


async def test_refusals_are_told_from_failures_and_for_five_minutes_an_alarm() -> None:
    workers, views = Workers(), [InstanceView(spec=InstanceSpec(name="a", model_id="m"), state=State.RUNNING)]
    sampler = Sampler(workers, lambda: views, GpuInventory({}, lambda: Inventory(reason="none")))  # type: ignore[arg-type]
    for count in (0, 40):
        workers.now = [stats("one", failures=count, refused=count * 0.75)]
        await sampler.sample()
    figures = sampler.of("a")
    assert figures.now is not None
    assert figures.now.refused == pytest.approx(3 * figures.now.failures)
    assert (sampler.alarms(), figures.now.failures > 0) == ([], True)

    began = figures.now.time
    for after_s, refused, alarms in (
        (250, 1.0, 0),
        (290, 0.0, 0),
        (301, 1.0, 1),
        (350, 0.0, 1),
        (362, 0.0, 0),
        (400, 1.0, 0),
    ):
        figures.append(figures.now._replace(time=began + after_s, refused=refused), NONE, is_fine=False)
        assert len(sampler.alarms()) == alarms, after_s
        if alarms:
            assert "a: overloaded for" in sampler.alarms()[0]


async def test_a_worker_of_an_earlier_version_has_no_latencies() -> None:
    workers, views = Workers(), [InstanceView(spec=InstanceSpec(name="a", model_id="m"), state=State.RUNNING)]
    sampler = Sampler(workers, lambda: views, GpuInventory({}, lambda: Inventory(reason="none")))  # type: ignore[arg-type]
    for tokens in (1, 2):
        workers.now = [WorkerStats("a", "one", {"tokens": tokens, "queued_texts": 0})]
        await sampler.sample()
    now = sampler.of("a").now
    assert now is not None
    assert now.tokens > 0
    assert math.isnan(now.p99)


def test_rows_without_a_figure_of_memory_come_last() -> None:
    rows = [{"name": "loads", "memory": None}, {"name": "small", "memory": 1}, {"name": "large", "memory": 2}]
    assert [row["name"] for row in views.largest_first(rows)] == ["large", "small", "loads"]


def test_lines_end_at_a_round_value_and_have_gaps() -> None:
    ends = {0: 100, 100: 100, 101: 200, 210: 500, 4_999: 5_000, 5_001: 10_000, 12_000: 20_000}
    assert {value: views.scale_end(value) for value in ends} == ends
    assert views.spark([], 100) == ""
    assert views.spark([0.0, 50.0, None, 100.0], 100) == "M80.8,22.0L85.9,12.0M96.0,2.0"


def test_a_line_shows_five_minutes_whether_a_page_was_open_or_not() -> None:
    watched, alone = Figures(), Figures()
    for figures, pace in ((watched, 2), (alone, 15)):
        for moment in range(0, 601, pace):
            figures.append(point(1000.0 + moment, 7.0), NONE, is_fine=pace == 2)
    for figures in (watched, alone):
        assert views._spark(figures, 1600.0) == [7.0] * 20


async def test_figures_of_workers_that_do_not_answer_are_the_last_and_have_their_time() -> None:
    worker = WorkerView(replica=0, role="serving", state=State.RUNNING)
    view = InstanceView(spec=InstanceSpec(name="a", model_id="m"), state=State.RUNNING, workers=(worker,))
    workers, fleet = Workers(), [view]
    sampler = Sampler(workers, lambda: fleet, GpuInventory({}, lambda: Inventory(reason="none")))  # type: ignore[arg-type]
    for tokens in (0, 500):
        workers.now = [stats("one", tokens=tokens, queued_texts=3)]
        await sampler.sample()
    [row] = views.fleet_rows(fleet, sampler, ())
    assert (row["as_of"], row["queue"]) == (None, 3)
    answered = sampler.of("a").now
    assert answered is not None
    workers.now = []
    await sampler.sample()
    [silent] = views.fleet_rows(fleet, sampler, ())
    assert views.totals([row, silent | {"busy": 40}])["busy"] == 40
    assert (silent["as_of"], silent["tokens"], silent["queue"]) == (round(answered.time), row["tokens"], 3)
    known = [replace(worker, replica=number, incarnation=each) for number, each in enumerate(("one", "two"))]
    fleet[:] = [replace(view, workers=tuple(known))]
    for answering in (("one", "two"), ("one",)):
        workers.now = [stats(each) for each in answering]
        await sampler.sample()
    [half] = views.fleet_rows(fleet, sampler, ())
    assert (half["workers"], half["silent"][0], half["silent"][1] is None) == ("2/2, 1 silent", None, False)
    fleet[:] = [replace(view, state=State.STOPPED, workers=())]
    [stopped] = views.fleet_rows(fleet, sampler, ())
    assert (stopped["as_of"], stopped["tokens"]) == (None, None)
