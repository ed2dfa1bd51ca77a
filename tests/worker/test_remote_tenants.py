"""Charges and counts between a worker and the host that admitted its callers: both ends, and the real table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teimgr.errors import ConcurrentTokensExceeded, DailyTokensExceeded, TeimgrError, Unavailable
from teimgr.wire.frames import FrameType, Header
from teimgr.wire.tenants.remote import CHARGE, COUNT, SETTLE, EntryDesk, Note
from teimgr.wire.tenants.table import COUNTERS, FILE, Counter, Limits, TenantKey, TenantTable
from teimgr.worker.remote_tenants import RemoteAccount, RemoteMeter
from teimgr.worker.tenant_meter import EntryMeters

NO_ANSWER: Any = object()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[TenantTable]:
    table = TenantTable(tmp_path / FILE)
    yield table
    table.close()


class Link:
    """Both ends of a link, whose frames arrive at once, or when `held` ones are let go."""

    def __init__(self, folder: Path) -> None:
        self.meters = EntryMeters(folder / FILE)
        self.desk = EntryDesk(self.meters, "a", "model-a", self._to_worker)
        self.meter = RemoteMeter(self._to_entry)
        self.held: list[tuple[Header, bytes]] | None = None
        self.terms = 0

    def account(self, tenant: int) -> RemoteAccount:
        self.desk.introduce(tenant)
        standing = self.meter.standing(tenant)
        assert standing.has_quota
        return standing.open_account()

    async def charge(self, account: RemoteAccount, tokens: int) -> TeimgrError | None:
        decisions: list[TeimgrError | None] = []
        account.charge(tokens, decisions.append)
        await asyncio.sleep(0)
        return decisions[0] if decisions else NO_ANSWER

    def let_go(self) -> None:
        held, self.held = self.held or [], None
        for header, payload in held:
            self.desk.received(header, payload)

    def _to_worker(self, type: FrameType, method: int, id: int, payload: bytes = b"", **more: int) -> None:
        self.terms += method == 1
        self.meter.received(
            Header(len(payload), type, method, more.get("flags", 0), id, more.get("deadline_ms", 0), 0), payload
        )

    def _to_entry(self, type: FrameType, method: int, id: int, payload: bytes = b"") -> None:
        frame = Header(len(payload), type, method, 0, id, 0, 0), payload
        if self.held is None:
            self.desk.received(*frame)
        else:
            self.held.append(frame)


async def settled(account: RemoteAccount, computed: int | None) -> None:
    account.settle(computed)
    account.settle(0)  # once only
    await asyncio.sleep(0)


async def test_a_day_is_exact_and_what_is_not_computed_is_refunded_once(tmp_path: Path, table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(daily=100, concurrent=95), weight=7, priority=2)]).values()
    link = Link(tmp_path)
    first, second, third = (link.account(tenant) for _ in range(3))
    assert link.meter.standing(tenant).share[1:] == (7, 2)
    assert link.terms == 1

    assert await link.charge(first, 90) is None
    assert isinstance(await link.charge(second, 6), ConcurrentTokensExceeded)
    await settled(second, 0)
    first.took(30)
    await settled(first, None)
    assert (table.spent(tenant).of_day, table.in_flight(tenant)) == (30, 0)
    refusal = await link.charge(third, 71)
    assert isinstance(refusal, DailyTokensExceeded)
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s > 0
    assert table.spent(tenant).of_day == 30


async def test_a_caller_who_left_before_the_charge_is_charged_nothing(tmp_path: Path, table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(daily=100))]).values()
    link = Link(tmp_path)
    before, between = link.account(tenant), link.account(tenant)

    await settled(before, None)
    assert await link.charge(before, 60) is None
    link.held = []
    assert await link.charge(between, 60) is NO_ANSWER
    await settled(between, None)
    link.let_go()
    assert table.spent(tenant).of_day == 0


async def test_a_lost_link_refunds_and_keeps_nothing_waiting_nor_a_row(tmp_path: Path, table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(concurrent=100))]).values()
    link, other = Link(tmp_path), Link(tmp_path)
    charged, waiting = link.account(tenant), link.account(tenant)
    assert await link.charge(charged, 60) is None
    link.held, decisions = [], []
    waiting.charge(20, decisions.append)
    await asyncio.sleep(0)

    link.meter.close()
    link.desk.close()
    assert [type(each) for each in decisions] == [Unavailable]
    assert table.in_flight(tenant) == 0
    await settled(charged, 60)
    late = RemoteAccount(link.meter, tenant)
    assert isinstance(await link.charge(late, 20), Unavailable)
    assert [has_ended for _, _, has_ended in table.rows()] == [True]
    other.desk.close()  # it had no call


async def test_a_shadow_refuses_nothing_and_a_removed_quota_charges_nothing(tmp_path: Path, table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(daily=10), shadow=True)]).values()
    link = Link(tmp_path)
    over, later = link.account(tenant), link.account(tenant)
    assert await link.charge(over, 11) is None
    assert over.is_shadowed

    table.configure([TenantKey("one")])
    assert await link.charge(later, 11) is None
    assert not later.is_shadowed
    link.desk.introduce(tenant)
    assert (link.meter.standing(tenant).has_quota, link.terms) == (False, 2)


async def test_use_is_counted_in_the_row_of_the_instance(tmp_path: Path, table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one")]).values()
    link, second = Link(tmp_path), EntryMeters(tmp_path / "none")
    link.meter.answered(tenant, 1, 1, 1)  # whose terms never came
    link.desk.introduce(tenant)
    link.meter.answered(tenant, 11, 2, 1)
    link.meter.count(tenant, Counter.REFUSED)

    [(_, row, has_ended)] = table.rows()
    assert (row.instance, row.model, row.counts, has_ended) == ("a", "model-a", {tenant: (11, 2, 1, 1, 0)}, False)
    assert second.lease("a", "model-a") is None  # no key is required there


async def test_a_meter_is_shared_by_the_links_to_an_instance(tmp_path: Path, table: TenantTable) -> None:
    table.configure([TenantKey("one")])
    meters = EntryMeters(tmp_path / FILE)
    assert meters.lease("a", "m") is meters.lease("a", "m")
    assert meters.lease("b", "m") is not meters.lease("a", "m")

    meters.give_back("a", "m")
    meters.give_back("a", "m")
    assert [has_ended for _, _, has_ended in table.rows()] == [False, False]
    meters.give_back("a", "m")
    assert sorted(has_ended for _, _, has_ended in table.rows()) == [False, True]


async def test_a_host_that_lies_about_its_tokens_lifts_no_quota(tmp_path: Path, table: TenantTable) -> None:
    numbers = table.configure([TenantKey("one", Limits(daily=100)), TenantKey("two", Limits(daily=100))])
    link = Link(tmp_path)
    account = link.account(numbers["one"])
    assert await link.charge(account, 90) is None

    for note, payload in (
        (Note.SETTLE, SETTLE.pack(-500)),
        (Note.CHARGE, CHARGE.pack(numbers["one"], -500)),
        (Note.CHARGE, CHARGE.pack(numbers["one"], 2**32)),  # 0 as C's int
        (Note.CHARGE, CHARGE.pack(numbers["two"], 1)),  # which has not called
        (Note.COUNT, COUNT.pack(numbers["one"], *[-1] * COUNTERS)),
        (Note.COUNT, COUNT.pack(numbers["two"], *[1] * COUNTERS)),
    ):
        with pytest.raises(ValueError, match=r"tokens|sent no call"):
            link.desk.received(Header(len(payload), FrameType.TENANT, note, 0, 1, 0, 0), payload)
    assert table.spent(numbers["one"]).of_day in (0, 90)
