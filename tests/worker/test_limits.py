"""Who is let in, who waits in line, who is refused."""

from __future__ import annotations

import pytest

from teimgr.engine.job import Lane
from teimgr.errors import Overloaded
from teimgr.worker.calls import WorkerCall
from teimgr.worker.limits import CallLimiter


class Door:
    """An admission, and the calls it let in, in order."""

    def __init__(self, calls: int = 2, size_bytes: int = 100, waiting: int = 3, waiting_bytes: int = 1000) -> None:
        self.admission = CallLimiter(
            max_calls=calls, max_bytes=size_bytes, max_waiting=waiting, max_waiting_bytes=waiting_bytes
        )
        self.proceeded: list[WorkerCall] = []

    def enter(self, size_bytes: int = 1, may_wait: bool = False) -> WorkerCall:
        call = WorkerCall(size_bytes, Lane.INTERACTIVE, may_wait=may_wait)
        self.admission.enter(call, lambda: self.proceeded.append(call))
        return call

    def waits(self, call: WorkerCall) -> bool:
        return call in self.admission and call not in self.proceeded


def test_calls_beyond_the_count_are_refused() -> None:
    door = Door(calls=2)
    first, second = door.enter(), door.enter()

    with pytest.raises(Overloaded):
        door.enter()

    assert door.proceeded == [first, second]
    assert len(door.admission) == 2


def test_calls_beyond_the_bytes_are_refused() -> None:
    door = Door(calls=9, size_bytes=100)
    door.enter(60)

    with pytest.raises(Overloaded):
        door.enter(41)
    door.enter(40)

    assert len(door.admission) == 2


def test_a_lone_call_of_any_size_is_let_in() -> None:
    door = Door(size_bytes=100)

    large = door.enter(10_000)

    assert door.proceeded == [large]
    with pytest.raises(Overloaded):
        door.enter(1)


def test_those_who_may_wait_come_in_by_their_order() -> None:
    door = Door(calls=1)
    inside = door.enter()
    line = [door.enter(may_wait=True) for _ in range(3)]
    assert door.proceeded == [inside]

    for call in (inside, *line):
        door.admission.leave(call)

    assert door.proceeded == [inside, *line]
    assert len(door.admission) == 0


def test_nobody_passes_the_line_even_if_small_enough() -> None:
    door = Door(calls=9, size_bytes=100)
    door.enter(60)
    door.enter(50, may_wait=True)

    with pytest.raises(Overloaded):
        door.enter(1)


def test_a_line_that_is_full_by_count_or_by_bytes_refuses() -> None:
    by_count = Door(calls=1, waiting=2)
    by_bytes = Door(calls=1, waiting=9, waiting_bytes=100)
    by_count.enter()
    by_bytes.enter()
    for _ in range(2):
        by_count.enter(may_wait=True)
        by_bytes.enter(50, may_wait=True)

    for door in (by_count, by_bytes):
        with pytest.raises(Overloaded):
            door.enter(may_wait=True)


def test_a_lone_waiting_call_of_any_size_stands_in_line() -> None:
    door = Door(calls=1, waiting_bytes=100)
    inside = door.enter()
    large = door.enter(10_000, may_wait=True)

    door.admission.leave(inside)

    assert door.proceeded == [inside, large]


def test_leaving_twice_gives_room_back_once() -> None:
    door = Door(calls=1)
    call = door.enter()

    assert door.admission.leave(call)
    assert not door.admission.leave(call)

    door.enter()
    with pytest.raises(Overloaded):
        door.enter()


def test_who_leaves_the_line_is_never_let_in_and_lets_the_next_one_up() -> None:
    door = Door(calls=9, size_bytes=100)
    inside = door.enter(60)
    large = door.enter(50, may_wait=True)
    small = door.enter(10, may_wait=True)

    assert door.admission.leave(large)

    assert door.proceeded == [inside, small]
    assert large not in door.admission


def test_room_of_the_line_comes_back() -> None:
    door = Door(calls=1, waiting=1, waiting_bytes=100)
    inside = door.enter()
    waiting = door.enter(100, may_wait=True)

    door.admission.leave(waiting)
    again = door.enter(100, may_wait=True)
    door.admission.leave(inside)

    assert door.proceeded == [inside, again]
    assert door.enter(100, may_wait=True) in door.admission


def test_a_long_line_of_calls_that_fail_at_once_is_worked_off() -> None:
    """Each leaves while it is being let in, which must not nest."""
    admission = CallLimiter(max_calls=1, max_bytes=100, max_waiting=5000, max_waiting_bytes=5000)
    calls = [WorkerCall(1, Lane.BULK, may_wait=True) for _ in range(5000)]
    left: list[WorkerCall] = []

    def fail(call: WorkerCall) -> None:
        left.append(call)
        admission.leave(call)

    first = WorkerCall(1, Lane.BULK)
    admission.enter(first, lambda: None)
    for call in calls:
        admission.enter(call, lambda call=call: fail(call))
    admission.leave(first)

    assert left == calls
    assert len(admission) == 0
