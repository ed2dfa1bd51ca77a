"""Pauses between the attempts of a request of a batch."""

from __future__ import annotations

from teimgr.api.batches.line_calls import pause_s


def test_pauses_double_from_the_first_to_the_longest() -> None:
    assert [pause_s(attempts, 0.0, 0.0) for attempts in (1, 2, 3, 6, 10_000)] == [0.2, 0.4, 0.8, 5.0, 5.0]


def test_a_time_that_the_worker_names_lengthens_a_pause_up_to_the_longest() -> None:
    assert [pause_s(1, named_s, 0.0) for named_s in (0.1, 3.0, 60.0)] == [0.2, 3.0, 5.0]


def test_pauses_of_many_requests_differ() -> None:
    assert [pause_s(1, 3.0, jitter) for jitter in (0.0, 0.5, 1.0)] == [3.0, 2.25, 1.5]
