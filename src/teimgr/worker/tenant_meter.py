"""Charges calls to their tenants, and counts what they have used, in the table that the workers of a host share."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from teimgr.engine.job import Share
from teimgr.engine.native_library import native_library
from teimgr.errors import (
    CallOverQuota,
    Code,
    ConcurrentTokensExceeded,
    DailyTokensExceeded,
    TeimgrError,
    TokenRateExceeded,
)
from teimgr.wire.tenants import policy
from teimgr.wire.tenants.policy import NS_PER_S, S_PER_DAY, Limits, Receipt
from teimgr.wire.tenants.table import (
    IN_FLIGHT_AT,
    ROWS,
    TENANTS,
    Counter,
    TenantTable,
    Word,
    counter_at,
    tenant_at,
)

log = logging.getLogger(__name__)

_WORD = 8
_RATE, _DAILY, _CONCURRENT = int(Word.RATE), int(Word.DAILY), int(Word.CONCURRENT)  # adding members takes longer
_WEIGHT, _PRIORITY = int(Word.WEIGHT), int(Word.PRIORITY)


class TenantMeter:
    """The row of this worker in `table`. Charges are made and settled on any thread, counts on the loop's."""

    def __init__(self, table: TenantTable, row: int) -> None:
        self._table = table
        self._row = row
        self._words = table.words
        self._ledger: Ledger = shared_ledger(table, row)
        self._shares: dict[int, Share] = {}

    def account(self, tenant: int) -> Account | None:
        """The account of one job of a tenant; None if it has no quota."""
        words, at = self._words, tenant_at(tenant)
        if words[at + _RATE] or words[at + _DAILY] or words[at + _CONCURRENT]:
            return Account(self, self._ledger, tenant, is_in_flight=words[at + _CONCURRENT] > 0)
        return None

    def share(self, tenant: int) -> Share:
        """The tenant's part of a busy instance."""
        words, at = self._words, tenant_at(tenant)
        weight, priority = words[at + _WEIGHT], words[at + _PRIORITY]
        share = self._shares.get(tenant)
        if share is None or share.weight != weight or share.priority != priority:
            share = self._shares[tenant] = Share(tenant, max(1, weight), priority)
        return share

    def limits(self, tenant: int) -> Limits:
        return self._table.limits(tenant)

    def is_shadow(self, tenant: int) -> bool:
        return bool(self._words[tenant_at(tenant) + Word.SHADOW])

    def count(self, tenant: int, counter: Counter, by: int = 1) -> None:
        self._words[counter_at(self._row, tenant) + counter] += by

    def answered(self, tenant: int, tokens: int, texts: int, calls: int) -> None:
        """Count a call that is answered with results."""
        words, at = self._words, counter_at(self._row, tenant)
        words[at] += tokens
        words[at + 1] += texts
        words[at + 2] += calls


def open_meter(path: Path, instance: str, model: str) -> TenantMeter | None:
    """The meter of this worker in the file of its host; None without such a file, or without room in it."""
    if not path.exists():
        return None
    table = TenantTable(path)
    row = table.claim(instance, model)
    if row is None:
        table.close()
        log.error("no row is free in %s: calls are neither charged to their keys nor counted", path)
        return None
    return TenantMeter(table, row)


class Account:
    """The charge of one job: `charge` once its tokens are known, `settle` when it is answered or given up."""

    __slots__ = (
        *("_is_in_flight", "_ledger", "_lock", "_meter", "_receipt", "_taken"),
        *("is_settled", "is_shadowed", "tenant"),
    )

    def __init__(self, meter: TenantMeter, ledger: Ledger, tenant: int, *, is_in_flight: bool) -> None:
        self.tenant = tenant
        self._is_in_flight = is_in_flight  # its tokens count as such, since the tenant has a limit of them
        self.is_settled = False
        self.is_shadowed = False  # it would have been refused
        self._meter = meter
        self._ledger = ledger
        self._lock = threading.Lock()
        self._receipt: HasTokens | None = None
        self._taken = 0

    def charge(self, tokens: int) -> TeimgrError | None:
        """Charge the job; the refusal where a quota does not allow it. No-op once it is settled."""
        with self._lock:
            if self.is_settled:
                return None
            code, receipt, wait_ns = self._ledger.charge(
                self.tenant, tokens, time.monotonic_ns(), _day(), is_in_flight=self._is_in_flight
            )
            if code is None:
                self._receipt = receipt
                return None
        if self._meter.is_shadow(self.tenant):
            self.is_shadowed = True
            return None
        return refusal(code, self._meter.limits(self.tenant), tokens, wait_ns)

    def took(self, tokens: int) -> None:
        """Tokens of the job are in a batch: they are not refunded if the caller leaves now."""
        with self._lock:
            self._taken += tokens

    def settle(self, computed: int | None) -> None:
        """The job is over. Refunds what was not `computed`, None: what was not taken into a batch. No-op later."""
        with self._lock:
            if self.is_settled:
                return
            self.is_settled = True
            if (receipt := self._receipt) is not None:
                back = max(0, receipt.tokens - (self._taken if computed is None else computed))
                if back or self._is_in_flight:
                    self._ledger.settle(
                        self.tenant, receipt, back, time.monotonic_ns(), is_in_flight=self._is_in_flight
                    )


def refusal(code: Code, limits: Limits, tokens: int, wait_ns: int) -> TeimgrError:
    """The error for the caller; the wait is until this call would be admitted."""
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


class HasTokens(Protocol):
    """A charge: a `Receipt`, or the structure that the library writes, as the ledger gave it."""

    @property
    def tokens(self) -> int:
        """Tokens that were charged."""


Charged = tuple[Code | None, HasTokens | None, int]
"""The quota that refuses, or None; the charge; nanoseconds to wait."""


class Ledger(Protocol):
    """Charges and refunds in the table, atomic among all workers of the host."""

    def charge(
        self, tenant: int, tokens: int, now_ns: int, day: int, *, is_in_flight: bool = True
    ) -> tuple[Code | None, HasTokens | None, int]:
        """Charge a call; `is_in_flight`: its tokens count as in flight until it is settled."""

    def settle(self, tenant: int, receipt: Any, refund: int, now_ns: int, *, is_in_flight: bool = True) -> None:
        """The charge's tokens are no longer in flight, and `refund` of them were not computed."""


def shared_ledger(table: TenantTable, row: int) -> Ledger:
    library = native_library()
    return LockedLedger(table, row) if library is None else NativeLedger(table, row)


class _Receipt(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in (*Receipt._fields, "wait_ns")]


class NativeLedger:
    """By the functions of tenants.c, without a lock."""

    def __init__(self, table: TenantTable, row: int) -> None:
        library = native_library()
        assert library is not None
        self._charge, self._refund = library.tenant_charge, library.tenant_refund
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(table.memory))
        self._in_flight = self._base + IN_FLIGHT_AT * _WORD
        self._own = self._in_flight + row * TENANTS * _WORD

    def charge(
        self, tenant: int, tokens: int, now_ns: int, day: int, *, is_in_flight: bool = True
    ) -> tuple[Code | None, HasTokens | None, int]:
        receipt, offset = _Receipt(), tenant * _WORD
        own = self._own + offset if is_in_flight else None
        status = self._charge(
            self._base + tenant_at(tenant) * _WORD,
            own,
            self._in_flight + offset,
            ROWS,
            TENANTS,
            tokens,
            now_ns,
            day,
            ctypes.byref(receipt),
        )
        if status:
            return policy.LIMITS[max(status, 1) - 1], None, receipt.wait_ns
        return None, receipt, 0

    def settle(self, tenant: int, receipt: Any, refund: int, now_ns: int, *, is_in_flight: bool = True) -> None:
        own = self._own + tenant * _WORD if is_in_flight else None
        self._refund(self._base + tenant_at(tenant) * _WORD, own, ctypes.byref(receipt), refund, now_ns)


class LockedLedger:
    """By the functions of policy.py, without the native library; a lock of the file keeps others out."""

    def __init__(self, table: TenantTable, row: int) -> None:
        self._table = table
        self._own = IN_FLIGHT_AT + row * TENANTS
        self._lock = threading.Lock()

    def charge(
        self, tenant: int, tokens: int, now_ns: int, day: int, *, is_in_flight: bool = True
    ) -> tuple[Code | None, HasTokens | None, int]:
        with self._lock, self._table.locked():
            table = self._table
            limits, spent = table.limits(tenant), table.spent(tenant)
            in_flight = table.in_flight(tenant) if is_in_flight and limits.concurrent else 0
            verdict = policy.charge(limits, spent, in_flight, tokens, now_ns, day)
            if verdict.refused_by is not None:
                return verdict.refused_by, None, verdict.wait_ns
            table.write_spent(tenant, verdict.spent)
            table.words[self._own + tenant] += tokens if is_in_flight else 0
            return None, verdict.receipt, 0

    def settle(self, tenant: int, receipt: Any, refund: int, now_ns: int, *, is_in_flight: bool = True) -> None:
        with self._lock, self._table.locked():
            self._table.words[self._own + tenant] -= receipt.tokens if is_in_flight else 0
            if refund:
                spent = policy.refund(self._table.spent(tenant), receipt, refund, now_ns)
                self._table.write_spent(tenant, spent)


def _day() -> int:
    """The number of the day in UTC."""
    return int(time.time()) // S_PER_DAY
