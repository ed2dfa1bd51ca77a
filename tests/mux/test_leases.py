"""Quotas at muxes of other hosts: both ends of their control links, and the real table of the daemon's host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from teimgr.control.sharing.leases import LeasesForMux
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.errors import (
    CallOverQuota,
    ConcurrentTokensExceeded,
    DailyTokensExceeded,
    TeimgrError,
    TokenRateExceeded,
    Unavailable,
)
from teimgr.http.auth.policy import Policy
from teimgr.mux.leases import LeasedCharge, LeasedMeters
from teimgr.wire.tenants.table import FILE, LEASE_S, Counter, Limits, TenantKey, TenantTable

UNDECIDED: Any = object()
KEYS = (
    TenantKey("daily", Limits(daily=10_000)),
    TenantKey("rate", Limits(rate=1, burst=1000)),
    TenantKey("open", Limits(concurrent=1000)),
    TenantKey("shadow", Limits(daily=100), shadow=True),
    TenantKey("free", weight=3, priority=2),
)


class Fleet:
    """The daemon's side, and its table as another process of the host sees it."""

    def __init__(self, folder: Path) -> None:
        self.registry = TenantRegistry(folder / "run", folder / "state.toml")
        self.policy = self.registry.configure(Policy(keys=()), KEYS)
        self.table = TenantTable(folder / "run" / FILE)
        self.numbers = {name: number for number, name in self.registry._names.items()}

    def spent(self, key: str) -> int:
        return self.table.spent(self.numbers[key]).of_day

    def in_flight(self, key: str) -> int:
        return self.table.in_flight(self.numbers[key])


class Mux:
    """A mux of another host on a control link, whose lines arrive at once while it `is_up`; it is its stream too."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.is_up = True
        self.lines: list[dict[str, Any]] = []
        self.meters = LeasedMeters()
        self.connect()

    def connect(self) -> None:
        self.leases = LeasesForMux(self, self.fleet.registry)
        self.meters.take({"terms": self.fleet.registry.terms()}, self)  # type: ignore[arg-type]

    def write(self, line: bytes) -> None:
        message = json.loads(line)
        self.lines.append(message)
        if self.is_up:
            self.leases.take(message)

    def send(self, **values: str) -> None:
        message = {name: json.loads(value) for name, value in values.items()}
        self.meters.take(message, self)  # type: ignore[arg-type]

    def disconnect(self) -> None:
        self.leases.close()
        self.meters.lost(self)  # type: ignore[arg-type]

    def call(self, key: str, tokens: int) -> tuple[LeasedCharge, list[TeimgrError | None]]:
        meter = self.meters.lease("a", "model-a")
        assert meter is not None
        charge, decisions = meter.standing(self.fleet.numbers[key]).open_account(), list[TeimgrError | None]()
        charge.charge(tokens, decisions.append)
        return charge, decisions

    def outcome(self, key: str, tokens: int) -> TeimgrError | None:
        """The decision on a call that is computed if it is admitted."""
        charge, decisions = self.call(key, tokens)
        if decisions == [None]:
            charge.settle(tokens)
        return decisions[0] if decisions else UNDECIDED

    @property
    def requests(self) -> int:
        return sum("lease" in line for line in self.lines)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    one = Fleet(tmp_path)
    yield one
    one.table.close()
    one.registry.close()


@pytest.fixture
async def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """Moves the loop's clock on, and lets the timers that are due then run."""
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead_s)

    async def move(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    return move


async def test_two_muxes_admit_a_day_to_the_token_and_ask_for_few_calls(fleet: Fleet, later: Any) -> None:
    muxes = [Mux(fleet), Mux(fleet)]
    admitted, refusals = 0, []

    for number in range(3000):
        refusal = muxes[number % 2].outcome("daily", 5)
        if refusal is None:
            admitted += 5
        else:
            refusals.append(refusal)
        if number == 1000:
            assert sum(mux.requests for mux in muxes) < 100
        if number == 2500:
            await later(LEASE_S)  # what one has leased and not used is left to the other
            await later(1)

    assert admitted == 10_000
    assert {type(each) for each in refusals} == {DailyTokensExceeded}
    assert all(each.retry_after_s for each in refusals)
    await later(LEASE_S)
    assert fleet.spent("daily") == 10_000


async def test_what_is_leased_and_not_used_is_given_back(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    for _ in range(20):
        assert mux.outcome("daily", 10) is None
    left, _ = mux.call("daily", 50)
    assert fleet.spent("daily") > 250

    left.settle(None)
    left.settle(50)  # once only
    await later(LEASE_S)
    await later(1)

    assert fleet.spent("daily") == 200


async def test_a_lease_that_is_less_than_wanted_is_not_followed_by_others_at_once(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    assert mux.outcome("daily", 4000) is None

    assert mux.requests == 1
    assert fleet.spent("daily") == 4000 + 6000 // 8
    await later(0.1)
    assert mux.outcome("daily", 500) is None
    assert mux.requests == 2


async def test_tokens_in_flight_are_those_of_all_hosts(fleet: Fleet, later: Any) -> None:
    one, other = Mux(fleet), Mux(fleet)
    charge, decisions = one.call("open", 900)
    assert decisions == [None]
    assert isinstance(other.outcome("open", 101), ConcurrentTokensExceeded)
    assert isinstance(other.outcome("open", 1001), CallOverQuota)

    charge.settle(900)
    await later(LEASE_S)
    await later(1)

    assert fleet.in_flight("open") == 0
    assert other.outcome("open", 1000) is None


async def test_a_rate_is_that_of_all_hosts_and_the_wait_is_true(fleet: Fleet) -> None:
    muxes = [Mux(fleet), Mux(fleet)]
    decisions = [muxes[number % 2].outcome("rate", 100) for number in range(30)]

    admitted = decisions.count(None)
    assert 8 <= admitted <= 10  # what is leased at one is not the other's
    refused = decisions[-1]
    assert isinstance(refused, TokenRateExceeded)
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s <= 100


async def test_without_the_daemon_what_is_leased_ends_and_then_calls_are_refused(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    for _ in range(30):
        assert mux.outcome("daily", 10) is None
    spent = fleet.spent("daily")
    mux.disconnect()

    by_lease = [mux.call("daily", 10)[1] for _ in range(100)]
    assert 0 < by_lease.count([None]) * 10 <= spent - 300
    assert [] in by_lease  # until the next daemon comes
    _, shadow = mux.call("shadow", 10)
    await later(1)
    refusal = by_lease[-1][0]
    assert isinstance(refusal, Unavailable)
    assert refusal.retry_after_s
    assert shadow == [None]
    _, late = mux.call("daily", 10)
    await later(0)
    assert isinstance(late[0], Unavailable)  # at once

    await later(LEASE_S)
    assert fleet.spent("daily") == spent  # lost, and no more
    mux.connect()
    assert mux.outcome("daily", 10) is None


async def test_the_next_daemon_decides_on_calls_that_wait(fleet: Fleet) -> None:
    mux = Mux(fleet)
    mux.is_up = False
    _, decisions = mux.call("daily", 10)
    mux.disconnect()
    assert decisions == []

    mux.is_up = True
    mux.connect()

    assert decisions == [None]


async def test_a_mux_that_dies_holds_tokens_in_flight_until_its_leases_end(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    _, decisions = mux.call("open", 600)
    assert decisions == [None]
    mux.leases.close()
    assert fleet.in_flight("open") >= 600

    await later(LEASE_S)

    assert fleet.in_flight("open") == 0


async def test_an_answer_that_comes_too_late_gives_all_back(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    mux.is_up = False
    _, decisions = mux.call("daily", 10)
    await later(1)
    assert isinstance(decisions[0], Unavailable)

    mux.leases.take(mux.lines[0])
    mux.is_up = True
    assert fleet.spent("daily") >= 10
    await later(1)

    assert fleet.spent("daily") == 0


async def test_each_call_waits_its_own_time_for_a_decision(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    mux.is_up = False
    _, first = mux.call("daily", 10)
    _, shadow = mux.call("shadow", 10)
    await later(0.9)
    _, second = mux.call("daily", 20)
    await later(0.2)
    assert isinstance(first[0], Unavailable)
    assert shadow == [None]
    assert second == []  # asked again, as the daemon has not answered the request before

    mux.is_up = True
    for line in mux.lines:
        if "lease" in line:
            mux.leases.take(line)
    await later(LEASE_S)
    await later(1)

    assert second == [None]
    assert len(first) == 1
    assert fleet.spent("daily") == 20


@pytest.mark.parametrize("answer", [[[], 0], [[None, None], 0], [[[7]], 0], [[None], -1], [[None], "many"]])
async def test_an_answer_that_does_not_fit_its_request_decides_nothing(
    fleet: Fleet, later: Any, answer: list[Any]
) -> None:
    mux = Mux(fleet)
    mux.is_up = False
    _, decisions = mux.call("daily", 10)
    number = mux.lines[0]["lease"][0]

    with pytest.raises((ValueError, TypeError)):
        mux.send(leased=json.dumps([number, *answer]))
    mux.disconnect()  # what its server does then
    assert decisions == []

    mux.is_up = True
    mux.connect()
    assert decisions == [None]


async def test_a_caller_who_left_before_the_decision_is_charged_nothing(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    mux.is_up = False
    asked, decisions = mux.call("daily", 10)
    waiting, others = mux.call("daily", 20)
    waiting.settle(None)
    asked.settle(None)
    assert others == [None]  # its worker waits for it

    mux.is_up = True
    mux.leases.take(mux.lines[0])
    await later(LEASE_S)
    await later(1)

    assert decisions == [None]
    assert fleet.spent("daily") == 0


async def test_a_shadow_passes_and_use_is_counted_by_the_daemon(fleet: Fleet, later: Any) -> None:
    mux = Mux(fleet)
    charges = [mux.call("shadow", 60) for _ in range(2)]
    assert [(charge.is_shadowed, decisions) for charge, decisions in charges] == [(False, [None]), (True, [None])]
    meter = mux.meters.lease("a", "model-a")
    assert meter is not None
    assert meter.standing(fleet.numbers["free"]).share == (3, 2)
    assert not meter.standing(fleet.numbers["free"]).has_quota
    mux.disconnect()
    meter.count(fleet.numbers["free"], Counter.TOKENS, 7)
    mux.connect()
    meter.count(fleet.numbers["free"], Counter.CALLS)
    await later(1)

    [row] = fleet.registry.usage()
    assert row[:6] == ("free", "a", "model-a", 7, 0, 1)
    assert fleet.registry.callers("a") == {fleet.numbers["free"]: 7}


async def test_terms_are_another_object_once_they_have_changed(fleet: Fleet) -> None:
    mux = Mux(fleet)
    meter = mux.meters.lease("a", "model-a")
    assert meter is not None
    daily, free = (meter.standing(fleet.numbers[key]) for key in ("daily", "free"))

    fleet.registry.configure(fleet.policy, [TenantKey("free", weight=3, priority=2)])
    mux.connect()

    assert meter.standing(fleet.numbers["free"]) is free
    assert not meter.standing(fleet.numbers["daily"]).has_quota
    assert daily.has_quota


def test_nothing_is_charged_before_a_daemon_that_leases_has_come() -> None:
    meters = LeasedMeters()
    meters.take({"policy": {}, "snapshot": []}, None)  # type: ignore[arg-type]
    assert not meters.is_on
    assert meters.lease("a", "model-a") is None
