"""What waits for its turn of the event loop: the number per turn, and callers in rotation."""

from __future__ import annotations

import asyncio
from functools import partial

from teimgr.http.turns import CallTurns


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
