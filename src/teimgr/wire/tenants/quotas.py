"""Quotas of a tenant: tokens a second and a day, and tokens in flight, as pure functions of a state and a moment.

Tokens a second are a token bucket in the form of GCRA: the bucket is full again at `arrival_ns`. A charge moves that
time forward by what its tokens cost, and is refused if it would then be more than the burst ahead of now. So at most
`burst + rate * T` tokens are admitted in any window of T seconds.
`engine/native/tenants.c` does the same on a shared file; a test compares the two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from teimgr.errors import Code
from teimgr.http.byte_budget import leaves_as_much

NS_PER_S = 1_000_000_000
S_PER_DAY = 86_400
MAX_TOKENS = 2**31 - 1
"""More than a call can have; products with `NS_PER_S` fit into 64 bits."""

LIMITS = (Code.TOKEN_RATE_EXCEEDED, Code.DAILY_TOKENS_EXCEEDED, Code.CONCURRENT_TOKENS_EXCEEDED)
"""The codes of refusals by each quota; numbers 1, 2 and 3 of the native library."""


class Limits(NamedTuple):
    """The quotas of a tenant in tokens; 0 for none. `burst` is the capacity of the bucket of `rate`."""

    rate: int = 0
    burst: int = 0
    daily: int = 0
    concurrent: int = 0


class Spent(NamedTuple):
    """The tokens that a tenant has used. `refunded_ns` is the sum of the refunds to the bucket: refunds made since a
    charge reduce its own."""

    arrival_ns: int = 0
    refunded_ns: int = 0
    day: int = 0
    of_day: int = 0


class Receipt(NamedTuple):
    """A charge, kept for its refund: rate and day, 0 for none, and the bucket's state when it was made."""

    tokens: int = 0
    rate: int = 0
    day: int = 0
    arrival_ns: int = 0
    refunded_ns: int = 0


class Verdict(NamedTuple):
    """Whether a call is admitted (`refused_by` is None); if not, when to retry."""

    spent: Spent
    receipt: Receipt = Receipt()
    refused_by: Code | None = None
    wait_ns: int = 0


def charge(limits: Limits, spent: Spent, in_flight: int, tokens: int, now_ns: int, day: int) -> Verdict:
    """Charge a call of `tokens`, while `in_flight` tokens are admitted and not yet answered.

    `now_ns` is monotonic, `day` the number of the day in UTC.
    """
    rate_code, daily_code, concurrent_code = LIMITS
    if limits.concurrent and in_flight + tokens > limits.concurrent:
        return Verdict(spent, refused_by=concurrent_code)
    day = _charged_day(spent, day)
    of_day = spent.of_day if spent.day == day else 0
    if limits.daily and of_day + tokens > limits.daily:
        return Verdict(spent, refused_by=daily_code)
    if limits.daily:
        spent = spent._replace(day=day, of_day=of_day)  # a refused call begins the day too, as in the library
    arrival_ns = spent.arrival_ns
    if limits.rate:
        burst_ns = time_of(limits.burst, limits.rate)
        # It is further ahead than the burst only if the limits have changed.
        arrival_ns = max(min(arrival_ns, now_ns + burst_ns), now_ns) + time_of(tokens, limits.rate)
        if (wait_ns := arrival_ns - now_ns - burst_ns) > 0:
            return Verdict(spent, refused_by=rate_code, wait_ns=wait_ns)
    receipt = Receipt(tokens, limits.rate, day if limits.daily else 0, arrival_ns, spent.refunded_ns)
    of_day = of_day + tokens if limits.daily else spent.of_day
    return Verdict(spent._replace(arrival_ns=arrival_ns, of_day=of_day), receipt)


def may_pass(limits: Limits, arrival_ns: int, of_day: int, tokens: int, now_ns: int) -> bool:
    """True if `charge` may admit a call of `tokens` or more: a quick check, which charges nothing.

    If not, `charge` refuses the call, unless `of_day` is of an earlier day. Tokens in flight are not checked.
    """
    rate, burst, daily, _ = limits
    if rate and arrival_ns - now_ns + time_of(tokens, rate) > time_of(burst, rate):
        return False
    return not daily or of_day + tokens <= daily


def refund(spent: Spent, receipt: Receipt, tokens: int, now_ns: int) -> Spent:
    """Give back `tokens` of a charge that were not computed; at most once for each charge.

    The bucket gets back at most the part that has not yet been refilled: time has given back the rest. Refunds to
    others since the charge are assumed to be of charges before it, so that never too much is given back.
    """
    if receipt.rate:
        others_ns = spent.refunded_ns - receipt.refunded_ns
        left_ns = max(0, receipt.arrival_ns - others_ns - now_ns)
        back_ns = min(tokens * NS_PER_S // receipt.rate, left_ns)
        spent = spent._replace(arrival_ns=spent.arrival_ns - back_ns, refunded_ns=spent.refunded_ns + back_ns)
    if receipt.day and receipt.day == spent.day:
        spent = spent._replace(of_day=max(0, spent.of_day - tokens))  # a clock may have left the day and returned
    return spent


def remaining(burst: int, rate: int, arrival_ns: int, now_ns: int) -> tuple[int, int]:
    """Return the tokens that the bucket has now, and the nanoseconds until it is full."""
    ahead_ns = arrival_ns - now_ns
    if ahead_ns <= 0:
        return burst, 0
    left = burst + -ahead_ns * rate // NS_PER_S
    return (left, ahead_ns) if left > 0 else (0, min(ahead_ns, time_of(burst, rate)))


def room(limits: Limits, spent: Spent, in_flight: int, now_ns: int, day: int) -> int:
    """Return the tokens that none of the quotas would refuse now; 0 without a quota."""
    left = []
    if limits.rate:
        left.append(remaining(limits.burst, limits.rate, spent.arrival_ns, now_ns)[0])
    if limits.daily:
        left.append(limits.daily - (spent.of_day if spent.day == _charged_day(spent, day) else 0))
    if limits.concurrent:
        left.append(limits.concurrent - in_flight)
    return max(0, min(left, default=0))


def _charged_day(spent: Spent, day: int) -> int:
    """Return the day to which a charge on `day` counts: the last one, if that is the day after.

    A worker may have read the clock just before midnight, and a clock may be set back across midnight. Without this
    rule such a charge would erase the tokens of the new day, and the tenant would have two quotas.
    """
    return spent.day if spent.day == day + 1 else day


LEASE_S = 2.0
"""How long a lease may be used after its request. So all hosts admit at most `burst + rate * (T + LEASE_S)` tokens in
any window of T seconds."""
MAX_ROWS = 1024
"""The most calls, or rows of use, in one message between the daemon and a mux that leases."""
_AHEAD_S = 0.5
_MEAN_S = 1.0
_LEASED_PART = 8


def mean_use(before: float, since_s: float, tokens: int) -> float:
    """Return the tokens a second of a tenant's recent calls, after a call of `tokens`, `since_s` after the previous
    one."""
    return before * math.exp(-since_s / _MEAN_S) + tokens / _MEAN_S


def lease_wanted(use: float, left: int) -> int:
    """Return the tokens to lease for future calls if `left` are leased: 0 while at least half of the need is left."""
    ahead = min(int(use * _AHEAD_S), MAX_TOKENS)
    return max(0, ahead - left) if 2 * left < ahead else 0


def lease_given(wanted: int, room: int) -> int:
    """Return the tokens for a lease: a small part of the rest, so that little is idle elsewhere, and in the end 0."""
    return min(wanted, room // _LEASED_PART)


def time_of(tokens: int, rate: int) -> int:
    """Return the nanoseconds in which a bucket of `rate` tokens a second gets `tokens`, rounded up."""
    return -(-tokens * NS_PER_S // rate)


def leaves_room(tenant: int, own: int, held: int, left: int) -> bool:
    """True if a tenant that holds `own` of the `held` part of a queue may take more, if `left` is free after that.

    A key may take what `leaves_as_much` allows. Calls without a key, tenant 0, count as those of one key, and may fill
    the queue if no others are in it.
    """
    return left >= 0 and (leaves_as_much(own, left) or (not tenant and own == held))
