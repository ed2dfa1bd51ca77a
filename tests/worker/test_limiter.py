"""The lane of a key's calls beside those of other keys."""

from __future__ import annotations

import sys

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

    assert keys.lanes(BUSY, 6) == ["interactive"] * 2 + ["bulk"] * 4
    assert keys.lanes(LIGHT, 1) == ["interactive"]
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
    calls = [keys.call(BUSY) for _ in range(3)]
    assert calls[2].lane is Lane.BULK

    keys.calls.leave(calls[0])
    assert keys.lanes(BUSY, 1) == ["bulk"], "two others"
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
    assert keys.lanes(BUSY, 7, weight=3) == ["interactive"] * 6 + ["bulk"]
    assert keys.lanes(THIRD, 9, priority=0) == ["interactive"] * 9
    assert keys.lanes(4, 3, priority=2) == ["interactive"] * 2 + ["bulk"]


def test_calls_without_a_key_are_one_tenant_once_there_are_keys() -> None:
    keys = Keys()
    assert keys.lanes(0, 9) == ["interactive"] * 9
    keys.call(LIGHT)

    assert keys.lanes(0, 3) == ["interactive"] * 2 + ["bulk"]


def test_turns_of_threads_are_short_while_a_query_waits_beside_many_of_another_key() -> None:
    keys, usual = Keys(), sys.getswitchinterval()
    query = keys.call(LIGHT)
    flood = [keys.call(BUSY) for _ in range(3)]
    assert flood[2].lane is Lane.BULK
    assert sys.getswitchinterval() < usual
    keys.calls.leave(query)
    assert sys.getswitchinterval() == usual, "the flood alone has its throughput"

    query = keys.call(LIGHT)
    assert sys.getswitchinterval() < usual
    keys.calls.leave(flood[2])
    assert sys.getswitchinterval() == usual, "few of each"
    for call in (query, *flood[:2]):
        keys.calls.leave(call)
    assert sys.getswitchinterval() == usual
