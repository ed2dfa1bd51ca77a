"""What waits for its turn of the event loop: the number per turn, and callers in rotation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from threading import Event
from typing import cast

import pytest

from teimgr.http.turns import PART_UNITS, TURN_UNITS, TURNS_OF, CallTurns, LoopTurns, SharedThreads, WorkTurns


async def test_calls_beyond_those_of_a_turn_are_made_in_later_turns_by_callers_in_rotation() -> None:
    turns, made = CallTurns(2), []
    waits = [turns.call("many", partial(made.append, number)) for number in range(5)]
    waits.append(turns.call("one", partial(made.append, "one")))
    by_turn = []
    for _ in range(4):
        before = len(made)
        await asyncio.sleep(0)
        by_turn.append(made[before:])

    assert waits == [False, False, True, True, True, True]
    assert by_turn == [[2, "one"], [3, 4], [], []]
    assert not turns.call("many", partial(made.append, 6)), "nobody waits any more"


class Work:
    """Pieces of work that take a second each, by a clock of their own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done: list[str] = []

    def piece(self, name: str) -> str:
        self.seconds += 1
        self.done.append(name)
        return name

    async def of(self, caller: str, turns: WorkTurns) -> str:
        TURNS_OF.set(caller)
        return await turns.run(partial(self.piece, caller))


async def test_work_beyond_a_turns_time_is_done_in_later_turns_by_callers_in_rotation() -> None:
    work = Work()
    turns = WorkTurns(2.5, lambda: work.seconds)
    tasks = [asyncio.create_task(work.of(caller, turns)) for caller in ("many",) * 20 + ("one", "two")]
    by_turn = []
    while not all(task.done() for task in tasks):
        before = len(work.done)
        await asyncio.sleep(0)
        by_turn.append(work.done[before:])

    assert await asyncio.gather(*tasks) == ["many"] * 20 + ["one", "two"]
    assert work.done[:7] == ["many", "many", "many", "many", "one", "two", "many"]
    assert max(map(len, by_turn)) == 3


async def test_a_long_list_is_made_in_pieces_between_which_others_have_their_turns() -> None:
    work, other = Work(), Work()
    turns = WorkTurns(2.5, lambda: 0.001 * len(work.done) + other.seconds)
    listing = asyncio.create_task(turns.listed(work.piece(str(number)) for number in range(100)))
    await asyncio.sleep(0)
    assert len(work.done) == 100, "all of it is one turn's work"
    assert await listing == [str(number) for number in range(100)]

    turns = WorkTurns(0.01, lambda: 0.001 * len(work.done))
    listing = asyncio.create_task(turns.listed(work.piece(str(number)) for number in range(100)))
    by_turn = []
    while not listing.done():
        before = len(work.done)
        await asyncio.sleep(0)
        by_turn.append(len(work.done) - before)
    assert len(await listing) == sum(by_turn) == 100
    assert max(by_turn) <= 14, "a turn's milliseconds and a piece's"


async def test_work_that_fails_fails_its_caller_alone_whether_at_once_or_later() -> None:
    work = Work()
    turns = WorkTurns(1, lambda: work.seconds)

    def fail() -> None:
        work.piece("fails")
        raise ValueError("it fails")

    pieces = turns.run(fail), turns.run(partial(work.piece, "gone")), work.of("fine", turns)
    tasks = [asyncio.create_task(piece) for piece in pieces]
    with pytest.raises(ValueError, match="it fails"):
        await turns.run(fail)
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in found] == [ValueError, asyncio.CancelledError, str]
    assert work.done == ["fails", "fails", "fine"]


async def test_a_small_piece_of_work_needs_no_turn_of_the_loop() -> None:
    """One query at a time would pay for a further turn of the loop each."""
    loop, work = asyncio.get_running_loop(), Work()
    scheduled, turns = [], WorkTurns(100, lambda: work.seconds)
    real = loop.call_soon
    loop.call_soon = lambda *given, **rest: scheduled.append(given) or real(*given, **rest)  # type: ignore[method-assign]
    try:
        for _ in range(50):
            await turns.run(partial(work.piece, "small"))
        assert not scheduled
        await turns.run(partial(work.piece, "small"))
        assert len(scheduled) == 1
    finally:
        loop.call_soon = real  # type: ignore[method-assign]


class Connection:
    """Has frames of a cost each, and notes in `served` whenever one of them is processed."""

    def __init__(
        self, turns: LoopTurns, served: list[str], name: str, cost: int, frames: int, caller: str = ""
    ) -> None:
        self._turns, self._served, self._name, self._cost, self._left = turns, served, name, cost, frames
        self.done = asyncio.Event()
        turns.wait(caller, self._catch_up)

    def _catch_up(self) -> int:
        units = self._turns.units
        while self._left and self._cost <= units:
            units -= self._cost
            self._turns.spend(self._cost)
            self._left -= 1
            self._served.append(self._name)
        if not self._left:
            self.done.set()
        return self._cost if self._left else 0


async def test_what_is_spent_is_missing_until_the_next_turn() -> None:
    turns = LoopTurns()
    turns.spend(TURN_UNITS - 100)
    assert turns.units == 100
    turns.spend(150)
    assert turns.units == 0
    await asyncio.sleep(0)
    assert turns.units == TURN_UNITS


async def test_one_that_comes_while_others_wait_gets_no_more_than_a_part() -> None:
    turns, served = LoopTurns(), list[str]()
    waiting = Connection(turns, served, "a", PART_UNITS, 1)
    assert turns.units == PART_UNITS
    turns.spend(TURN_UNITS - 1)
    assert turns.units == 0
    await asyncio.wait_for(waiting.done.wait(), 10)


async def test_connections_that_are_behind_have_a_part_each_in_rotation() -> None:
    turns, served = LoopTurns(), list[str]()
    waiting = [Connection(turns, served, name, PART_UNITS, 3) for name in "abc"]
    await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in waiting)), 10)
    assert served == list("abcabcabc")


async def test_a_large_frame_gets_its_turn_among_small_ones() -> None:
    turns, served = LoopTurns(), list[str]()
    large = Connection(turns, served, "large", TURN_UNITS, 2)
    small = [Connection(turns, served, f"small {n}", PART_UNITS, 40) for n in range(20)]
    await asyncio.wait_for(large.done.wait(), 10)
    assert served.count("large") == 2
    assert sum(name != "large" for name in served) < 20 * 40
    await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in small)), 10)


async def test_a_call_now_and_then_passes_by_a_thousand_connections_with_many() -> None:
    turns, served = LoopTurns(), list[str]()
    all_began = asyncio.Event()
    many = [Connection(turns, served, "many", PART_UNITS, 20) for _ in range(1000)]
    turns.wait("", lambda: all_began.set() or 0)
    await asyncio.wait_for(all_began.wait(), 10)
    before = len(served)
    one = Connection(turns, served, "one", PART_UNITS, 1)
    await asyncio.wait_for(one.done.wait(), 10)
    assert served.index("one") - before <= TURN_UNITS // PART_UNITS
    await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in many)), 10)


async def test_a_steady_stream_of_new_ones_does_not_stop_the_old() -> None:
    turns, served = LoopTurns(), list[str]()
    old = Connection(turns, served, "old", PART_UNITS, 10)
    again: Callable[[], int]

    def again() -> int:
        turns.spend(PART_UNITS)
        if not old.done.is_set():
            turns.wait("", again)
        return 0

    for _ in range(30):
        turns.wait("", again)
    await asyncio.wait_for(old.done.wait(), 10)


async def test_callers_share_a_turn_however_many_connections_they_have() -> None:
    turns, served = LoopTurns(), list[str]()
    many = [Connection(turns, served, "many", PART_UNITS, 20, "a") for _ in range(1000)]
    busy = Connection(turns, served, "busy", PART_UNITS, 100, "b")
    await asyncio.wait_for(busy.done.wait(), 10)
    last = max(at for at, name in enumerate(served) if name == "busy")
    assert served[:last].count("many") <= 101
    await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in many)), 10)


@pytest.mark.parametrize("kind", ["work", "connections"])
async def test_a_defect_of_one_leaves_nothing_behind_it_undone(kind: str) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    done: list[int] = []

    def piece(number: int) -> int:
        if not number:
            raise ZeroDivisionError
        done.append(number)
        return 0

    if kind == "work":
        turns = WorkTurns(turn_s=0.5, clock=cast(Callable[[], float], count().__next__))
        turns.call("first", list)  # uses the turn up, as each piece does
        for number in range(3):
            turns.call(number, partial(piece, number))  # type: ignore[arg-type]
    else:
        connections = LoopTurns()
        for number in range(3):
            connections.wait(number, partial(piece, number))
    for _ in range(9):
        await asyncio.sleep(0)

    assert done == [1, 2]
    assert [type(each) for each in failures] == [ZeroDivisionError]


async def test_callers_have_shared_threads_in_rotation_and_what_is_cancelled_never_begins() -> None:
    threads, done, all_wait = SharedThreads(1, "shared"), list[str](), Event()

    def work(name: str) -> str:
        all_wait.wait(10)
        done.append(name)
        return name

    async def of(caller: str) -> str:
        TURNS_OF.set(caller)
        return await threads.run(work, caller)

    tasks = [asyncio.create_task(of(caller)) for caller in ("many",) * 20 + ("one", "gone")]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    all_wait.set()
    await asyncio.wait(tasks)

    assert done[:4] == ["many", "many", "one", "many"]
    assert len(done) == 21
    threads.close()
    with pytest.raises(RuntimeError):
        threads.submit(work, "late")


async def test_what_waits_for_a_shared_thread_is_cancelled_when_they_close() -> None:
    threads, began, goes_on = SharedThreads(1, "shared"), Event(), Event()

    def work() -> bool:
        began.set()
        return goes_on.wait(10)

    first, second = (asyncio.create_task(threads.run(work)) for _ in range(2))
    await asyncio.to_thread(began.wait, 10)
    threads.close()
    goes_on.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
