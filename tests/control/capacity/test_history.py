"""Refused calls per second, from counters that are read at any rhythm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from teimgr.control.capacity.history import _KEPT_REFUSALS, REFUSALS_WINDOW_S, History, Memory, Refusals
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerView


@dataclass
class Counters:
    instance: str
    incarnation: str
    counters: Mapping[str, Any]


def worker(refused: int, incarnation: str = "w", instance: str = "a") -> Counters:
    return Counters(instance, incarnation, {"refused": refused})


def test_the_first_reading_has_no_rate_and_later_ones_that_of_the_last_minute() -> None:
    refusals = Refusals()
    assert refusals.read([worker(500)], 0) == {"a": 0}
    assert refusals.read([worker(530)], 15) == {"a": 2}
    assert refusals.read([worker(530)], 30) == {"a": 1}
    for now in range(45, 120, 15):
        refusals.read([worker(530)], now)
    assert refusals.read([worker(530)], 120) == {"a": 0}


def test_workers_are_added_up_and_a_new_one_counts_from_its_start() -> None:
    refusals = Refusals()
    refusals.read([worker(9, "u"), worker(0, "v", "b")], 0)
    rates = refusals.read([worker(19, "u"), worker(20, "w"), worker(40, "v", "b")], 10)
    assert rates == {"a": 3, "b": 4}
    assert refusals.read([worker(20, "w")], 20) == {"a": 1.5}  # the end of a worker takes nothing back


def test_a_worker_that_misses_a_reading_is_not_a_new_one() -> None:
    refusals = Refusals()
    refusals.read([worker(1000, "u"), worker(5000, "v")], 0, {"u", "v"})
    assert refusals.read([worker(1010, "u")], 10, {"u", "v"}) == {"a": 1}
    assert refusals.read([], 20, {"u", "v"}) == {"a": 0.5}
    assert refusals.read([worker(1010, "u"), worker(5020, "v")], 30, {"u", "v"}) == {"a": 1}
    refusals.read([worker(1000, "u"), worker(5020, "v")], 30, {"u", "v"})  # it was overtaken by the one before
    assert refusals.read([worker(1010, "u"), worker(5020, "v")], 30, {"u", "v"}) == {"a": 1}


def test_what_a_late_worker_has_counted_since_its_start_is_counted_once() -> None:
    history = History()
    there = tuple(WorkerView(replica=0, role="serving", state=State.RUNNING, incarnation=name) for name in "uv")
    view = InstanceView(spec=InstanceSpec(name="a", model_id="m"), state=State.RUNNING, workers=there)
    for now, texts in enumerate(({"u": 10, "v": 500}, {"u": 12}, {"u": 12, "v": 503}, {"u": 12, "v": 501}, {"v": 504})):
        history.add(view, [Counters("a", name, {"texts": count}) for name, count in texts.items()], now)
    assert history.observe(view, Memory(), 60).texts == 2 + 4


def test_readings_are_bounded_however_often_someone_asks() -> None:
    refusals = Refusals()
    for step in range(5000):
        rates = refusals.read([worker(step)], step / 20)
    assert len(refusals._readings["a"]) <= _KEPT_REFUSALS
    assert rates["a"] == pytest.approx(20, rel=0.05)
    assert refusals._readings["a"][0][0] >= 5000 / 20 - REFUSALS_WINDOW_S - 2
    assert refusals.read([], 300) == {}
    assert not refusals._readings
