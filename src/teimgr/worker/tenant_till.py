"""Atomic charge and refund of one tenant in the table of a host: by tenants.c, or under a lock of the file."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Protocol

from teimgr.engine.native_library import native_library
from teimgr.wire.tenants import quotas
from teimgr.wire.tenants.quotas import S_PER_DAY, Receipt
from teimgr.wire.tenants.table import IN_FLIGHT_AT, TENANTS, USED_ROWS_AT, WORD_BYTES, TenantTable, tenant_at

Slip = Any
"""Where a till writes a charge, for its refund; it can be reused for a later charge."""


class Till(Protocol):
    """Atomic among all workers of the host, on any thread. `free` holds unused slips.

    `charge` returns 0 for an admitted call, else the number of the quota that refuses, from 1, in `quotas.LIMITS`.
    `charge_at` and `refund_at` take the time; the others use the present time.
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
        # Without Python in between: a Python call takes as long as the library does.
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
    """A receipt, and how long to wait."""

    def __init__(self) -> None:
        self.receipt = Receipt()
        self.wait_ns = 0

    def write(self, receipt: Receipt, wait_ns: int) -> None:
        self.receipt, self.wait_ns = receipt, wait_ns


class LockedTill:
    """A till by the functions of quotas.py, without the native library; a file lock excludes other processes."""

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
            verdict = quotas.charge(limits, spent, in_flight, tokens, now_ns, day)
            slip.write(verdict.receipt, verdict.wait_ns)
            if verdict.refused_by is not None:
                return quotas.LIMITS.index(verdict.refused_by) + 1
            table.write_spent(tenant, verdict.spent)
            table.words[self._own] += tokens if self._is_in_flight else 0
            return 0

    def refund_at(self, slip: Slip, tokens: int, now_ns: int) -> None:
        table, tenant = self._table, self._tenant
        with self._lock, table.locked():
            table.words[self._own] -= slip.receipt.tokens if self._is_in_flight else 0
            if tokens:
                table.write_spent(tenant, quotas.refund(table.spent(tenant), slip.receipt, tokens, now_ns))

    def wait_ns(self, slip: Slip) -> int:
        return int(slip.wait_ns)
