"""Budgets of bytes: order, a single large taker, and shares of one budget."""

from __future__ import annotations

import asyncio

import pytest

from teimgr.errors import Overloaded
from teimgr.http.byte_budget import ByteBudget, Charge, UnreadReplies


async def test_a_cancelled_wait_for_room_gives_its_place_to_the_next() -> None:
    budget = ByteBudget(10)
    await budget.take(8)
    large = asyncio.create_task(budget.take(9))
    small = asyncio.create_task(budget.take(2))
    await asyncio.sleep(0)
    assert not budget.try_take(1), "nobody overtakes those who wait"

    large.cancel()
    await small

    assert budget.taken_bytes == 10


async def test_waiters_cancelled_together_leave_nothing_behind() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    waiting = [asyncio.create_task(budget.take(5)) for _ in range(3)]
    await asyncio.sleep(0)

    for each in waiting:
        each.cancel()
    budget.give_back(10)
    await asyncio.gather(*waiting, return_exceptions=True)

    assert all(each.cancelled() for each in waiting)
    assert budget.taken_bytes == 0


async def test_one_taker_alone_fits_however_large() -> None:
    budget = ByteBudget(10)

    await budget.take(1_000)
    waiting = asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    budget.give_back(1_000)
    await waiting

    assert budget.taken_bytes == 1


async def test_a_share_that_is_full_leaves_room_for_its_siblings() -> None:
    whole = ByteBudget(10)
    greedy, modest = ByteBudget(4, whole), ByteBudget(4, whole)
    await greedy.take(4)
    waiting = asyncio.create_task(greedy.take(4))

    await modest.take(4)

    assert not waiting.done()
    greedy.give_back(4)
    modest.give_back(4)
    await waiting
    assert (whole.taken_bytes, greedy.taken_bytes, modest.taken_bytes) == (4, 4, 0)


async def test_a_wait_for_the_whole_that_is_cancelled_returns_the_share() -> None:
    whole = ByteBudget(10)
    share = ByteBudget(10, whole)
    await whole.take(10)

    with pytest.raises(Overloaded):
        await Charge(share).take(5, wait_s=0.01)

    assert share.taken_bytes == 0
    whole.give_back(10)
    assert share.try_take(10)


async def test_what_is_in_memory_already_is_charged_beyond_the_limit() -> None:
    budget = ByteBudget(10)
    charge = Charge(budget)

    await charge.take(8, wait_s=1)
    charge.add(8)
    assert not budget.try_take(1)
    charge.release()

    assert budget.taken_bytes == charge.bytes == 0


async def test_unread_replies_hold_up_the_calls_of_their_connection_until_they_are_read() -> None:
    of_all = ByteBudget(40)
    one, other = UnreadReplies(of_all, 4), UnreadReplies(of_all, 4)
    one.charge(15)
    assert not one.has_room
    assert other.has_room
    with pytest.raises(Overloaded, match="unread reply bytes"):
        await one.room(0.01)

    waiting = asyncio.create_task(one.room(60))
    await asyncio.sleep(0)
    one.give_back(5)
    await waiting
    assert one.has_room
    assert (one.taken_bytes, of_all.taken_bytes) == (10, 10)


async def test_beyond_what_all_may_hold_a_connection_waits_until_it_has_read_all() -> None:
    of_all = ByteBudget(40)
    *others, one, reader = (UnreadReplies(of_all, 4) for _ in range(6))
    for each in (*others, one):
        each.charge(9)
    assert of_all.taken_bytes == 45
    assert reader.has_room, "it has read all"
    assert not one.has_room
    waiting = asyncio.create_task(one.room(60))
    await asyncio.sleep(0)

    one.give_back(8)
    await asyncio.sleep(0)
    assert not waiting.done()
    one.give_back(1)
    await waiting
    assert of_all.taken_bytes == 36
