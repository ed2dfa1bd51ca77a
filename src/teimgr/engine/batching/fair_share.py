"""Fair sharing of a lane between tenants: each has a virtual counter of tokens, and the lowest counter is served next.

After Sheng et al. 2024 (arXiv 2401.00588). A text that is taken into a batch adds its tokens, divided by the tenant's
weight. A tenant that returns after a pause starts at the lowest counter of the waiting tenants, so a pause earns no
credit. For two tenants with texts always waiting, the counters differ by at most twice the largest text divided by the
weight. No capacity is reserved: a tenant that waits alone gets all of it. `LengthBuckets` has the waiting texts of one
tenant, by length and age.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Job, Share


@dataclass(slots=True, eq=False)
class QueueEntry:
    """Rows of a job, tokenized, all of `length` tokens: text i of `encoded` is row `rows[i]` (int64 [texts])."""

    job: Job
    rows: NDArray[np.intp]
    encoded: Encoded
    enqueued_ns: int = 0
    taken: bool = False
    texts: int = field(init=False)
    length: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.texts = len(self.rows)
        self.length = self.encoded.length
        self.tokens = self.texts * self.length

    def mark_enqueued(self, now_ns: int) -> None:
        self.enqueued_ns = now_ns

    def is_late(self, now: float, token_s: float = 0.0) -> bool:
        """True if the deadline is past, or will be before one of the texts is computed, in `token_s` seconds a token.

        `now` is a monotonic moment in seconds.
        """
        return self.job.deadline is not None and now + token_s * self.length > self.job.deadline

    def some(self, which: Sequence[int]) -> QueueEntry:
        """Return another entry with some of its rows, by position; this entry must not be used afterwards."""
        return QueueEntry(self.job, self.rows[which], self.encoded.part(which), self.enqueued_ns)

    def split(self, texts: int) -> QueueEntry:
        """Move the first rows, fewer than it has, from this entry into a new one."""
        first = QueueEntry(self.job, self.rows[:texts], self.encoded.part(slice(texts)), self.enqueued_ns)
        self.rows, self.encoded = self.rows[texts:], self.encoded.part(slice(texts, None))
        self.texts -= texts
        self.tokens -= first.tokens
        return first


def halves(entries: Sequence[QueueEntry]) -> tuple[list[QueueEntry], list[QueueEntry]]:
    """Split the entries of a batch of at least two texts into halves; the second may have one text more."""
    left = sum(entry.texts for entry in entries) // 2
    first: list[QueueEntry] = []
    second: list[QueueEntry] = []
    for entry in entries:
        if 0 < left < entry.texts:
            first.append(entry.split(left))
            left = 0
        (first if left else second).append(entry)
        left -= entry.texts if left else 0
    return first, second


@dataclass(slots=True)
class BatchDraft:
    """The entries of the next batch, and those that expired while they waited."""

    entries: list[QueueEntry] = field(default_factory=list)
    expired: list[QueueEntry] = field(default_factory=list)
    texts: int = 0
    tokens: int = 0

    def room(self, length: int, budget_tokens: int, budget_texts: int | None) -> int:
        """Return how many more texts of `length` tokens fit both budgets; an empty batch fits at least one."""
        room = (budget_tokens - self.tokens) // length
        if budget_texts is not None:
            room = min(room, budget_texts - self.texts)
        return room if self.texts else max(room, 1)


class LengthBuckets:
    """The waiting entries of one tenant in a lane, by length and age; `now` and `token_s` are as in
    `QueueEntry.is_late`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._by_length: dict[int, deque[QueueEntry]] = {}
        self._lengths: list[int] = []  # ascending, of non-empty buckets
        self._by_age: deque[QueueEntry] = deque()  # taken entries are removed when they reach its head

    def put(self, entry: QueueEntry) -> None:
        bucket = self._by_length.get(entry.length)
        if bucket is None:
            bucket = self._by_length[entry.length] = deque()
            insort(self._lengths, entry.length)
        bucket.append(entry)
        self._by_age.append(entry)
        self.tokens += entry.tokens
        self.texts += entry.texts

    def take(
        self, draft: BatchDraft, budget_tokens: int, budget_texts: int | None, now: float, token_s: float = 0.0
    ) -> None:
        """Move the oldest texts and those of nearest length into `draft`, within both budgets, and expired ones before
        them.

        The last entry may be taken in part; its remaining rows keep their place.
        """
        oldest = self._oldest(draft, now, token_s)
        if oldest is None:
            return
        for length in list(self._nearest_lengths(oldest.length)):
            bucket = self._by_length[length]
            while bucket and (room := draft.room(length, budget_tokens, budget_texts)) > 0:
                head = bucket[0]
                fits = head.texts <= room or head.job.cancelled or head.is_late(now, token_s)
                self._remove(bucket.popleft() if fits else head.split(room), draft, now, token_s)
            if not bucket:
                self._drop_bucket(length)
            if draft.tokens >= budget_tokens or draft.texts == budget_texts:
                break

    def take_oldest(self, texts: int, draft: BatchDraft, now: float, token_s: float = 0.0) -> None:
        """Move up to `texts` of the oldest texts into `draft`, and expired ones before them."""
        while (head := self._oldest(draft, now, token_s)) is not None and texts > 0:
            bucket = self._by_length[head.length]
            part = bucket.popleft() if head.texts <= texts else head.split(texts)
            texts -= part.texts
            self._remove(part, draft, now, token_s)
            if not bucket:
                self._drop_bucket(head.length)

    def oldest(self, tokens: int, texts: int | None) -> list[tuple[int, int]]:
        """Return length and number of the oldest waiting texts, up to the one that reaches `tokens`; at most
        `texts`."""
        runs: list[tuple[int, int]] = []
        for entry in self._by_age:
            if entry.taken or entry.job.cancelled:
                continue
            length = entry.length
            count = min(entry.texts, -(-tokens // length))
            if texts is not None:
                count = min(count, texts)
                texts -= count
            runs.append((length, count))
            tokens -= count * length
            if tokens <= 0 or texts == 0:
                break
        return runs

    def drain(self) -> list[QueueEntry]:
        """Remove and return all entries, oldest first."""
        waiting = [entry for entry in self._by_age if not entry.taken]
        self._by_length.clear()
        self._lengths.clear()
        self._by_age.clear()
        self.tokens = self.texts = 0
        return waiting

    def _oldest(self, draft: BatchDraft, now: float, token_s: float) -> QueueEntry | None:
        """Return the oldest live entry, which is also the head of its bucket; expired entries before it are removed."""
        while self._by_age:
            head = self._by_age[0]
            if not head.taken and not head.job.cancelled and not head.is_late(now, token_s):
                return head
            self._by_age.popleft()
            if not head.taken:
                bucket = self._by_length[head.length]
                self._remove(bucket.popleft(), draft, now, token_s)
                if not bucket:
                    self._drop_bucket(head.length)
        return None

    def _nearest_lengths(self, anchor: int) -> Iterator[int]:
        """Yield the waiting lengths by distance from `anchor`, the shorter of two equally near ones first."""
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

    def _remove(self, entry: QueueEntry, draft: BatchDraft, now: float, token_s: float) -> None:
        entry.taken = True
        self.tokens -= entry.tokens
        self.texts -= entry.texts
        if entry.job.cancelled:
            return
        if entry.is_late(now, token_s):
            draft.expired.append(entry)
            return
        draft.entries.append(entry)
        if entry.job.account is not None:
            entry.job.account.took(entry.tokens)
        draft.texts += entry.texts
        draft.tokens += entry.tokens

    def _drop_bucket(self, length: int) -> None:
        del self._by_length[length]
        del self._lengths[bisect_left(self._lengths, length)]


class FairLane:
    """The waiting entries of one lane by tenant; otherwise like `LengthBuckets`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._waiting: dict[int, LengthBuckets] = {}
        self._shares: dict[int, Share] = {}  # waiting tenants
        self._served: dict[int, float] = {}
        self._last: dict[int, float] = {}  # by priority, the counter of the last tenant that waited

    def put(self, entry: QueueEntry) -> None:
        share = entry.job.share
        buckets = self._waiting.get(share.tenant)
        if buckets is None:
            buckets = self._waiting[share.tenant] = LengthBuckets()
            self._lift(share)
        buckets.put(entry)
        self.tokens += entry.tokens
        self.texts += entry.texts

    def take(self, budget_tokens: int, budget_texts: int | None, now: float, token_s: float = 0.0) -> BatchDraft:
        """Remove the next texts within both budgets, and expired ones before them.

        If all texts fit, all are taken. From a single tenant, its oldest text and those of nearest length are taken;
        from several tenants, the oldest texts of each.
        """
        draft = BatchDraft()
        fit = self.tokens <= budget_tokens and (budget_texts is None or self.texts <= budget_texts)
        if fit or len(self._waiting) == 1:
            for tenant, buckets in self._waiting.items():
                before = draft.tokens
                buckets.take(draft, budget_tokens, budget_texts, now, token_s)
                self._count(tenant, draft.tokens - before)
        else:
            for tenant, texts in self._turns(budget_tokens, budget_texts).items():
                before = draft.tokens
                self._waiting[tenant].take_oldest(texts, draft, now, token_s)
                self._count(tenant, draft.tokens - before)
        for tenant in [each for each, buckets in self._waiting.items() if not buckets.texts]:
            del self._waiting[tenant]
            share = self._shares.pop(tenant)
            self._last[share.priority] = self._served[tenant]
        self.tokens = sum([buckets.tokens for buckets in self._waiting.values()])
        self.texts = sum([buckets.texts for buckets in self._waiting.values()])
        return draft

    def tokens_before(self, share: Share) -> int:
        """Return the tokens that are taken before a further text of a tenant, by its share."""
        if self._waiting.keys() <= {share.tenant}:
            return self.tokens
        own = self._waiting[share.tenant].tokens if share.tenant in self._waiting else 0
        before = own
        for tenant, buckets in self._waiting.items():
            other = self._shares[tenant]
            if tenant == share.tenant or other.priority > share.priority:
                continue
            is_first = other.priority < share.priority
            before += buckets.tokens if is_first else min(buckets.tokens, own * other.weight // share.weight)
        return before

    def drain(self) -> list[QueueEntry]:
        """Remove and return all entries, the oldest of each tenant first."""
        left = [entry for buckets in self._waiting.values() for entry in buckets.drain()]
        self._waiting.clear()
        self._shares.clear()
        self.tokens = self.texts = 0
        return left

    def _lift(self, share: Share) -> None:
        """Raise a tenant's counter when it starts to wait: to the lowest counter of its priority, or the last one's."""
        others = [self._served[each.tenant] for each in self._shares.values() if each.priority == share.priority]
        least = min(others) if others else self._last.get(share.priority, 0.0)
        self._served[share.tenant] = max(self._served.get(share.tenant, 0.0), least)
        self._shares[share.tenant] = share

    def _count(self, tenant: int, tokens: int) -> None:
        self._served[tenant] += tokens / self._shares[tenant].weight

    def _turns(self, budget_tokens: int, budget_texts: int | None) -> dict[int, int]:
        """Return how many of its oldest texts each tenant has in the next batch, which fits at least one text.

        A tenant's counter before each of its texts is known, so texts are sorted by it; this equals taking one text at
        a time from the tenant with the lowest counter. A tenant without a text in the batch may only have expired ones,
        which are removed.
        """
        turns: dict[int, int] = {}
        for priority in sorted({share.priority for share in self._shares.values()}):
            shares = [share for share in self._shares.values() if share.priority == priority]
            parts = [_Part(share, self._served[share.tenant], self._waiting[share.tenant]) for share in shares]
            _fill(parts, budget_tokens, budget_texts)
            _cut(parts, budget_tokens, budget_texts, least=0 if any(turns.values()) else 1)
            turns |= {part.tenant: part.texts for part in parts}
            budget_tokens -= sum([part.tokens for part in parts])
            if budget_texts is not None:
                budget_texts -= sum([part.texts for part in parts])
            if budget_tokens <= 0 or budget_texts == 0 or any(part.tokens < part.waiting for part in parts):
                break
        return turns


class _Part:
    """A tenant's oldest texts in a batch, as `runs` of a length and a number each."""

    __slots__ = ("buckets", "counter", "runs", "tenant", "texts", "tokens", "waiting", "weight")

    def __init__(self, share: Share, counter: float, buckets: LengthBuckets) -> None:
        self.tenant, self.weight, _ = share
        self.counter = counter
        self.buckets = buckets
        self.waiting = buckets.tokens
        self.runs: list[tuple[int, int]] = []
        self.tokens = self.texts = 0

    def take_below(self, level: float, most_texts: int | None) -> bool:
        """Take the texts whose counter is below `level`; False if fewer wait than counted, since some have expired."""
        wanted = self.waiting
        if level < math.inf:
            wanted = min(wanted, math.ceil((level - self.counter) * self.weight))
        self.runs = self.buckets.oldest(wanted, most_texts) if wanted > 0 else []
        self.tokens = sum([length * count for length, count in self.runs])
        self.texts = sum([count for _, count in self.runs])
        if self.tokens >= wanted or self.texts == most_texts:
            return True
        self.waiting = self.tokens
        return False

    @property
    def last(self) -> float:
        """The counter before the last text."""
        return self.counter + (self.tokens - self.runs[-1][0]) / self.weight

    def put_back(self) -> None:
        """Leave the last text for a later batch."""
        length, count = self.runs.pop()
        if count > 1:
            self.runs.append((length, count - 1))
        self.tokens -= length
        self.texts -= 1


def _fill(parts: Sequence[_Part], budget_tokens: int, budget_texts: int | None) -> None:
    """Let the parts take the first texts by counter, enough for the budget or all there are."""
    while True:  # repeats if counted texts have expired
        level = _level(parts, budget_tokens)
        waits = [part.take_below(level, budget_texts) for part in parts]
        if all(waits):
            return


def _level(parts: Sequence[_Part], budget_tokens: float) -> float:
    """Return the counter that all tenants reach with this budget if texts were divisible; infinite if all texts fit."""
    points = [(part.counter, part.weight) for part in parts]
    points += [(part.counter + part.waiting / part.weight, -part.weight) for part in parts]
    level, slope = 0.0, 0
    for at, change in sorted(points):
        if slope and (at - level) * slope >= budget_tokens:
            return level + budget_tokens / slope
        budget_tokens -= (at - level) * slope
        level, slope = at, slope + change
    return math.inf


def _cut(parts: Sequence[_Part], budget_tokens: int, budget_texts: int | None, least: int) -> None:
    """Put back the last texts by counter until both budgets hold; at least `least` texts stay."""
    tokens, texts = sum([part.tokens for part in parts]), sum([part.texts for part in parts])
    order = [(-part.last, -part.tenant, part) for part in parts if part.runs]
    heapify(order)
    while texts > least and (tokens > budget_tokens or (budget_texts is not None and texts > budget_texts)):
        part = order[0][2]
        tokens -= part.runs[-1][0]
        texts -= 1
        part.put_back()
        if part.runs:
            heapreplace(order, (-part.last, -part.tenant, part))
        else:
            heappop(order)


class HasShare(Protocol):
    """An item with a tenant."""

    @property
    def share(self) -> Share:
        """The share that it belongs to."""


ItemT = TypeVar("ItemT", bound=HasShare)


class TenantTurns(Generic[ItemT]):
    """A queue like a deque in which tenants take turns, so that no tenant waits for all items of another."""

    def __init__(self) -> None:
        self._of: dict[int, deque[ItemT]] = {}  # in order of turns

    def __len__(self) -> int:
        return sum([len(each) for each in self._of.values()])

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[ItemT]:
        for each in self._of.values():
            yield from each

    def append(self, item: ItemT) -> None:
        tenant = item.share.tenant
        waiting = self._of.get(tenant)
        if waiting is None:
            waiting = self._of[tenant] = deque()
        waiting.append(item)

    def appendleft(self, item: ItemT) -> None:
        """Put back an item that was taken: it is its tenant's next one."""
        tenant = item.share.tenant
        waiting = self._of.get(tenant)
        if waiting is None:
            waiting = self._of[tenant] = deque()
        waiting.appendleft(item)

    def popleft(self) -> ItemT:
        """Return the next item of the tenant whose turn it is."""
        tenant = next(iter(self._of))
        waiting = self._of[tenant]
        item = waiting.popleft()
        if not waiting:
            del self._of[tenant]
        elif len(self._of) > 1:
            self._of[tenant] = self._of.pop(tenant)  # moves it to the end
        return item

    def clear(self) -> None:
        self._of.clear()

    def part_before(self, tenant: int) -> float:
        """Return the share of the items that come before a further item of a tenant; 1 for all."""
        if self._of.keys() <= {tenant}:
            return 1.0
        own = len(self._of[tenant]) if tenant in self._of else 0
        return min(1.0, own * len(self._of) / len(self))
