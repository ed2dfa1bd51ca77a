"""The texts of one tenant that wait in a lane, by length and age, and the batches made from them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Job


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
        self._by_age: deque[QueueEntry] = deque()  # taken entries leave it when they reach its head

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
