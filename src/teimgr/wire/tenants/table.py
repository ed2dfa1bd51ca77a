"""The file of the tenants of a host: quotas, their use, and counters, mapped by daemon and workers.

It is an array of 64-bit words. The daemon writes limits and names of the tenants, and each worker the counters in its
own row. All workers change the state of the quotas, atomically (`worker/tenant_meter.py`). A row belongs to the worker
that has locked it; the kernel releases the lock when the process ends. The daemon then adds up the counters of the row
and clears it, so a killed worker leaves no tokens in flight.

    header    [HEADER]
    tenants   [TENANTS][TENANT_WORDS]     name, limits; state of the quotas
    rows      [ROWS][ROW_WORDS]           generation, instance and model of a worker
    in flight [ROWS][TENANTS]             tokens admitted and not answered
    counters  [ROWS][TENANTS][COUNTERS]   `Counter`

Quotas are tokens a second and a day, and tokens in flight, charged and refunded by pure functions of a state and a
moment. Tokens a second are a token bucket in the form of GCRA: `arrival_ns` is the moment at which the bucket will be
full again. A charge moves that moment on by the time that its tokens cost, and is refused if it would then be more than
the burst ahead of now. So in any window of T seconds at most `burst + rate * T` tokens are admitted.
`engine/native/tenants.c` does the same on a shared file; a test compares the two.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
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


FILE = "tenants-1"
"""In the run directory; a new layout gets a new number."""
TENANTS, ROWS = 1024, 256
_HEADER_WORDS = 64
TENANT_WORDS = 16
_ROW_WORDS = 96
_TENANTS_AT = _HEADER_WORDS
_ROWS_AT = _TENANTS_AT + TENANTS * TENANT_WORDS
IN_FLIGHT_AT = _ROWS_AT + ROWS * _ROW_WORDS
WORD_BYTES = 8
DAY_SHIFT = 40  # the word of the day's tokens: the day in the upper bits
DAY_TOKENS = (1 << DAY_SHIFT) - 1
ANONYMOUS = 0
"""The tenant of calls without a key."""


class Word(IntEnum):
    """The words of a tenant; tenants.c has the same."""

    NAME = 0
    RATE = 1
    BURST = 2
    DAILY = 3
    CONCURRENT = 4
    SHADOW = 5
    WEIGHT = 6
    PRIORITY = 7
    SPENT = 10
    # 8 and 9 are the bucket of workers of an earlier version, which may run at the same time.
    ARRIVAL = 11  # without the refunds
    REFUNDED = 12


class Counter(IntEnum):
    """The counters of each tenant and worker."""

    TOKENS = 0
    TEXTS = 1
    CALLS = 2
    REFUSED = 3
    SHADOWED = 4  # calls that would have been refused without `shadow`


COUNTERS = len(Counter)
"""Counters per tenant in a row; a constant, because `len` of the enum takes as long as counting."""

_COUNTERS_AT = IN_FLIGHT_AT + ROWS * TENANTS
_WORDS = _COUNTERS_AT + ROWS * TENANTS * COUNTERS
_NAME_BYTES = (_ROW_WORDS - 2) * WORD_BYTES  # instance and model, separated by a NUL
_BOOT = 0  # word of the header: the boot of the host that its times belong to
VERSION_AT = 1
"""The word that changes whenever the tenants are configured."""
USED_ROWS_AT = 2
"""The word with the number of rows, from the first one on, that have ever been used."""


class TenantKey(NamedTuple):
    """A tenant in the configuration."""

    name: str
    limits: Limits = Limits()
    shadow: bool = False
    weight: int = 1
    priority: int = 0


class RowCounts(NamedTuple):
    """The counters of one worker: by tenant, one per member of `Counter`."""

    generation: int
    instance: str
    model: str
    counts: dict[int, tuple[int, ...]]


class TenantTable:
    """The mapped file at `path`, which is created if it is missing.

    Raises:
        OSError: it cannot be created or mapped.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self.file, 0, _WORDS * WORD_BYTES)  # fails here if the disk is full: no SIGBUS later
            self.memory = mmap.mmap(self.file, _WORDS * WORD_BYTES)
        except BaseException:
            os.close(self.file)
            raise
        self.words = memoryview(self.memory).cast("q")

    def close(self) -> None:
        """Unmap the file; rows that this process has locked are given back."""
        self.words.release()
        self.memory.close()
        os.close(self.file)

    def begin(self, boot: int) -> None:
        """Clear the moments of an earlier start of the host, whose clock was another one."""
        if self.words[_BOOT] != boot:
            for tenant in range(TENANTS):
                at = tenant_at(tenant)
                self.words[at + Word.ARRIVAL] = self.words[at + Word.REFUNDED] = 0
            self.words[_BOOT] = boot

    def configure(self, keys: list[TenantKey]) -> dict[str, int]:
        """Write the limits of `keys`; return the number of each by name. A name keeps its number.

        Raises:
            ValueError: there are more than the file has room for.
        """
        if len(keys) >= TENANTS:
            raise ValueError(f"{len(keys)} keys are more than {TENANTS - 1}")
        wanted = {_digest(key.name): key for key in keys}
        held = {self.words[tenant_at(tenant) + Word.NAME]: tenant for tenant in range(1, TENANTS)}
        held.pop(0, None)
        free = iter(sorted(set(range(1, TENANTS)) - set(held.values())))
        gone = iter([tenant for name, tenant in held.items() if name not in wanted])
        numbers: dict[str, int] = {}
        for name, key in wanted.items():
            tenant = held.get(name)
            if tenant is None:
                tenant = next(free, None) or next(gone)
                self._write_words(tenant, dict.fromkeys(Word, 0))
            self._write_words(tenant, {Word.NAME: name} | _words_of(key))
            numbers[key.name] = tenant
        self.words[VERSION_AT] += 1  # last: readers of the new version must read the new words
        return numbers

    def rows(self) -> Iterator[tuple[int, RowCounts, bool]]:
        """The rows in use: number, counters, and whether the worker has ended."""
        for row in range(ROWS):
            if generation := self.words[_row_at(row)]:
                yield row, self._counts(row, generation), not self._is_locked(row)

    def callers(self, instance: str) -> dict[int, int]:
        """The tokens of each tenant in the rows of an instance, of those that have some."""
        found: dict[int, int] = {}
        begin = f"{instance}\0".encode()[:_NAME_BYTES]
        tenants = self._named()
        for row in range(self.words[USED_ROWS_AT]):
            at = (_row_at(row) + 2) * WORD_BYTES
            if self.words[_row_at(row)] and self.memory[at : at + len(begin)] == begin:
                for tenant in tenants:
                    if tokens := self.words[counter_at(row, tenant) + Counter.TOKENS]:
                        found[tenant] = found.get(tenant, 0) + tokens
        return found

    def clear(self, row: int) -> None:
        """Make a row free whose worker has ended."""
        if not self._lock(row):  # another worker has claimed and cleared it
            return
        self._wipe(row)
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, row))

    def claim(self, instance: str, model: str) -> int | None:
        """Return a free row, locked for as long as the file is open, or None.

        A row whose counters were not yet added up is not free.
        """
        for row in range(ROWS):
            if self.words[_row_at(row)] == 0 and self._lock(row):
                if self.words[_row_at(row)] != 0:  # another worker used it since the check
                    fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, row))
                    continue
                self._wipe(row)
                self.words[USED_ROWS_AT] = max(self.words[USED_ROWS_AT], row + 1)
                text = f"{instance}\0{model}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
                at = _row_at(row)
                self.words[at + 2 : at + _ROW_WORDS] = memoryview(text).cast("q")
                self.words[at] = int.from_bytes(os.urandom(7), "little") | 1
                return row
        return None

    def in_flight(self, tenant: int) -> int:
        """Return the tokens of a tenant that are admitted and not answered."""
        return sum(self.words[IN_FLIGHT_AT + row * TENANTS + tenant] for row in range(self.words[USED_ROWS_AT]))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other open files of the table. Used only without the library, which needs no lock."""
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLKW, _lock_of(fcntl.F_WRLCK, _NO_ROW))
        try:
            yield
        finally:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, _NO_ROW))

    def limits(self, tenant: int) -> Limits:
        at = tenant_at(tenant)
        return Limits(*self.words[at + Word.RATE : at + Word.CONCURRENT + 1])

    def terms(self, tenant: int) -> tuple[bool, int, int]:
        """Return whether its quotas are only counted, its weight and its priority."""
        shadow, weight, priority = self.words[tenant_at(tenant) + Word.SHADOW : tenant_at(tenant) + Word.PRIORITY + 1]
        return shadow != 0, weight, priority

    def spent(self, tenant: int) -> Spent:
        at = tenant_at(tenant)
        word = self.words[at + Word.SPENT]
        refunded_ns = self.words[at + Word.REFUNDED]
        return Spent(self.words[at + Word.ARRIVAL] - refunded_ns, refunded_ns, word >> DAY_SHIFT, word & DAY_TOKENS)

    def write_spent(self, tenant: int, spent: Spent) -> None:
        """Write the state of a tenant's quotas. Used only without the library, under a lock of all workers."""
        arrival_ns, word = spent.arrival_ns + spent.refunded_ns, spent.day << DAY_SHIFT | spent.of_day
        self._write_words(tenant, {Word.ARRIVAL: arrival_ns, Word.REFUNDED: spent.refunded_ns, Word.SPENT: word})

    def _write_words(self, tenant: int, values: dict[Word, int]) -> None:
        for word, value in values.items():
            self.words[tenant_at(tenant) + word] = value

    def _counts(self, row: int, generation: int) -> RowCounts:
        at = _row_at(row)
        names = bytes(self.words[at + 2 : at + _ROW_WORDS]).rstrip(b"\0").decode("utf-8", "replace")
        instance, _, model = names.partition("\0")
        counts = {}
        for tenant in self._named():
            begin = counter_at(row, tenant)
            if any(words := self.words[begin : begin + COUNTERS].tolist()):
                counts[tenant] = tuple(words)
        return RowCounts(generation, instance, model, counts)

    def _named(self) -> list[int]:
        """The tenants that there are or were, and the anonymous one."""
        names = self.words[_TENANTS_AT:_ROWS_AT:TENANT_WORDS].tolist()
        return [ANONYMOUS, *(tenant for tenant, name in enumerate(names) if name)]

    def _wipe(self, row: int) -> None:
        for begin, size in (
            (IN_FLIGHT_AT + row * TENANTS, TENANTS),
            (counter_at(row, 0), TENANTS * COUNTERS),
            (_row_at(row), _ROW_WORDS),
        ):
            self.words[begin : begin + size] = memoryview(bytes(size * WORD_BYTES)).cast("q")

    def _lock(self, row: int) -> bool:
        try:
            fcntl.fcntl(self.file, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, row))
        except OSError:
            return False
        return True

    def _is_locked(self, row: int) -> bool:
        """True if another open file has locked the row."""
        answer = fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, _lock_of(fcntl.F_WRLCK, row))
        return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


def tenant_at(tenant: int) -> int:
    """Return the index of the first word of a tenant."""
    return _TENANTS_AT + tenant * TENANT_WORDS


def bucket_at(tenant: int) -> tuple[int, int]:
    """Return the indices of two words: the moment at which a tenant's bucket would be full again without refunds, and
    the sum of the refunds."""
    return tenant_at(tenant) + Word.ARRIVAL, tenant_at(tenant) + Word.REFUNDED


def spent_at(tenant: int) -> int:
    """Return the index of the word of the tokens of a day: the day, and `DAY_TOKENS` of it."""
    return tenant_at(tenant) + Word.SPENT


def counter_at(row: int, tenant: int) -> int:
    """Return the index of the first counter of a tenant in a row."""
    return _COUNTERS_AT + (row * TENANTS + tenant) * COUNTERS


def _row_at(row: int) -> int:
    return _ROWS_AT + row * _ROW_WORDS


def _words_of(key: TenantKey) -> dict[Word, int]:
    limits = dict(zip((Word.RATE, Word.BURST, Word.DAILY, Word.CONCURRENT), key.limits, strict=True))
    return limits | {Word.SHADOW: int(key.shadow), Word.WEIGHT: key.weight, Word.PRIORITY: key.priority}


def _digest(name: str) -> int:
    """Return a word for a name, never 0; the file does not have the names of keys."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little") | 1


_LOCK = "@hhqqi4x"  # struct flock of Linux
_NO_ROW = ROWS  # the row number whose bytes are locked for the state of the quotas


def _lock_of(kind: int, row: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, _row_at(row) * WORD_BYTES, _ROW_WORDS * WORD_BYTES, 0)
