"""Charges by several processes and threads at once, and the ledger without the native library."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teimgr.engine.job import InferOptions, Lane
from teimgr.errors import CallOverQuota, ConcurrentTokensExceeded, DailyTokensExceeded, TeimgrError, TokenRateExceeded
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.spec import WorkerSpec
from teimgr.wire.tenants.table import (
    FILE,
    NS_PER_S,
    TENANT_WORDS,
    USED_ROWS_AT,
    Counter,
    Limits,
    TenantKey,
    TenantTable,
    tenant_at,
)
from teimgr.worker.calls import CallReply, Part, Submission, WorkerCall
from teimgr.worker.tenant_meter import Account, LockedTill, NativeTill, TenantMeter, Tenants, Till, open_meter

DAY = 20_000
CHARGE = """
import json, sys
from pathlib import Path
from teimgr.worker.tenant_meter import Account, open_meter
def account_of(meter, tenant):
    standing = meter.standing(tenant)
    return Account(standing, standing.till)
meter = open_meter(Path(sys.argv[1]), "a", "m")
print("ready", flush=True)
sys.stdin.readline()
admitted, open_ones = 0, []
for number in range(4000):
    account = account_of(meter, int(sys.argv[2]))
    if account.charge(7) is None:
        admitted += 7
        if number % 3:
            account.settle(7)
        else:
            open_ones.append(account)
        if number % 10 == 9 and open_ones:
            open_ones.pop().settle(0)
            admitted -= 7
print(admitted, flush=True)
sys.stdin.readline()
"""


def test_the_callers_of_an_instance_are_those_that_its_rows_have_tokens_of(tmp_path: Path) -> None:
    table = TenantTable(tmp_path / FILE)
    numbers = table.configure([TenantKey("one"), TenantKey("two")])
    meters = {name: open_meter(tmp_path / FILE, name, "m") for name in ("a", "ab", "c")}
    again = open_meter(tmp_path / FILE, "a", "m")
    for meter, key, tokens in (
        *((meters["a"], "one", 3), (again, "one", 4), (again, "two", 5)),
        *((meters["ab"], "two", 7), (meters["c"], "one", 0)),
    ):
        assert meter is not None
        meter.answered(numbers[key], tokens, 1, 1)
    found = {name: table.callers(name) for name in ("a", "ab", "c", "b")}
    assert found == {"a": {numbers["one"]: 7, numbers["two"]: 5}, "ab": {numbers["two"]: 7}, "c": {}, "b": {}}


@pytest.fixture
def table(tmp_path: Path) -> Any:
    table = TenantTable(tmp_path / FILE)
    yield table
    table.close()


def account_of(meter: TenantMeter, tenant: int) -> Account:
    standing = meter.standing(tenant)
    assert standing.till is not None
    return Account(standing, standing.till)


def till_in(table: TenantTable, kind: type[Till], tenant: int) -> Till:
    row = table.claim("a", "model-a")
    assert row is not None
    return kind(table, row, tenant, is_in_flight=True)


def meter_of(path: Path) -> TenantMeter:
    meter = open_meter(path, "a", "model-a")
    assert meter is not None
    return meter


def test_four_processes_admit_exactly_the_tokens_of_a_day(tmp_path: Path, table: TenantTable) -> None:
    limit = 7 * 3001
    (tenant,) = table.configure([TenantKey("one", Limits(daily=limit))]).values()
    command = [sys.executable, "-c", CHARGE, str(tmp_path / FILE), str(tenant)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        admitted = sum([int(process.stdout.readline()) for process in processes])
        assert admitted == limit
        assert table.spent(tenant).of_day == limit
    finally:
        for process in processes:
            process.communicate()


@pytest.mark.parametrize("is_native", [True, False])
def test_threads_in_two_rows_stay_within_every_quota(table: TenantTable, tmp_path: Path, is_native: bool) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(rate=1, burst=900, concurrent=300))]).values()
    other = TenantTable(tmp_path / FILE)
    kind = NativeTill if is_native else LockedTill
    tills = [till_in(one, kind, tenant) for one in (table, other)]
    lock, now_ns = threading.Lock(), 10**15
    in_flight = most = admitted = 0

    def call(number: int) -> None:
        nonlocal in_flight, most, admitted
        till, tokens = tills[number % 2], 1 + number % 5
        slip = till.new()
        if till.charge_at(slip, tokens, now_ns, DAY):
            return
        with lock:
            in_flight += tokens
            admitted += tokens
            most = max(most, in_flight)
        time.sleep(0)
        with lock:
            in_flight -= tokens
        till.refund_at(slip, 0, now_ns)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(2000)))
    assert 0 < most <= 300
    assert 895 < admitted <= 900
    assert table.in_flight(tenant) == 0
    other.close()


def test_a_refund_by_the_library_is_one_change_so_that_no_charge_sees_half_of_it(table: TenantTable) -> None:
    (tenant,) = table.configure([TenantKey("one", Limits(rate=1, burst=900))]).values()
    till, now_ns = till_in(table, NativeTill, tenant), 10**15
    slip = till.new()
    for _ in range(2):
        assert till.charge_at(slip, 100, now_ns, DAY) == 0
        words = table.words[tenant_at(tenant) : tenant_at(tenant) + TENANT_WORDS]
        before = words.tolist()
        till.refund_at(slip, 100, now_ns)
        assert [one == other for one, other in zip(before, words, strict=True)].count(False) == 1
    spent = table.spent(tenant)
    assert (spent.arrival_ns, spent.refunded_ns) == (now_ns, 200 * NS_PER_S)


def test_the_library_decides_as_the_policy_does(tmp_path: Path) -> None:
    draw = random.Random(7)
    tables = [TenantTable(tmp_path / name) for name in ("native", "python")]
    keys = [TenantKey("one", Limits(rate=777, burst=5000, daily=9000, concurrent=6000))]
    tenants = [table.configure(keys)["one"] for table in tables]
    kinds: tuple[type[Till], ...] = (NativeTill, LockedTill)
    tills = [till_in(table, kind, tenant) for kind, table, tenant in zip(kinds, tables, tenants, strict=True)]
    now_ns, day, charges = 10**15, DAY, []
    refused = set()

    for _ in range(1500):
        now_ns += draw.randrange(NS_PER_S)
        day += draw.choices((0, 1, -1, -2), (980, 12, 6, 2))[0]
        if charges and draw.random() < 0.4:
            slips, tokens = charges.pop(draw.randrange(len(charges)))
            back = draw.choice((0, tokens, draw.randrange(tokens + 1)))
            for till, slip in zip(tills, slips, strict=True):
                till.refund_at(slip, back, now_ns)
        else:
            tokens = draw.choice((1, 50, 700, 5001))
            slips = [till.new() for till in tills]
            found = [till.charge_at(slip, tokens, now_ns, day) for till, slip in zip(tills, slips, strict=True)]
            assert found[0] == found[1]
            refused.add(found[0])
            if not found[0]:
                charges.append((slips, tokens))
            elif found[0] == 1:
                assert len({till.wait_ns(slip) for till, slip in zip(tills, slips, strict=True)}) == 1
        spent = [table.spent(tenant) for table, tenant in zip(tables, tenants, strict=True)]
        assert spent[0][:2] == spent[1][:2]
        assert spent[0][2:] == spent[1][2:]
        assert tables[0].in_flight(tenants[0]) == tables[1].in_flight(tenants[1])
    assert len(refused) == 4  # each quota, and none
    for table in tables:
        table.close()


def test_the_refusal_says_which_quota_and_for_how_long(tmp_path: Path, table: TenantTable) -> None:
    keys = [
        TenantKey("rate", Limits(rate=10, burst=100)),
        TenantKey("day", Limits(daily=100)),
        TenantKey("concurrent", Limits(concurrent=100)),
        TenantKey("free"),
    ]
    tenants, meter = table.configure(keys), meter_of(tmp_path / FILE)
    for name, kind in (
        ("rate", TokenRateExceeded),
        ("day", DailyTokensExceeded),
        ("concurrent", ConcurrentTokensExceeded),
    ):
        first, second, third = (account_of(meter, tenants[name]) for _ in range(3))
        assert first.charge(60) is None
        refusal = second.charge(60)
        assert isinstance(refusal, kind)
        assert "Requested 60" in refusal.message
        assert isinstance(third.charge(101), CallOverQuota)
        assert refusal.retry_after_s is None or refusal.retry_after_s > 1.5
    assert meter.standing(tenants["free"]).till is None


def test_what_was_not_taken_is_refunded_when_the_caller_leaves(tmp_path: Path, table: TenantTable) -> None:
    tenants, meter = table.configure([TenantKey("one", Limits(daily=100))]), meter_of(tmp_path / FILE)
    account = account_of(meter, tenants["one"])
    assert account.charge(90) is None
    account.took(30)
    account.settle(None)
    account.settle(0)  # once only

    assert table.spent(tenants["one"]).of_day == 30
    assert account.charge(50) is None  # its caller has gone
    assert table.spent(tenants["one"]).of_day == 30


def test_a_shadow_quota_refuses_nothing(tmp_path: Path, table: TenantTable) -> None:
    tenants, meter = table.configure([TenantKey("one", Limits(daily=100), shadow=True)]), meter_of(tmp_path / FILE)
    account, over = (account_of(meter, tenants["one"]) for _ in range(2))
    assert account.charge(90) is None
    assert over.charge(90) is None

    assert (account.is_shadowed, over.is_shadowed) == (False, True)
    over.settle(90)
    assert table.spent(tenants["one"]).of_day == 90


def test_a_killed_worker_leaves_nothing_in_flight_and_loses_no_count(tmp_path: Path, table: TenantTable) -> None:
    tenants = table.configure([TenantKey("one", Limits(concurrent=100))])
    child = os.fork()
    if not child:
        try:
            meter = meter_of(tmp_path / FILE)
            account = account_of(meter, tenants["one"])
            assert account.charge(80) is None
            meter.answered(tenants["one"], 11, 2, 1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    meter = meter_of(tmp_path / FILE)
    account = account_of(meter, tenants["one"])
    assert isinstance(account.charge(80), ConcurrentTokensExceeded)

    [(row, counts, _)] = [one for one in table.rows() if one[2]]
    assert (counts.instance, counts.model) == ("a", "model-a")
    assert counts.counts[tenants["one"]][Counter.TOKENS] == 11
    table.clear(row)
    assert account.charge(80) is None
    assert [has_ended for _, _, has_ended in table.rows()] == [False]


def test_a_damaged_number_of_rows_is_no_reason_to_read_behind_them(tmp_path: Path, table: TenantTable) -> None:
    meter, tenants = meter_of(tmp_path / FILE), table.configure([TenantKey("one", Limits(concurrent=10))])
    table.words[USED_ROWS_AT] = 2**40

    assert account_of(meter, tenants["one"]).charge(5) is None


def test_a_name_keeps_its_number_and_its_use(table: TenantTable) -> None:
    keys = [TenantKey(name, Limits(daily=100)) for name in ("a", "b", "c")]
    first = table.configure(keys)
    till = NativeTill(table, 0, first["c"], is_in_flight=False)
    till.charge_at(till.new(), 60, 10**15, DAY)

    assert table.configure(keys[2:])["c"] == first["c"]
    again = table.configure([*keys, TenantKey("d")])
    assert {name: again[name] for name in "abc"} == first
    assert table.spent(again["c"]).of_day == 60
    with pytest.raises(ValueError, match="more than"):
        table.configure([SimpleNamespace(name=str(number)) for number in range(1024)])  # type: ignore[misc]


def test_quotas_that_change_count_for_the_next_call(tmp_path: Path, table: TenantTable) -> None:
    tenant, meter = table.configure([TenantKey("one")])["one"], meter_of(tmp_path / FILE)
    assert meter.standing(tenant).till is None

    table.configure([TenantKey("one", Limits(daily=10), weight=7)])
    assert isinstance(account_of(meter, tenant).charge(11), CallOverQuota)
    assert meter.standing(tenant).share.weight == 7
    assert meter.standing(tenant) is meter.standing(tenant)


@pytest.mark.parametrize("is_native", [True, False])
def test_calls_that_are_charged_and_given_up_at_once_are_refunded_once(
    tmp_path: Path, table: TenantTable, is_native: bool
) -> None:
    limits = Limits(daily=10**9, concurrent=10**6)
    tenant, meter = table.configure([TenantKey("one", limits)])["one"], meter_of(tmp_path / FILE)
    till = till_in(table, NativeTill if is_native else LockedTill, tenant)
    gate = threading.Barrier(2)

    def charge(accounts: list[Account]) -> None:
        gate.wait()
        for account in accounts:
            account.charge(3)

    def give_up(accounts: list[Account]) -> None:
        gate.wait()
        for account in accounts:
            account.settle(None)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            accounts = [Account(meter.standing(tenant), till) for _ in range(200)]
            for each in [pool.submit(work, accounts) for work in (charge, give_up)]:
                each.result()
            for account in accounts:
                account.settle(None)
    assert table.spent(tenant).of_day == 0
    assert table.in_flight(tenant) == 0


def submission_of(tenant: int, texts: Sequence[str | None]) -> Submission:
    context = RequestContext("id")
    context.belongs_to(tenant)
    with use_context(context):
        call = WorkerCall(1, Lane.INTERACTIVE)
    return Submission(call, [Part(range(len(texts)), texts, InferOptions())], lambda job: CallReply(b""))


@pytest.mark.parametrize(
    ("limits", "kind"),
    [(Limits(rate=1, burst=10), TokenRateExceeded), (Limits(daily=10), DailyTokensExceeded)],
)
def test_a_call_that_the_quota_cannot_admit_is_refused_before_it_is_tokenized(
    tmp_path: Path, table: TenantTable, limits: Limits, kind: type[TeimgrError]
) -> None:
    tenant = table.configure([TenantKey("one", limits)])["one"]
    tenants = Tenants(tmp_path / FILE, WorkerSpec(name="a", model_id="model-a"))
    whole = submission_of(tenant, ["x"] * 10)
    tenants.charge(whole)
    assert whole.accounts[0].charge(8) is None
    two, three, empty = (submission_of(tenant, texts) for texts in (["x", None, "y"], ["x"] * 3, [""] * 3))
    tenants.charge(two)  # both may be one token, which only the tokenizer knows
    tenants.charge(empty)
    spent = table.spent(tenant)

    with pytest.raises(kind) as refused:
        tenants.charge(three)
    assert refused.value.retry_after_s is not None
    with pytest.raises(CallOverQuota):
        tenants.charge(submission_of(tenant, ["x"] * 11))
    assert (table.spent(tenant), three.accounts) == (spent, ())
    [(_, counts, _)] = list(table.rows())
    assert counts.counts[tenant][Counter.REFUSED] == 2
    assert two.accounts[0].charge(2) is None
