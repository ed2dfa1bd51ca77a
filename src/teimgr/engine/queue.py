"""The queue between tokenizer and device: two lanes, batches cut by tokens, nothing starved.

What lives here decides and does no inference, so it needs neither torch nor a model. The rules of `next_batch`:

1. Cancelled entries vanish; entries past their deadline are handed back apart, to be failed.
2. The interactive lane goes first. While bulk entries wait behind it, every interactive batch earns the bulk lane
   credit, and with enough credit one bulk batch goes between, so that bulk keeps about `bulk_share` of the device.
3. A batch holds the lane's oldest entry and then those of nearest length, until a bound is reached. So no entry can
   be overtaken for ever, and neighbours of equal length are together.
4. A bulk batch is small while interactive entries were seen lately: the next query waits for at most that batch.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from teimgr.engine.batch import Encoded
from teimgr.engine.job import Job, Lane


@dataclass(slots=True, eq=False)
class QueueEntry:
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
class BatchDraft:
    """What the queue gave out: the entries of one batch, and those whose deadline passed while they waited."""

    entries: list[QueueEntry] = field(default_factory=list)
    expired: list[QueueEntry] = field(default_factory=list)
    tokens: int = 0


class LengthBuckets:
    """The waiting entries of one lane, by length and by age. Every `now` is a monotonic moment."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._by_length: dict[int, deque[QueueEntry]] = {}
        self._lengths: list[int] = []  # ascending, of the buckets that hold something
        self._by_age: deque[QueueEntry] = deque()  # taken entries leave it when they reach its head

    def put(self, entry: QueueEntry) -> None:
        """Add an entry behind those of its length."""
        bucket = self._by_length.get(entry.length)
        if bucket is None:
            bucket = self._by_length[entry.length] = deque()
            insort(self._lengths, entry.length)
        bucket.append(entry)
        self._by_age.append(entry)
        self.tokens += entry.length
        self.texts += 1

    def take(self, budget_tokens: int, budget_texts: int | None, now: float) -> BatchDraft:
        """The oldest entry and those of nearest length, within both budgets; expired entries met on the way."""
        take = BatchDraft()
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

    def drain(self) -> list[QueueEntry]:
        """Empty it; what waited, oldest first."""
        waiting = [entry for entry in self._by_age if not entry.taken]
        self._by_length.clear()
        self._lengths.clear()
        self._by_age.clear()
        self.tokens = self.texts = 0
        return waiting

    def _oldest(self, take: BatchDraft, now: float) -> QueueEntry | None:
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

    def _hand_out(self, entry: QueueEntry, take: BatchDraft, now: float) -> None:
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


def _fits(take: BatchDraft, length: int, budget_tokens: int, budget_texts: int | None) -> bool:
    if not take.entries:
        return True
    if budget_texts is not None and len(take.entries) >= budget_texts:
        return False
    return take.tokens + length <= budget_tokens


# What a batch costs beside its tokens, in tokens: one short query alone keeps the device busy for about this much.
_BATCH_OVERHEAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The bounds of a batch. An entry longer than a token bound rides alone."""

    tokens: int
    bulk_tokens_beside_interactive: int
    texts: int | None = None
    bulk_share: float = 0.2
    interactive_memory_s: float = 1.0


class EntryQueue:
    """Entries of both lanes; any thread puts, one thread takes.

    `clock` gives monotonic seconds. `close` lets the taker empty the queue first, `abandon` does not.
    """

    def __init__(self, limits: BatchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._shelves = {lane: LengthBuckets() for lane in Lane}
        self._bulk_credit = 0.0
        self._interactive_seen = -float("inf")
        self._closed = False
        self._abandoned = False

    def put(self, entries: Iterable[QueueEntry]) -> None:
        """Queue `entries`, each in the lane of its job."""
        with self._changed:
            for entry in entries:
                self._shelves[entry.job.lane].put(entry)
                if entry.job.lane is Lane.INTERACTIVE:
                    self._interactive_seen = self._clock()
            self._changed.notify()

    def next_batch(self, timeout_s: float) -> BatchDraft | None:
        """The next batch; an empty one after `timeout_s` without entries; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self), timeout_s)
            if self._abandoned or (self._closed and not len(self)):
                return None
            return self._take()

    def tokens(self, lane: Lane) -> int:
        """Tokens that wait in `lane`."""
        return self._shelves[lane].tokens

    def texts(self, lane: Lane) -> int:
        """Entries that wait in `lane`."""
        return self._shelves[lane].texts

    def __len__(self) -> int:
        return sum(shelf.texts for shelf in self._shelves.values())

    def drain(self) -> list[QueueEntry]:
        """Take everything out, for a queue that nobody will serve any more."""
        with self._changed:
            left = [entry for shelf in self._shelves.values() for entry in shelf.drain()]
            return [entry for entry in left if not entry.job.cancelled]

    def close(self) -> None:
        """No more entries will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Give out nothing more, whatever waits."""
        with self._changed:
            self._closed = self._abandoned = True
            self._changed.notify_all()

    def _take(self) -> BatchDraft:
        lane = self._turn()
        take = self._shelves[lane].take(self._budget(lane), self._limits.texts, self._clock())
        self._settle(lane, take.tokens)
        return take

    def _turn(self) -> Lane:
        interactive, bulk = self._shelves[Lane.INTERACTIVE], self._shelves[Lane.BULK]
        if not interactive.texts or not bulk.texts:
            self._bulk_credit = 0.0
            return Lane.INTERACTIVE if interactive.texts else Lane.BULK
        due = self._bulk_credit >= self._limits.bulk_tokens_beside_interactive
        return Lane.BULK if due else Lane.INTERACTIVE

    def _budget(self, lane: Lane) -> int:
        recently = self._clock() - self._interactive_seen < self._limits.interactive_memory_s
        if lane is Lane.BULK and recently:
            return self._limits.bulk_tokens_beside_interactive
        return self._limits.tokens

    def _settle(self, lane: Lane, tokens: int) -> None:
        """Credit or charge the bulk lane for a batch; without bulk entries waiting, `_turn` forgets the credit."""
        cost = tokens + _BATCH_OVERHEAD_TOKENS
        share = self._limits.bulk_share
        if lane is Lane.INTERACTIVE:
            self._bulk_credit += cost * share / (1 - share)
        else:
            self._bulk_credit = max(0.0, self._bulk_credit - cost)
