"""Turns of the event loop that connections share."""

from __future__ import annotations

import asyncio

from teimgr.http.http2.loop_turns import MIN_UNITS, TURN_UNITS, LoopTurns


async def test_what_is_spent_is_missing_until_the_next_turn_but_for_the_least_part() -> None:
    turns = LoopTurns()
    turns.spend(MIN_UNITS)
    assert turns.units == TURN_UNITS, "small calls cost nothing"

    turns.spend(TURN_UNITS - 100)
    assert turns.units == 100
    turns.spend(100)
    assert turns.units == MIN_UNITS
    await asyncio.sleep(0)
    assert turns.units == TURN_UNITS


async def test_connections_that_are_behind_have_a_turn_each_in_order() -> None:
    turns, served = LoopTurns(), []
    done = asyncio.Event()

    def working(name: str, frames: int) -> None:
        left = frames

        def catch_up() -> bool:
            nonlocal left
            served.append((name, turns.units))
            if turns.units < TURN_UNITS:
                return True  # its frame needs a whole turn
            left -= 1
            turns.spend(TURN_UNITS)
            if name == "a" and not left:
                done.set()
            return left > 0

        turns.wait(catch_up)

    working("a", 3)
    working("b", 2)
    await asyncio.wait_for(done.wait(), 10)

    assert [name for name, units in served if units == TURN_UNITS] == ["a", "b", "a", "b", "a"]
