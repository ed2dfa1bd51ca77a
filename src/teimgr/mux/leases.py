"""Leases of quotas at a mux of another host: tokens that the daemon has charged, and calls that draw from them.

The daemon decides on each call for which too few tokens are leased, and leases tokens for later calls
(`control/sharing/leases.py`). `wire/tenants/table.py` sets the size and the duration of a lease. The mux reports what
each lease computed; the daemon refunds the rest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from teimgr.errors import Overloaded, TeimgrError, Unavailable, error_from_code
from teimgr.wire.json_messages import write_line
from teimgr.wire.tenants.table import COUNTERS, LEASE_S, MAX_ROWS, MAX_TOKENS, Counter, lease_wanted, mean_use

_ANSWER_S = 1.0
"""How long a call waits for a decision of the daemon, or for the next daemon to connect."""
_RETRY_S = 1.0
_PAUSE_S = 0.1  # after a lease smaller than asked for; without a pause, repeated requests would take the whole quota
_REPORT_S = 0.02
MAX_NEEDS = 256
"""Limit on the calls in one request to the daemon."""
_MAX_WAITING = 2048

Later = Callable[[TeimgrError | None], None]


class Share(NamedTuple):
    """A tenant's weight and priority at a busy instance."""

    weight: int = 1
    priority: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """Tokens that the daemon has charged: `left` may be drawn; `open` counts the charges that are not settled."""

    number: int
    place: int
    left: int
    open: int = 0
    computed: int = 0


class LeasedCharge:
    """The charge of one job: `charge` once its tokens are known, `settle` when it is over."""

    decides_later = True

    def __init__(self, purse: Purse) -> None:
        self.is_shadowed = False
        self.tokens = 0
        self.drawn: list[tuple[Lease, int]] = []
        self.is_over = self.is_decided = False
        self.waits_until = 0.0
        self._purse = purse
        self._later: Later | None = None

    def wait_until(self, at: float) -> None:
        """Set the time on the loop's clock at which the wait for a decision ends."""
        self.waits_until = at

    def give_up(self, refusal: TeimgrError | None) -> None:
        """Decide without the daemon. If the daemon grants the tokens of a refused charge later, they are given back."""
        self.is_over = refusal is not None
        self.decide(refusal)

    def charge(self, tokens: int, later: Later | None = None) -> None:
        """Charge the job; `later` gets the decision, at once if enough tokens are leased."""
        self.tokens, self._later = tokens, later
        self._purse.draw(self)

    def decide(self, refusal: TeimgrError | None) -> None:
        self.is_decided = True
        later, self._later = self._later, None
        if self.is_over:
            self._purse.give_back(self, 0)
        if later is not None:
            later(refusal)

    def settle(self, computed: int | None) -> None:
        """End the charge; tokens that were not `computed` are refunded. A second call does nothing."""
        if not self.is_over:
            self.is_over = True
            self._purse.give_back(self, computed or 0)


@dataclass(frozen=True, slots=True)
class Terms:
    """A tenant's share and quota flags, as last sent by the daemon."""

    purse: Purse
    share: Share
    has_quota: bool
    is_shadow: bool

    def open_account(self) -> LeasedCharge:
        return LeasedCharge(self.purse)


class _Request(NamedTuple):
    number: int
    needs: list[LeasedCharge]
    wanted: int
    at: float


class Purse:
    """The leases of one tenant, and its calls that wait for a decision. `terms` changes with the configuration."""

    def __init__(self, book: LeasedMeters, tenant: int) -> None:
        self.terms = Terms(self, Share(), False, False)
        self._book = book
        self._tenant = tenant
        self._leases: list[Lease] = []
        self._waiting: dict[LeasedCharge, None] = {}  # an ordered set
        self._asked: _Request | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._use, self._used_at, self._again_at = 0.0, 0.0, 0.0
        self._loop = asyncio.get_running_loop()

    def set_terms(self, weight: int = 1, priority: int = 0, has_quota: int = 0, is_shadow: int = 0, *_: int) -> None:
        """Apply a row of `terms`. Unchanged terms stay the same object."""
        terms = Terms(self, Share(weight, priority), bool(has_quota), bool(is_shadow))
        if terms != self.terms:
            self.terms = terms

    def draw(self, charge: LeasedCharge) -> None:
        """Charge the leased tokens if they suffice; otherwise the daemon decides."""
        now = self._loop.time()
        self._use, self._used_at = mean_use(self._use, now - self._used_at, charge.tokens), now
        if not self._waiting and sum([lease.left for lease in self._leases]) >= charge.tokens:
            self._take(charge)
            charge.decide(None)
        elif len(self._waiting) >= _MAX_WAITING:
            charge.decide(Overloaded("Too many calls of the key wait for its quota", _RETRY_S))
        else:
            charge.wait_until(now + self._book.wait_s())
            self._waiting[charge] = None
        self.ask()

    def give_back(self, charge: LeasedCharge, computed: int) -> None:
        """End a charge of which `computed` tokens were computed."""
        if charge in self._waiting:
            del self._waiting[charge]
            charge.decide(None)
        drawn, charge.drawn = charge.drawn, []
        for lease, tokens in drawn:
            done = min(tokens, computed)
            computed -= done
            lease.computed += done
            lease.open -= 1
            self._close(lease)

    def ask(self) -> None:
        """Send the waiting calls, and ask for a lease before the last one is used up; one request at a time."""
        self._set_timer()
        if self._asked is not None or not self._book.has_daemon:
            return
        now, left = self._loop.time(), sum([lease.left for lease in self._leases])
        wanted = lease_wanted(self._use, left) if now >= self._again_at else 0
        if not (self._waiting or wanted):
            return
        needs = list(itertools.islice(self._waiting, MAX_NEEDS))
        for charge in needs:
            del self._waiting[charge]
        number = self._book.number_for(self)
        self._asked = _Request(number, needs, wanted, now)
        self._book.send(lease=[number, self._tenant, [charge.tokens for charge in needs], wanted])

    def answered(self, decisions: list[Any], given: int) -> None:
        """Apply the daemon's decisions on the calls of the request, and its lease of `given` tokens.

        Raises:
            ValueError, TypeError: the answer is malformed; nothing is applied.
        """
        assert self._asked is not None
        if len(decisions) != len(self._asked.needs) or type(given) is not int or not 0 <= given <= MAX_TOKENS:
            raise ValueError(f"{len(decisions)} decisions on {len(self._asked.needs)} calls, and {given!r} tokens")
        refusals = [_refusal(each) for each in decisions]
        (number, needs, wanted, asked_at), self._asked = self._asked, None
        if given:
            self._leases.append(lease := Lease(number, len(needs), given))
            self._loop.call_at(asked_at + LEASE_S, self._end, lease)
        if given < wanted:
            self._again_at = self._loop.time() + _PAUSE_S
        for place, (charge, refusal) in enumerate(zip(needs, refusals, strict=True)):
            if refusal is None:
                charge.drawn = [(Lease(number, place, 0, open=1), charge.tokens)]
                charge.is_shadowed = decisions[place] is True
            charge.decide(refusal)
        self.ask()

    def lost(self) -> None:
        """Withdraw the open request; its calls wait for the next daemon."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._waiting = dict.fromkeys([each for each in asked.needs if not each.is_decided]) | self._waiting
            self._book.forget(asked.number)

    def _undecided(self) -> list[LeasedCharge]:
        """Return the waiting calls in order. The calls of the open request come first."""
        asked = self._asked.needs if self._asked is not None else []
        return [*(each for each in asked if not each.is_decided), *self._waiting]

    def _set_timer(self) -> None:
        """Start the timer for the earliest deadline of a waiting call, if it is not running."""
        if self._timer is None and (undecided := self._undecided()):
            self._timer = self._loop.call_at(min(each.waits_until for each in undecided), self._refuse)

    def _refuse(self) -> None:
        """Refuse the calls on which no daemon has decided in time; calls of a `shadow` key pass."""
        self._timer = None
        now = self._loop.time()
        for charge in [each for each in self._undecided() if each.waits_until <= now]:
            self._waiting.pop(charge, None)
            error = Unavailable("The daemon's host, which keeps the quota of the key, cannot be reached")
            error.try_after(_RETRY_S)
            charge.give_up(None if self.terms.is_shadow else error)
        if self._asked is not None and all(each.is_decided for each in self._asked.needs):
            self.lost()
        if self._waiting:
            self.ask()
        else:
            self._set_timer()

    def _take(self, charge: LeasedCharge) -> None:
        need = charge.tokens
        for lease in self._leases:
            if part := min(lease.left, need):
                lease.left, lease.open, need = lease.left - part, lease.open + 1, need - part
                charge.drawn.append((lease, part))
        self._leases = [lease for lease in self._leases if lease.left]

    def _end(self, lease: Lease) -> None:
        if lease.left:
            lease.left = 0
            self._leases.remove(lease)
            self._close(lease)

    def _close(self, lease: Lease) -> None:
        if not (lease.left or lease.open):
            self._book.settled(lease.number, lease.place, lease.computed)


def _refusal(decision: Any) -> TeimgrError | None:
    """Return the refusal in a decision of the daemon. Raises ValueError, TypeError if it is malformed."""
    if decision is None or decision is True:
        return None
    code, text, retry_s = decision
    return error_from_code(code, text, retry_after_s=retry_s)


class LeasedMeters:
    """`Meters` of a mux that has leases. Requests go to the daemon that has sent `terms` last."""

    has_table = False

    def __init__(self) -> None:
        self.is_on = False  # True once a daemon that leases quotas has sent the terms of its keys
        self._purses: dict[int, Purse] = {}
        self._daemon: asyncio.StreamWriter | None = None
        self._lost_at = float("-inf")
        self._numbers = itertools.count(1)
        self._asked: dict[int, Purse] = {}
        self._settled: list[tuple[int, int, int]] = []
        self._used: dict[tuple[int, str, str], list[int]] = {}
        self._reporting: asyncio.TimerHandle | None = None

    def take(self, message: dict[str, Any], daemon: asyncio.StreamWriter) -> None:
        """Handle `terms` or `leased` (see `mux/control.py`)."""
        if "terms" in message:
            self._learn(message["terms"], daemon)
        if "leased" in message:
            number, decisions, given = message["leased"]
            if (purse := self._asked.get(number)) is not None:
                purse.answered(decisions, given)
                del self._asked[number]
            else:  # the request was withdrawn: give its tokens back
                granted = [place for place, each in enumerate(decisions) if not isinstance(each, list)]
                for place in (*granted, len(decisions)):
                    self.settled(number, place, 0)

    def lost(self, daemon: asyncio.StreamWriter) -> None:
        """Handle the end of a daemon's link."""
        if daemon is self._daemon:
            self._daemon, self._lost_at = None, asyncio.get_running_loop().time()
            self._settled.clear()  # the daemon settles all charges itself when its link ends
            for purse in self._purses.values():
                purse.lost()

    def lease(self, instance: str, model: str) -> LeasedMeter | None:
        return LeasedMeter(self, instance, model) if self.is_on else None

    def give_back(self, instance: str, model: str) -> None:
        """Do nothing: nothing is held per instance."""

    def purse(self, tenant: int) -> Purse:
        if (found := self._purses.get(tenant)) is None:
            found = self._purses[tenant] = Purse(self, tenant)
        return found

    def wait_s(self) -> float:
        """Return how long a call waits for a decision: after a disconnection, what is left of the same limit."""
        if self._daemon is not None:
            return _ANSWER_S
        return max(0.0, self._lost_at + _ANSWER_S - asyncio.get_running_loop().time())

    @property
    def has_daemon(self) -> bool:
        return self._daemon is not None

    def number_for(self, purse: Purse) -> int:
        """Return the number of a new request of the purse."""
        number = next(self._numbers)
        self._asked[number] = purse
        return number

    def send(self, **values: object) -> None:
        """Send a message to the daemon, if there is one."""
        if self._daemon is not None:
            write_line(self._daemon, **values)

    def forget(self, number: int) -> None:
        """Ignore the answer to a request; tokens that it grants are refunded."""
        self._asked.pop(number, None)

    def settled(self, number: int, place: int, computed: int) -> None:
        """Report the computed tokens of a lease or charge that has ended."""
        if self._daemon is not None:
            self._settled.append((number, place, computed))
            self._report_soon()

    def count(self, tenant: int, instance: str, model: str, counter: Counter, by: int) -> None:
        self._used.setdefault((tenant, instance, model), [0] * COUNTERS)[counter] += by
        self._report_soon()

    def report(self) -> None:
        """Send the daemon settled charges and counts of use. Counts are kept while no daemon is connected."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._daemon is None:
            return
        settled, self._settled = self._settled, []
        used, self._used = [[*names, counts] for names, counts in self._used.items()], {}
        for begin in range(0, max(len(settled), len(used)), MAX_ROWS):
            end = begin + MAX_ROWS
            self.send(settled=settled[begin:end], used=used[begin:end])

    def _report_soon(self) -> None:
        if self._reporting is None and self._daemon is not None:
            self._reporting = asyncio.get_running_loop().call_later(_REPORT_S, self.report)

    def _learn(self, terms: list[list[int]], daemon: asyncio.StreamWriter) -> None:
        given = {tenant: rest for tenant, *rest in terms}
        self.is_on = bool(given)
        for tenant in given.keys() | self._purses.keys():
            self.purse(tenant).set_terms(*given.get(tenant, ()))
        if self._daemon is not daemon:
            self._daemon = daemon
            for purse in self._purses.values():
                purse.lost()
                purse.ask()
        self.report()


class LeasedMeter:
    """The meter of an instance."""

    def __init__(self, book: LeasedMeters, instance: str, model: str) -> None:
        self._book = book
        self._of = instance, model

    def standing(self, tenant: int) -> Terms:
        return self._book.purse(tenant).terms

    def count(self, tenant: int, counter: Counter, by: int = 1) -> None:
        if by:
            self._book.count(tenant, *self._of, counter, by)
