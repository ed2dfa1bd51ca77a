"""Counters and limits per key of one worker's row in the table of tenants: `TenantMeter`, `Standing`, `Account`.

A `Till` charges and refunds one tenant in the host's table atomically, by tenants.c or under a lock of the file.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from teimgr.engine.job import EQUAL, Decided, Job, Pair, Share, characters
from teimgr.engine.native_library import native_library
from teimgr.errors import (
    CallOverQuota,
    Code,
    ConcurrentTokensExceeded,
    DailyTokensExceeded,
    TeimgrError,
    TokenRateExceeded,
    TryLater,
)
from teimgr.spec import WorkerSpec
from teimgr.wire.tenants import table as tenant_table
from teimgr.wire.tenants.table import (
    COUNTERS,
    DAY_TOKENS,
    IN_FLIGHT_AT,
    NS_PER_S,
    S_PER_DAY,
    TENANTS,
    USED_ROWS_AT,
    VERSION_AT,
    WORD_BYTES,
    Counter,
    Limits,
    Receipt,
    TenantTable,
    bucket_at,
    counter_at,
    spent_at,
    tenant_at,
)
from teimgr.wire.text_column import TextColumn
from teimgr.worker.calls import Submission, WorkerCall
from teimgr.worker.remote_tenants import RemoteMeter

log = logging.getLogger(__name__)


class Tenants:
    """The meter in the file at `path`, opened once the file exists. Before that nothing is charged or counted.

    For the loop's thread.
    """

    def __init__(self, path: Path | None, spec: WorkerSpec) -> None:
        self._path = path
        self._spec = spec
        self._meter: TenantMeter | None = None
        self._is_open = False
        if path is not None and path.exists():
            self._open()

    def charge(self, submission: Submission) -> None:
        """Attribute the jobs of a call to its tenant and, if the key has a quota, charge them before they are computed.

        Raises:
            TenantQuotaReached, CallOverQuota: one token per text would already exceed the quota. The refusal is
            counted.
        """
        call = submission.call
        if call.tenant and not self._is_open:  # keys were configured after this worker started
            self._open()
        if (share := self.share(call)) is not EQUAL:
            for job in submission.jobs:
                job.belongs_to(share)
        if not call.tenant or (meter := self._meter_of(call)) is None:
            return
        standing = meter.standing(call.tenant)
        for job in submission.jobs if standing.has_quota else ():
            if standing.refuses(len(job.inputs)) and (error := standing.refuses(_least_tokens(job))):
                meter.count(call.tenant, Counter.REFUSED)
                raise error
            submission.charge_to(job, standing.open_account())

    def share(self, call: WorkerCall) -> Share:
        """Return the share of the lane to which the call belongs."""
        meter = self._meter_of(call) if call.tenant else None
        share = EQUAL if meter is None else meter.standing(call.tenant).share
        return share.aside() if call.gave_way else share

    def finished(self, submission: Submission, job: Job, error: TeimgrError | None) -> None:
        """Count a call that the engine has finished; `job` has the results of all its jobs."""
        call = submission.call
        if (meter := self._meter_of(call)) is None:
            return
        if error is None:
            meter.answered(call.tenant, job.tokens, len(job.inputs) - len(job.errors), 0 if call.is_part else 1)
            if any(account.is_shadowed for account in submission.accounts):
                meter.count(call.tenant, Counter.SHADOWED)
        elif isinstance(error, TryLater | CallOverQuota):
            meter.count(call.tenant, Counter.REFUSED)

    def refused(self, call: WorkerCall) -> None:
        """Count a call that was not admitted."""
        if (meter := self._meter_of(call)) is not None:
            meter.count(call.tenant, Counter.REFUSED)

    def _meter_of(self, call: WorkerCall) -> TenantMeter | RemoteMeter | None:
        """Return the meter of the host that admitted the caller, or None if that host has no table."""
        remote = None if call.context is None else call.context.meter
        return remote if isinstance(remote, RemoteMeter) and remote.knows(call.tenant) else self._meter

    def _open(self) -> None:
        self._is_open = True
        if self._path is not None:
            self._meter = open_meter(self._path, self._spec.name, self._spec.model_id)


def _least_tokens(job: Job) -> int:
    """Return a lower bound of a job's tokens before it is tokenized: one for each non-empty text."""
    if isinstance(job.inputs, TextColumn):
        return int(np.count_nonzero(job.inputs.lengths))
    # A list comprehension takes a quarter of the time, and the loop counts up to 100,000 pairs.
    return sum([1 for item in job.inputs if (any(item) if type(item) is Pair else characters(item))])


_RETRY_S = 1.0  # between attempts to claim a row of a full table


class Standing:
    """A tenant's limits, read from the table once per configuration; `till` is None without a quota."""

    __slots__ = (
        *("_arrival_at", "_in_flight_of", "_refunded_at", "_spent_at", "_spent_of", "_words"),
        *("has_concurrent", "has_quota", "is_shadow", "limits", "share", "till"),
    )

    def __init__(self, table: TenantTable, row: int, tenant: int) -> None:
        self._words = table.words
        self._spent_of = partial(table.spent, tenant)
        self._in_flight_of = partial(table.in_flight, tenant)
        self._arrival_at, self._refunded_at = bucket_at(tenant)
        self._spent_at = spent_at(tenant)
        self.limits = table.limits(tenant)
        self.is_shadow, weight, priority = table.terms(tenant)
        self.share = Share(tenant, max(1, weight), priority)
        self.has_concurrent = self.limits.concurrent > 0
        self.has_quota = bool(self.limits.rate or self.limits.daily or self.limits.concurrent)
        self.till = open_till(table, row, tenant, is_in_flight=self.has_concurrent) if self.has_quota else None

    def open_account(self) -> Account:
        """Open an account for the charge of one job of a tenant with a quota."""
        assert self.till is not None
        return Account(self, self.till)

    def room(self) -> int:
        """Tokens that the quotas have left now."""
        in_flight = self._in_flight_of() if self.has_concurrent else 0
        day = int(time.time()) // S_PER_DAY
        return tenant_table.room(self.limits, self._spent_of(), in_flight, time.monotonic_ns(), day)

    def refuses(self, least: int) -> TeimgrError | None:
        """Return the refusal of a call that will have at least `least` tokens, so that it need not be tokenized.

        Nothing is charged. Tokens in flight are checked by the charge.
        """
        words, now_ns = self._words, time.monotonic_ns()
        arrival_ns, of_day = words[self._arrival_at] - words[self._refunded_at], words[self._spent_at] & DAY_TOKENS
        if tenant_table.may_pass(self.limits, arrival_ns, of_day, least, now_ns) or self.is_shadow:
            return None
        verdict = tenant_table.charge(self.limits, self._spent_of(), 0, least, now_ns, int(time.time()) // S_PER_DAY)
        if (code := verdict.refused_by) is None:
            return None
        return refusal(code, self.limits, least, verdict.wait_ns)


class TenantMeter:
    """The row of this worker in `table`. Charges are made and settled on any thread, all else on the loop's."""

    def __init__(self, table: TenantTable, row: int) -> None:
        self._table = table
        self._row = row
        self._counters_at = counter_at(row, 0)
        self._words = table.words
        self._version = -1
        self._standings: dict[int, Standing] = {}

    def standing(self, tenant: int) -> Standing:
        """Return the present standing of a tenant."""
        if self._words[VERSION_AT] != self._version:
            self._version = self._words[VERSION_AT]
            self._standings = {}
        standing = self._standings.get(tenant)
        if standing is None:
            standing = self._standings[tenant] = Standing(self._table, self._row, tenant)
        return standing

    def count(self, tenant: int, counter: Counter, by: int = 1) -> None:
        self._words[self._counters_at + tenant * COUNTERS + counter] += by

    def close(self) -> None:
        """Give the row back; the daemon then adds up its counters."""
        self._table.close()

    def answered(self, tenant: int, tokens: int, texts: int, calls: int) -> None:
        """Count a call that is answered with results."""
        words, at = self._words, self._counters_at + tenant * COUNTERS
        words[at] += tokens
        words[at + 1] += texts
        words[at + 2] += calls


def open_meter(path: Path, instance: str, model: str) -> TenantMeter | None:
    """Return the meter of this worker in the file of its host; None without such a file or without room in it."""
    if not path.exists():
        return None
    table = TenantTable(path)
    row = table.claim(instance, model)
    if row is None:
        table.close()
        log.error("tenant table %s has no free row: calls are neither charged to their keys nor counted", path)
        return None
    return TenantMeter(table, row)


class EntryMeters:
    """Meters of a process that sends calls to other hosts, in the table at `path`: one row per instance.

    Links to remote workers use it, on the loop's thread.
    """

    has_table = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[tuple[str, str], tuple[TenantMeter, int]] = {}  # meter and number of links
        self._full_until_s = 0.0

    def lease(self, instance: str, model: str) -> TenantMeter | None:
        """Return the meter of an instance, to be given back; None without a table, or while it has no room."""
        meter, links = self._open.get((instance, model), (None, 0))
        if meter is None:
            if time.monotonic() < self._full_until_s or not self._path.exists():
                return None
            if (meter := open_meter(self._path, instance, model)) is None:
                self._full_until_s = time.monotonic() + _RETRY_S
                return None
        self._open[instance, model] = meter, links + 1
        return meter

    def give_back(self, instance: str, model: str) -> None:
        meter, links = self._open.pop((instance, model))
        if links > 1:
            self._open[instance, model] = meter, links - 1
        else:
            meter.close()


class Account:
    """The charge of one job: `charge` once its tokens are known, `settle` when it is answered or given up.

    It takes no lock: the thread that deletes the slip makes the refund.
    """

    __slots__ = ("_charged", "_slip", "_standing", "_taken", "_till", "is_settled", "is_shadowed")
    decides_later = False

    _slip: Slip
    """The slip of its charge, until it is settled."""

    def __init__(self, standing: Standing, till: Till) -> None:
        self.is_settled = False
        self.is_shadowed = False  # whether only `shadow` prevented a refusal
        self._standing = standing
        self._till = till
        self._charged = self._taken = 0

    def charge(self, tokens: int, later: Decided | None = None) -> TeimgrError | None:
        """Charge the job; return the refusal if a quota does not allow it. No-op once it is settled."""
        if self.is_settled:
            return None
        till = self._till
        try:
            slip = till.free.pop()
        except IndexError:
            slip = till.new()
        if not (status := till.charge(slip, tokens)):
            self._charged = tokens
            self._slip = slip
            if self.is_settled:  # another thread settled it meanwhile, perhaps before the slip was set
                self._give_back(0)
            return None
        wait_ns = till.wait_ns(slip)
        till.free.append(slip)
        if self._standing.is_shadow:
            self.is_shadowed = True
            return None
        return refusal(tenant_table.LIMITS[max(status, 1) - 1], self._standing.limits, tokens, wait_ns)

    def took(self, tokens: int) -> None:
        """Mark tokens as taken into a batch: no refund if the caller leaves now. By one thread at a time."""
        self._taken += tokens

    def settle(self, computed: int | None) -> None:
        """End the charge: refund what was not `computed`, None: not taken into a batch. No-op the second time."""
        if self.is_settled:
            return
        self.is_settled = True
        self._give_back(self._taken if computed is None else computed)

    def _give_back(self, computed: int) -> None:
        try:
            slip = self._slip
            del self._slip
        except AttributeError:  # not charged, or another thread made the refund
            return
        back = max(0, self._charged - computed)
        if back or self._standing.has_concurrent:
            self._till.refund(slip, back)
        self._till.free.append(slip)


def refusal(code: Code, limits: Limits, tokens: int, wait_ns: int) -> TeimgrError:
    """Return the error for the caller; its retry time is when this call would be admitted."""
    if code is Code.TOKEN_RATE_EXCEEDED:
        if tokens > limits.burst:
            return CallOverQuota(f"The call has {tokens} tokens, more than the key's burst of {limits.burst}")
        wait_s = wait_ns / NS_PER_S
        return TokenRateExceeded(
            f"Rate limit reached on tokens per second. Limit {limits.rate} (burst {limits.burst}), Requested {tokens}. "
            f"Please try again in {math.ceil(wait_s * 1000) / 1000:.3f}s.",
            wait_s,
        )
    if code is Code.DAILY_TOKENS_EXCEEDED:
        if tokens > limits.daily:
            return CallOverQuota(f"The call has {tokens} tokens, more than the key has a day, {limits.daily}")
        wait_s = S_PER_DAY - time.time() % S_PER_DAY
        return DailyTokensExceeded(
            f"Rate limit reached on tokens per day. Limit {limits.daily}, Requested {tokens}. "
            f"Please try again in {math.ceil(wait_s)}s.",
            wait_s,
        )
    if tokens > limits.concurrent:
        return CallOverQuota(f"The call has {tokens} tokens, more than the key may have in flight, {limits.concurrent}")
    return ConcurrentTokensExceeded(
        f"Rate limit reached on tokens in flight. Limit {limits.concurrent}, Requested {tokens}. "
        "Please try again when other calls of the key are answered."
    )


Slip = Any
"""A till's record of a charge, for its refund; reusable."""


class Till(Protocol):
    """Charges and refunds, atomic among all workers of the host, on any thread. `free` holds unused slips.

    `charge` returns 0 for an admitted call, otherwise the number, from 1, of the refusing quota in `LIMITS`.
    `charge_at` and `refund_at` take the time; the others use the current time.
    """

    free: list[Slip]

    def new(self) -> Slip:
        """Make a new slip."""

    def charge(self, slip: Slip, tokens: int) -> int: ...

    def refund(self, slip: Slip, tokens: int) -> object:
        """End the charge's tokens in flight, and refund `tokens` of them that were not computed."""

    def charge_at(self, slip: Slip, tokens: int, now_ns: int, day: int) -> int: ...

    def refund_at(self, slip: Slip, tokens: int, now_ns: int) -> object: ...

    def wait_ns(self, slip: Slip) -> int:
        """Return how long to wait after a charge that the quota per second has refused."""


def open_till(table: TenantTable, row: int, tenant: int, *, is_in_flight: bool) -> Till:
    """Open the till of a tenant in the `row` of a worker; `is_in_flight`: count its tokens until they are settled."""
    kind = LockedTill if native_library() is None else NativeTill
    return kind(table, row, tenant, is_in_flight=is_in_flight)


class _Charge(ctypes.Structure):
    """The C structure `tenant_receipt` of tenants.c."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("tenant", "own", "in_flight", "rows")],
        *[(name, ctypes.c_int64) for name in ("stride", *Receipt._fields, "wait_ns")],
    ]


class NativeTill:
    """A till by the functions of tenants.c, without a lock. A slip is the reference to a structure."""

    def __init__(self, table: TenantTable, row: int, tenant: int, *, is_in_flight: bool) -> None:
        library = native_library()
        assert library is not None
        self.free: list[Slip] = []
        # The library's functions themselves: a Python call in between would double the time.
        self.charge, self.refund = library.tenant_charge, library.tenant_refund
        self.charge_at, self.refund_at = library.tenant_charge_at, library.tenant_refund_at
        base = ctypes.addressof(ctypes.c_char.from_buffer(table.memory))
        first = base + (IN_FLIGHT_AT + tenant) * WORD_BYTES
        own = first + row * TENANTS * WORD_BYTES if is_in_flight else None
        self._places = base + tenant_at(tenant) * WORD_BYTES, own, first, base + USED_ROWS_AT * WORD_BYTES, TENANTS

    def new(self) -> Slip:
        return ctypes.byref(_Charge(*self._places))

    def wait_ns(self, slip: Slip) -> int:
        return int(slip._obj.wait_ns)


class _LockedSlip:
    """A receipt, and the time to wait after a refusal."""

    def __init__(self) -> None:
        self.receipt = Receipt()
        self.wait_ns = 0

    def write(self, receipt: Receipt, wait_ns: int) -> None:
        self.receipt, self.wait_ns = receipt, wait_ns


class LockedTill:
    """A till by the functions of `wire/tenants/table.py`, without the native library, under a file lock."""

    def __init__(self, table: TenantTable, row: int, tenant: int, *, is_in_flight: bool) -> None:
        self.free: list[Slip] = []
        self._table, self._tenant = table, tenant
        self._is_in_flight = is_in_flight
        self._own = IN_FLIGHT_AT + row * TENANTS + tenant
        self._lock = threading.Lock()

    def new(self) -> Slip:
        return _LockedSlip()

    def charge(self, slip: Slip, tokens: int) -> int:
        return self.charge_at(slip, tokens, time.monotonic_ns(), int(time.time()) // S_PER_DAY)

    def refund(self, slip: Slip, tokens: int) -> None:
        self.refund_at(slip, tokens, time.monotonic_ns())

    def charge_at(self, slip: Slip, tokens: int, now_ns: int, day: int) -> int:
        table, tenant = self._table, self._tenant
        with self._lock, table.locked():
            limits, spent = table.limits(tenant), table.spent(tenant)
            in_flight = table.in_flight(tenant) if self._is_in_flight and limits.concurrent else 0
            verdict = tenant_table.charge(limits, spent, in_flight, tokens, now_ns, day)
            slip.write(verdict.receipt, verdict.wait_ns)
            table.write_spent(tenant, verdict.spent)
            if verdict.refused_by is not None:
                return tenant_table.LIMITS.index(verdict.refused_by) + 1
            table.words[self._own] += tokens if self._is_in_flight else 0
            return 0

    def refund_at(self, slip: Slip, tokens: int, now_ns: int) -> None:
        table, tenant = self._table, self._tenant
        with self._lock, table.locked():
            table.words[self._own] -= slip.receipt.tokens if self._is_in_flight else 0
            if tokens:
                table.write_spent(tenant, tenant_table.refund(table.spent(tenant), slip.receipt, tokens, now_ns))

    def wait_ns(self, slip: Slip) -> int:
        return int(slip.wait_ns)
