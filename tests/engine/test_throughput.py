"""Throughput is counted while work waits; these tests move a clock and need no model."""

from __future__ import annotations

from teimgr.engine.job import Lane
from teimgr.engine.throughput import LaneThroughput

BOTH = (Lane.INTERACTIVE, Lane.BULK)


def serve(throughput: LaneThroughput, began: float, batches: list[tuple[Lane, int, float]], waiting: object) -> float:
    """Batches of (lane, tokens, seconds), one after the other; returns when the last one ended."""
    for lane, tokens, seconds in batches:
        throughput.took(began, lane, tokens, waiting)  # type: ignore[arg-type]
        began += seconds
    throughput.took(began, lane, 0, ())
    return began


def test_nothing_is_known_of_a_worker_that_never_had_a_backlog() -> None:
    throughput = LaneThroughput()

    now = serve(throughput, 100.0, [(Lane.BULK, 10, 3.0)] * 10, waiting=())

    assert throughput.tokens_per_s(Lane.BULK, now) is None


def test_a_backlog_shows_the_throughput_and_one_slow_batch_does_not_count() -> None:
    throughput = LaneThroughput()

    now = serve(throughput, 100.0, [(Lane.BULK, 500, 5.0), *[(Lane.BULK, 1000, 0.125)] * 4], waiting=(Lane.BULK,))

    assert throughput.tokens_per_s(Lane.BULK, now) == 8000
    assert throughput.tokens_per_s(Lane.INTERACTIVE, now) is None


def test_batches_of_a_few_milliseconds_are_counted_together() -> None:
    throughput = LaneThroughput()

    now = serve(throughput, 100.0, [(Lane.BULK, 100, 2**-8)] * 60, waiting=(Lane.BULK,))
    assert throughput.tokens_per_s(Lane.BULK, now) is None  # a quarter of a second is too little to judge by
    now = serve(throughput, now, [(Lane.BULK, 100, 2**-8)] * 200, waiting=(Lane.BULK,))

    assert throughput.tokens_per_s(Lane.BULK, now) == 25600


def test_a_lane_gets_what_the_other_one_leaves() -> None:
    throughput = LaneThroughput()
    turns = [(Lane.INTERACTIVE, 600, 0.5), (Lane.BULK, 100, 0.5)]

    now = serve(throughput, 100.0, turns * 8, waiting=BOTH)

    # 16 samples each, one of which does not count: one without a token of the lane.
    assert throughput.tokens_per_s(Lane.INTERACTIVE, now) == 600 * 8 / 7.5
    assert throughput.tokens_per_s(Lane.BULK, now) == 100 * 8 / 7.5


def test_an_old_throughput_is_forgotten() -> None:
    throughput = LaneThroughput()

    now = serve(throughput, 100.0, [(Lane.BULK, 100, 0.125)] * 8, waiting=(Lane.BULK,))

    assert throughput.tokens_per_s(Lane.BULK, now) == 800
    assert throughput.tokens_per_s(Lane.BULK, now + 40) is None
