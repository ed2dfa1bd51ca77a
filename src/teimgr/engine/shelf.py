"""Entries that wait, found by length (for batches) and by age (so that none waits for ever)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from teimgr.engine.batch import Encoded
from teimgr.engine.job import Job


@dataclass(slots=True, eq=False)
class Entry:
    """One row of a job, as the model reads it."""

    job: Job
    row: int
    encoded: Encoded
    enqueued_ns: int = 0
    taken: bool = False

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.encoded.ids)

    def expired(self, now: float) -> bool:
        """Whether the caller's deadline has passed at the monotonic moment `now`."""
        return self.job.deadline is not None and now > self.job.deadline


@dataclass(slots=True)
class Take:
    """What the queue gave out: the entries of one batch, and those whose deadline passed while they waited."""

    entries: list[Entry] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
    tokens: int = 0


class Shelf:
    """The waiting entries of one lane, by length and by age. Every `now` is a monotonic moment."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._by_length: dict[int, deque[Entry]] = {}
        self._lengths: list[int] = []  # ascending, of the buckets that hold something
        self._by_age: deque[Entry] = deque()  # taken entries leave it when they reach its head

    def put(self, entry: Entry) -> None:
        """Add an entry behind those of its length."""
        bucket = self._by_length.get(entry.length)
        if bucket is None:
            bucket = self._by_length[entry.length] = deque()
            insort(self._lengths, entry.length)
        bucket.append(entry)
        self._by_age.append(entry)
        self.tokens += entry.length
        self.texts += 1

    def take(self, budget_tokens: int, budget_texts: int | None, now: float) -> Take:
        """The oldest entry and those of nearest length, within both budgets; expired entries met on the way."""
        take = Take()
        oldest = self._oldest(take, now)
        if oldest is None:
            return take
        for length in list(self._outwards(oldest.length)):
            bucket = self._by_length[length]
            while bucket and _fits(take, length, budget_tokens, budget_texts):
                self._hand_out(bucket.popleft(), take, now)
            if not bucket:
                self._forget(length)
            if take.tokens >= budget_tokens or len(take.entries) == budget_texts:
                break
        return take

    def drain(self) -> list[Entry]:
        """Empty it; what waited, oldest first."""
        waiting = [entry for entry in self._by_age if not entry.taken]
        self._by_length.clear()
        self._lengths.clear()
        self._by_age.clear()
        self.tokens = self.texts = 0
        return waiting

    def _oldest(self, take: Take, now: float) -> Entry | None:
        """The head by age, after dropping the dead entries before it: it is also the head of its bucket."""
        while self._by_age:
            head = self._by_age[0]
            if not head.taken and not head.job.cancelled and not head.expired(now):
                return head
            self._by_age.popleft()
            if not head.taken:
                bucket = self._by_length[head.length]
                self._hand_out(bucket.popleft(), take, now)
                if not bucket:
                    self._forget(head.length)
        return None

    def _outwards(self, anchor: int) -> Iterator[int]:
        """The waiting lengths, nearest to `anchor` first, the shorter of two equally near ones first."""
        above = bisect_left(self._lengths, anchor)
        below = above - 1
        lengths = self._lengths.copy()
        while below >= 0 or above < len(lengths):
            if above == len(lengths) or (below >= 0 and anchor - lengths[below] <= lengths[above] - anchor):
                yield lengths[below]
                below -= 1
            else:
                yield lengths[above]
                above += 1

    def _hand_out(self, entry: Entry, take: Take, now: float) -> None:
        entry.taken = True
        self.tokens -= entry.length
        self.texts -= 1
        if entry.job.cancelled:
            return
        if entry.expired(now):
            take.expired.append(entry)
            return
        take.entries.append(entry)
        take.tokens += entry.length

    def _forget(self, length: int) -> None:
        del self._by_length[length]
        del self._lengths[bisect_left(self._lengths, length)]


def _fits(take: Take, length: int, budget_tokens: int, budget_texts: int | None) -> bool:
    if not take.entries:
        return True
    if budget_texts is not None and len(take.entries) >= budget_texts:
        return False
    return take.tokens + length <= budget_tokens
