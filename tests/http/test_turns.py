"""What waits for its turn of the event loop: the number per turn, and callers in rotation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from teimgr.http.turns import PART_UNITS, TURN_UNITS, CallTurns, LoopTurns


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
