"""Refused calls per second, from counters that are read at any rhythm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from teimgr.control.capacity.history import _KEPT_REFUSALS, REFUSALS_WINDOW_S, Refusals


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


def test_readings_are_bounded_however_often_someone_asks() -> None:
    refusals = Refusals()
    for step in range(5000):
        rates = refusals.read([worker(step)], step / 20)
    assert len(refusals._readings["a"]) <= _KEPT_REFUSALS
    assert rates["a"] == pytest.approx(20, rel=0.05)
    assert refusals._readings["a"][0][0] >= 5000 / 20 - REFUSALS_WINDOW_S - 2
    assert refusals.read([], 300) == {}
    assert not refusals._readings
