"""Quotas by brute force: whatever is charged and refunded, no window has more tokens than the bucket allows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from teimgr.errors import Code
from teimgr.wire.tenants.table import (
    LEASE_S,
    MAX_TOKENS,
    NS_PER_S,
    Limits,
    Receipt,
    Spent,
    charge,
    lease_given,
    lease_wanted,
    may_pass,
    mean_use,
    refund,
    remaining,
    room,
)

DAY = 20_000


class Calls:
    """A bucket and the calls that it admitted: moment and tokens that were not refunded."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.spent = Spent()
        self.admitted: list[list[int]] = []
        self.open: list[tuple[int, Receipt]] = []

    def call(self, tokens: int, now_ns: int) -> bool:
        verdict = charge(self.limits, self.spent, 0, tokens, now_ns, DAY)
        self.spent = verdict.spent
        if verdict.refused_by is None:
            self.open.append((len(self.admitted), verdict.receipt))
            self.admitted.append([now_ns, tokens])
        return verdict.refused_by is None

    def give_back(self, place: int, part: float, now_ns: int) -> None:
        number, receipt = self.open.pop(place)
        tokens = int(receipt.tokens * part)
        self.spent = refund(self.spent, receipt, tokens, now_ns)
        self.admitted[number][1] -= tokens

    def most_over(self, late_s: float = 0) -> int:
        """Tokens above what is allowed, in the worst of all windows, where they are used up to `late_s` later."""
        worst = 0
        for first in range(len(self.admitted)):
            tokens = 0
            for now_ns, count in self.admitted[first:]:
                tokens += count
                seconds = (now_ns - self.admitted[first][0]) / NS_PER_S + late_s
                worst = max(worst, int(tokens - self.limits.burst - seconds * self.limits.rate))
        return worst


def moments(draw: random.Random, count: int) -> Iterator[int]:
    now_ns = 10**15
    for _ in range(count):
        now_ns += draw.choice((0, 1, draw.randrange(10**6), draw.randrange(10**9)))
        yield now_ns


@pytest.mark.parametrize("seed", range(20))
def test_no_window_has_a_token_too_many_whatever_is_refunded(seed: int) -> None:
    draw = random.Random(seed)
    calls = Calls(Limits(draw.choice((3, 100, 7777)), draw.choice((50, 1000))))

    for now_ns in moments(draw, 300):
        if calls.open and draw.random() < 0.4:
            calls.give_back(draw.randrange(len(calls.open)), draw.random(), now_ns)
        else:
            calls.call(draw.randrange(1, 60), now_ns)

    assert len(calls.admitted) > 20
    assert calls.most_over() == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_quick_check_turns_down_only_what_a_charge_refuses(seed: int) -> None:
    draw, refused = random.Random(seed), 0
    limits = Limits(draw.choice((3, 100, 7777)), draw.choice((50, 1000)), draw.choice((0, 2000)))
    spent = Spent()

    for now_ns in moments(draw, 300):
        tokens = draw.randrange(1, 90)
        passes = may_pass(limits, spent.arrival_ns, spent.of_day, tokens, now_ns)
        verdict = charge(limits, spent, 0, tokens, now_ns, DAY)
        refused += verdict.refused_by is not None
        assert passes or verdict.refused_by is not None
        assert not passes or verdict.refused_by is None or tokens > limits.burst
        spent = verdict.spent

    assert 0 < refused < 300


def test_a_bucket_admits_all_that_it_may() -> None:
    calls = Calls(Limits(rate=100, burst=1000))

    assert [calls.call(100, 10**15) for _ in range(11)] == [True] * 10 + [False]
    assert [calls.call(50, 10**15 + NS_PER_S) for _ in range(3)] == [True, True, False]


def test_the_wait_is_the_true_one() -> None:
    limits, now_ns = Limits(rate=30, burst=100), 10**15
    spent = charge(limits, Spent(), 0, 90, now_ns, DAY).spent
    refused = charge(limits, spent, 0, 31, now_ns, DAY)

    assert refused.refused_by is Code.TOKEN_RATE_EXCEEDED
    assert refused.wait_ns == pytest.approx(21 / 30 * NS_PER_S, abs=2)
    assert charge(limits, refused.spent, 0, 31, now_ns + refused.wait_ns - 1, DAY).refused_by is not None
    assert charge(limits, refused.spent, 0, 31, now_ns + refused.wait_ns, DAY).refused_by is None


def test_a_call_larger_than_a_quota_is_never_admitted() -> None:
    for limits in (Limits(rate=10, burst=99), Limits(daily=99), Limits(concurrent=99)):
        assert charge(limits, Spent(), 0, 100, 10**15, DAY).refused_by is not None
        assert charge(limits, Spent(), 0, 99, 10**15, DAY).refused_by is None


def test_what_was_refunded_at_once_may_be_used_again() -> None:
    calls = Calls(Limits(rate=1, burst=100))

    assert calls.call(100, 10**15)
    assert not calls.call(100, 10**15)
    calls.give_back(0, 1.0, 10**15)
    assert calls.call(100, 10**15)


def test_tokens_of_a_day_end_with_it_and_so_does_their_refund() -> None:
    limits, now_ns = Limits(daily=100), 10**15
    first = charge(limits, Spent(), 0, 100, now_ns, DAY)

    assert charge(limits, first.spent, 0, 1, now_ns, DAY).refused_by is Code.DAILY_TOKENS_EXCEEDED
    assert charge(limits, refund(first.spent, first.receipt, 30, now_ns), 0, 30, now_ns, DAY).refused_by is None
    next_day = charge(limits, first.spent, 0, 60, now_ns, DAY + 1)
    assert next_day.refused_by is None
    assert refund(next_day.spent, first.receipt, 100, now_ns).of_day == 60


def test_a_clock_that_goes_back_across_midnight_gives_no_second_quota() -> None:
    limits, now_ns = Limits(daily=100), 10**15
    of_the_day = charge(limits, Spent(day=DAY, of_day=100), 0, 60, now_ns, DAY + 1)

    late = charge(limits, of_the_day.spent, 0, 40, now_ns, DAY)
    assert late.refused_by is None
    assert late.spent == Spent(day=DAY + 1, of_day=100)
    assert charge(limits, late.spent, 0, 1, now_ns, DAY + 1).refused_by is Code.DAILY_TOKENS_EXCEEDED
    assert charge(limits, late.spent, 0, 1, now_ns, DAY).refused_by is Code.DAILY_TOKENS_EXCEEDED
    assert room(limits, late.spent, 0, now_ns, DAY) == 0
    assert refund(late.spent, late.receipt, 40, now_ns).of_day == 60
    assert charge(limits, late.spent, 0, 100, now_ns, DAY - 1).refused_by is None  # it was a day and more ahead


def test_lower_limits_count_at_once_and_a_full_bucket_says_so() -> None:
    generous, now_ns = Limits(rate=1, burst=1000), 10**15
    spent = charge(generous, Spent(), 0, 1000, now_ns, DAY).spent

    assert remaining(1000, 1, spent.arrival_ns, now_ns) == (0, 1000 * NS_PER_S)
    assert remaining(1000, 1, spent.arrival_ns, now_ns + 10 * NS_PER_S + 1) == (10, 990 * NS_PER_S - 1)
    assert remaining(500, 1, spent.arrival_ns, now_ns) == (0, 500 * NS_PER_S)  # of a burst that is less now
    assert remaining(1000, 1, 0, now_ns) == (1000, 0)
    assert charge(Limits(rate=10, burst=20), spent, 0, 20, now_ns + 2 * NS_PER_S, DAY).wait_ns == 2 * NS_PER_S


@pytest.mark.parametrize("seed", range(20))
def test_leases_of_several_hosts_pass_a_quota_by_what_is_used_late_at_most(seed: int) -> None:
    """Each lease is charged at once, used in pieces until its end, and its rest is given back then."""
    draw = random.Random(seed)
    calls = Calls(Limits(draw.choice((3, 100, 7777)), draw.choice((50, 1000))))
    used = Calls(calls.limits)
    leases: list[tuple[int, int]] = []  # until when, and its place

    for now_ns in moments(draw, 400):
        for until_ns, place in [lease for lease in leases if draw.random() < 0.3 or lease[0] < now_ns]:
            leases.remove((until_ns, place))
            part = draw.random()
            used.admitted.append([min(now_ns, until_ns), int(calls.open[place][1].tokens * part)])
            _, receipt = calls.open[place]
            calls.spent = refund(calls.spent, receipt, receipt.tokens - used.admitted[-1][1], now_ns)
        if calls.call(draw.randrange(1, 60), now_ns):
            leases.append((now_ns + int(LEASE_S * NS_PER_S), len(calls.open) - 1))

    used.admitted.sort()
    assert len(used.admitted) > 20
    assert used.most_over(LEASE_S) == 0


def test_a_lease_is_what_a_tenant_uses_of_late_and_a_part_of_what_its_quotas_have_left() -> None:
    use = 0.0
    for _ in range(1000):  # a hundred times a second
        use = mean_use(use, 0.01, 10)
    assert use == pytest.approx(1000, rel=0.02)
    assert mean_use(use, 3600.0, 0) < 1

    assert lease_wanted(1000.0, 0) == 500
    assert lease_wanted(1000.0, 249) == 251
    assert lease_wanted(1000.0, 250) == lease_wanted(0.0, 0) == 0
    assert lease_wanted(8.0 * MAX_TOKENS, 0) == MAX_TOKENS  # more would end the link to the daemon
    assert [lease_given(500, left) for left in (80_000, 800, 8, 7, 0)] == [500, 100, 1, 0, 0]


def test_the_room_is_that_of_the_narrowest_quota() -> None:
    now_ns = 10**15
    verdict = charge(Limits(100, 1000), Spent(), 0, 400, now_ns, DAY)
    spent = verdict.spent._replace(day=DAY, of_day=300)
    assert room(Limits(100, 1000), spent, 0, now_ns, DAY) == 600
    assert room(Limits(100, 1000, 850), spent, 0, now_ns, DAY) == 550
    assert room(Limits(100, 1000, 850), spent, 0, now_ns, DAY + 1) == 600
    assert room(Limits(100, 1000, 850, 500), spent, 450, now_ns, DAY) == 50
    assert room(Limits(0, 0, 250), spent, 0, now_ns, DAY) == room(Limits(), spent, 0, now_ns, DAY) == 0
