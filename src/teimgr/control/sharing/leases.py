"""Leases of quotas to muxes of other hosts, charged in the table of this host."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.errors import Overloaded, TeimgrError, Unavailable
from teimgr.wire.json_messages import MessageLink
from teimgr.wire.tenants.table import LEASE_S, MAX_ROWS, MAX_TOKENS, TENANTS, lease_given
from teimgr.worker.tenant_meter import Account, Standing

MAX_OPEN = 16_384
"""Limit of unsettled charges and leases of one mux."""
_MAX_COUNT = 1 << 53


class LeasesForMux:
    """The unsettled charges of the mux at the other end of a control link."""

    def __init__(self, link: MessageLink, tenants: TenantRegistry) -> None:
        self._link = link
        self._tenants = tenants
        self._open: dict[tuple[int, int], Account] = {}
        self._last = -1  # number of the last request

    def take(self, message: dict[str, Any]) -> None:
        """Take `lease`, `settled` or `used` of `mux/control.py`.

        Raises:
            ValueError, TypeError: it is malformed.
        """
        if "lease" in message:
            number, tenant, needs, wanted = message["lease"]
            self._lease(int(number), int(tenant), [_number(each) for each in _rows(needs)], _number(wanted))
        for number, place, computed in _rows(message.get("settled", [])):
            if (account := self._open.pop((number, place), None)) is not None:
                account.settle(_number(computed))
        for tenant, instance, model, counts in _rows(message.get("used", [])):
            self._tenants.count(int(tenant), str(instance), str(model), [_number(each, _MAX_COUNT) for each in counts])

    def close(self) -> None:
        """Process the end of the link: nothing is refunded, and tokens stay in flight until the leases have ended."""
        if self._open:
            asyncio.get_running_loop().call_later(LEASE_S, self._end)

    def _end(self) -> None:
        if self._tenants.is_on:  # otherwise the table is unmapped; the next daemon clears the row
            for account in self._open.values():
                account.settle(MAX_TOKENS)
        self._open.clear()

    def _lease(self, number: int, tenant: int, needs: list[int], wanted: int) -> None:
        if number <= self._last or not 0 < tenant < TENANTS:  # would overwrite other charges
            raise ValueError(f"request {number} of tenant {tenant} after request {self._last}")
        self._last = number
        meter = self._tenants.meter()
        if meter is None or len(self._open) + len(needs) > MAX_OPEN:
            error = Overloaded() if meter else Unavailable("The quotas of the keys cannot be charged now")
            error.try_after(1.0)
            self._answer(number, [error] * len(needs), 0)
            return
        standing = meter.standing(tenant)
        if not standing.has_quota:
            self._answer(number, [None] * len(needs), 0)
            return
        decisions = [self._charged(number, place, standing, tokens) for place, tokens in enumerate(needs)]
        given = lease_given(wanted, standing.room())
        if given and self._charged(number, len(needs), standing, given) is not None:
            given = 0
        self._answer(number, decisions, given)

    def _charged(self, number: int, place: int, standing: Standing, tokens: int) -> TeimgrError | bool | None:
        """Charge a call. Return the refusal, None if it is charged, True if it passes uncharged by `shadow`."""
        account = standing.open_account()
        if (refusal := account.charge(tokens)) is not None:
            return refusal
        if account.is_shadowed:
            return True
        self._open[number, place] = account
        return None

    def _answer(self, number: int, decisions: list[Any], given: int) -> None:
        coded = [
            [int(each.code), each.message, each.retry_after_s] if isinstance(each, TeimgrError) else each
            for each in decisions
        ]
        self._link.send(leased=json.dumps([number, coded, given]))


def _rows(given: list[Any]) -> list[Any]:
    if len(given) > MAX_ROWS:
        raise ValueError(f"{len(given)} rows in one message")
    return given


def _number(value: Any, most: int = MAX_TOKENS) -> int:
    """Return a number that a mux sent. Raises ValueError: it is out of range; a negative one would raise a quota."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a number of tokens")
    return value
