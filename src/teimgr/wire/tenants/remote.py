"""Quotas and use of keys between hosts: a call is charged and counted on the host that admitted its caller.

The worker counts the tokens of a call. The process that sent it, a mux or the daemon, has the table of its host, or
leases (`mux/leases.py`). The two exchange frames of type TENANT on the call's link, whose method is a `Note` and whose
id is the worker's number of a charge.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Protocol

from teimgr.errors import TeimgrError, Unavailable
from teimgr.wire.frames import FrameType, Header, Received, pack_error, retry_after_ms
from teimgr.wire.tenants.table import COUNTERS, MAX_TOKENS, Counter


class Note(IntEnum):
    """The kind of a TENANT frame, its method. The worker receives the first two and sends the others."""

    TERMS = 1  # `TERMS` of a tenant: before its first call, and after each change
    CHARGED = 2  # the decision on a charge: empty, or the payload of an ERROR
    CHARGE = 3  # `CHARGE`: the tokens of a job, before any is computed
    SETTLE = 4  # `SETTLE`: the computed tokens; the rest is refunded
    COUNT = 5  # `COUNT`: use by a call, before its answer


TERMS = struct.Struct("<HqqB")  # tenant, weight, priority, whether it has a quota
CHARGE = struct.Struct("<Hq")  # tenant, tokens
SETTLE = struct.Struct("<q")
COUNT = struct.Struct(f"<H{COUNTERS}q")  # tenant, a number per `Counter`
SHADOWED = 1
"""The flag of a CHARGED that only a quota with `shadow` would have refused."""


class SharedPart(Protocol):
    """A tenant's share of a busy instance."""

    @property
    def weight(self) -> int: ...

    @property
    def priority(self) -> int: ...


class OpenCharge(Protocol):
    """A charge until it is settled."""

    is_shadowed: bool

    @property
    def decides_later(self) -> bool:
        """True if `later` gets the decision, instead of the caller of `charge`."""

    def charge(self, tokens: int, later: Callable[[TeimgrError | None], None] | None = None) -> TeimgrError | None: ...

    def settle(self, computed: int | None) -> None: ...


class Terms(Protocol):
    """Share and quota of a tenant; a new object after each change."""

    @property
    def share(self) -> SharedPart: ...

    @property
    def has_quota(self) -> bool: ...

    def open_account(self) -> OpenCharge: ...


class Meter(Protocol):
    """A row of the table, for the calls of this process to an instance on other hosts."""

    def standing(self, tenant: int) -> Terms: ...

    def count(self, tenant: int, counter: Counter, by: int = 1) -> None: ...


class Meters(Protocol):
    """The meters of a process, by instance. Tokens from `lease` must be given back.

    If it `has_table`, workers of this host charge and count in that table themselves.
    """

    has_table: bool

    def lease(self, instance: str, model: str) -> Meter | None:
        """None while no key is required, or without room in the table."""

    def give_back(self, instance: str, model: str) -> None: ...


class EntryDesk:
    """Answers the notes of the worker at the other end of a link, by the table of this host. Used only on the loop's
    thread."""

    def __init__(
        self, meters: Meters, instance: str, model: str, send: Callable[..., None], *, is_heard: bool = True
    ) -> None:
        """`is_heard`: the worker understands these notes."""
        self._is_heard = is_heard
        self._meters = meters
        self._of = instance, model
        self._send = send
        self._meter: Meter | None = None
        self._known: dict[int, Terms] = {}  # terms sent to the worker, by tenant
        self._open: dict[int, OpenCharge] = {}

    def introduce(self, tenant: int) -> None:
        """Tell the worker on which terms a tenant calls, before its call.

        Raises:
            Unavailable: the tenant has a quota, and the worker cannot have it charged.
        """
        if self._meter is None:
            self._meter = self._meters.lease(*self._of)
        if self._meter is None:
            return
        terms = self._meter.standing(tenant)
        if self._known.get(tenant) is terms:
            return
        if not self._is_heard:
            if terms.has_quota:
                raise Unavailable("The worker runs an earlier version, which cannot charge quotas on this host")
            return
        self._known[tenant] = terms
        share = terms.share
        packed = TERMS.pack(tenant, share.weight, share.priority, terms.has_quota)
        self._send(FrameType.TENANT, Note.TERMS, 0, packed)

    def received(self, header: Header, payload: Received) -> None:
        """Answer a note. Raises struct.error or ValueError if it is malformed, which ends the link."""
        if self._meter is None:
            return
        if header.method == Note.CHARGE:
            self._charge(self._meter, header.id, *CHARGE.unpack(payload))
        elif header.method == Note.SETTLE:
            [computed] = SETTLE.unpack(payload)
            if (charge := self._open.pop(header.id, None)) is not None:
                charge.settle(_valid_tokens(computed))
        elif header.method == Note.COUNT:
            tenant, *counts = COUNT.unpack(payload)
            self._check_introduced(tenant)
            for counter in Counter:
                self._meter.count(tenant, counter, _valid_tokens(counts[counter]))

    def close(self) -> None:
        """The link is lost: refund the charges that were not settled, since their caller gets an error."""
        charges, self._open = self._open, {}
        for charge in charges.values():
            charge.settle(None)
        if self._meter is not None:
            self._meter = None
            self._meters.give_back(*self._of)

    def _check_introduced(self, tenant: int) -> None:
        if tenant not in self._known:
            raise ValueError(f"tenant {tenant} sent no call over this link")

    def _charge(self, meter: Meter, id: int, tenant: int, tokens: int) -> None:
        self._check_introduced(tenant)
        terms = meter.standing(tenant)
        if not terms.has_quota:  # the quota was removed meanwhile
            self._send(FrameType.TENANT, Note.CHARGED, id)
            return
        charge = self._open[id] = terms.open_account()
        decided = partial(self._decided, id, charge)
        refusal = charge.charge(_valid_tokens(tokens), decided)
        if not charge.decides_later:
            decided(refusal)

    def _decided(self, id: int, charge: OpenCharge, refusal: TeimgrError | None) -> None:
        if self._meter is None:  # the link is lost
            return
        if refusal is None:
            self._send(FrameType.TENANT, Note.CHARGED, id, flags=SHADOWED if charge.is_shadowed else 0)
        else:
            self._open.pop(id, None)
            packed, retry_ms = pack_error(refusal), retry_after_ms(refusal)
            self._send(FrameType.TENANT, Note.CHARGED, id, packed, deadline_ms=retry_ms)


def _valid_tokens(tokens: int) -> int:
    """Check a number of tokens that another host reports: a negative one would lift the quotas of this one."""
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} is not a number of tokens")
    return tokens
