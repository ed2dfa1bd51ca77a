"""The lane of a key's calls beside those of other keys."""

from __future__ import annotations

from teimgr.engine.job import Lane, Share
from teimgr.observability.request_context import RequestContext
from teimgr.worker.calls import WorkerCall
from teimgr.worker.limiter import InteractiveCalls

BUSY, LIGHT, THIRD = 1, 2, 3


class Keys:
    """Calls of keys that are counted, at a moment in seconds."""

    def __init__(self) -> None:
        self.calls = InteractiveCalls()
        self.now = 100.0

    def call(self, tenant: int, lane: Lane = Lane.INTERACTIVE, weight: int = 1, priority: int = 1) -> WorkerCall:
        call = WorkerCall(1, lane)
        call.context = RequestContext("id")
        call.context.tenant = tenant
        call.received = self.now
        self.calls.enter(call, Share(tenant, weight, priority))
        return call

    def lanes(self, tenant: int, count: int, weight: int = 1, priority: int = 1) -> list[str]:
        return [self.call(tenant, weight=weight, priority=priority).lane.value for _ in range(count)]


def test_a_key_with_many_calls_leaves_the_lane_to_one_with_few() -> None:
    keys = Keys()
    keys.call(LIGHT)

    assert keys.lanes(BUSY, 6) == ["interactive"] * 4 + ["bulk"] * 2
    assert keys.lanes(LIGHT, 3) == ["interactive"] * 3
    assert keys.lanes(THIRD, 1) == ["interactive"]


def test_a_key_that_calls_alone_keeps_the_lane_until_another_calls_and_has_it_again_once_that_is_quiet() -> None:
    keys = Keys()
    assert keys.lanes(BUSY, 64) == ["interactive"] * 64

    keys.call(LIGHT)
    assert keys.lanes(BUSY, 1) == ["bulk"]
    keys.now += 9.9
    assert keys.lanes(BUSY, 1) == ["bulk"]
    keys.now += 0.2
    assert keys.lanes(BUSY, 1) == ["interactive"]


def test_only_calls_under_way_count_also_those_that_were_moved() -> None:
    keys = Keys()
    keys.call(LIGHT)
    calls = [keys.call(BUSY) for _ in range(5)]
    assert calls[4].lane is Lane.BULK

    keys.calls.leave(calls[0])
    assert keys.lanes(BUSY, 1) == ["bulk"], "four others"
    for call in calls[1:3]:
        keys.calls.leave(call)
        keys.calls.leave(call)
    assert keys.lanes(BUSY, 2) == ["interactive", "bulk"]


def test_calls_of_the_bulk_lane_do_not_count() -> None:
    keys = Keys()
    keys.call(LIGHT)
    for _ in range(9):
        keys.call(BUSY, Lane.BULK)

    assert keys.lanes(BUSY, 1) == ["interactive"]


def test_weight_is_how_many_and_a_key_of_lower_priority_is_no_neighbour() -> None:
    keys = Keys()
    keys.call(LIGHT)
    assert keys.lanes(BUSY, 13, weight=3) == ["interactive"] * 12 + ["bulk"]
    assert keys.lanes(THIRD, 9, priority=0) == ["interactive"] * 9
    assert keys.lanes(4, 5, priority=2) == ["interactive"] * 4 + ["bulk"]


def test_calls_without_a_key_are_one_tenant_once_there_are_keys() -> None:
    keys = Keys()
    assert keys.lanes(0, 9) == ["interactive"] * 9
    keys.call(LIGHT)

    assert keys.lanes(0, 5) == ["interactive"] * 4 + ["bulk"]
