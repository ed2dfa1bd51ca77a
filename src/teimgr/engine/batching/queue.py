"""The queue between tokenizer and device: two lanes, batches bounded by tokens, no starvation.

Needs neither torch nor a model. An entry holds the rows of a job that were tokenized together and have equal length, so
scheduling costs nothing per bulk text. The rules of `next_batch`:

1. Cancelled entries are dropped. Entries whose deadline has passed, or would pass before the device computed one of
   their texts, are returned separately, to be failed.
2. The interactive lane is served first. While bulk entries wait, every interactive batch earns the bulk lane credit;
   enough credit inserts one bulk batch, so bulk gets about `bulk_share` of the device.
3. A batch takes the lane's oldest texts, then those of nearest length, until a limit is reached. So no text starves,
   and texts of equal length are batched together. Several waiting tenants share by `FairLane`.
4. Bulk batches are small if interactive entries arrived recently: the next query waits for at most one such batch.

If each lane has its own thread (`BatchLimits.own_threads`), 2 and 4 do not apply: queries do not wait for bulk batches,
and the operating system divides the processor between the lanes.

`Charging` charges jobs to their accounts before the queue, when their tokens are known and not yet computed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from teimgr.engine.batching.fair_share import BatchDraft, FairLane, LengthBuckets, QueueEntry, halves
from teimgr.engine.job import Account, Job, Lane, Share
from teimgr.errors import TeimgrError

__all__ = ["BatchDraft", "EntryQueue", "LengthBuckets", "QueueEntry", "halves"]

MIN_TOKENS = 256
"""The lowest limit on a batch's tokens after batches that ran out of memory."""
_RAISE_AFTER_S = 60.0
_SAMPLE_S = 0.1  # shorter batches are merged into one sample
_SAMPLES = 32
_MAX_AGE_S = 30.0
_KNOWN_S = 0.05  # cache time of a throughput: computing it for every call would cost each some percent
# An estimate needs this many samples: the first batches are slow, and a slow text would dominate.
_MIN_SAMPLES = 4


# Texts and tokens per lane to tokenize ahead of the device; a text with a separate entry takes some hundred bytes in
# addition to its characters.
_AHEAD_TEXTS = 32_768
_AHEAD_TOKENS = 2**20
_AHEAD_BATCHES = 4


# The fixed cost of a batch, in tokens: that of one short query.
BATCH_OVERHEAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch. A text longer than the token limit is a batch alone.

    If `own_threads`, each lane has its own thread, and both run at the same time.
    """

    tokens: int
    bulk_tokens_beside_interactive: int
    texts: int | None = None
    bulk_share: float = 0.2
    interactive_memory_s: float = 1.0
    own_threads: bool = False


@dataclass(slots=True)
class _Sample:
    at: float
    seconds: float = 0.0
    tokens: int = 0


class LaneThroughput:
    """Tokens of batches that left texts waiting in their lane, and the time until its next batch. Times are monotonic.

    Batches that took everything do not count: they may be small, with a high cost per token. The figure includes
    everything that slows a lane: device, tokenizer, the other lane, other processes.
    """

    def __init__(self) -> None:
        self._samples: dict[Lane, deque[_Sample]] = {lane: deque(maxlen=_SAMPLES) for lane in Lane}
        self._last: dict[Lane, tuple[float, int]] = {}  # the last batch of each lane that still has texts waiting
        self._known: dict[Lane, tuple[float, float | None]] = {}  # the last throughput and its time

    def took(self, now: float, lane: Lane, tokens: int, waiting: Collection[Lane]) -> None:
        """Record a batch of `lane`; the lanes in `waiting` still have texts."""
        if (last := self._last.get(lane)) is not None:
            self._add(lane, last[0], now, last[1])
        self._last[lane] = now, tokens
        self._last = {one: last for one, last in self._last.items() if one in waiting}

    def idle(self) -> None:
        """Record that nothing waits in any lane: the time until the next batch does not count."""
        self._last.clear()

    def tokens_per_s(self, lane: Lane, now: float) -> float | None:
        """Return the throughput; None if the lane had no recent backlog. The slowest sample is ignored."""
        known = self._known.get(lane)
        if known is None or now - known[0] > _KNOWN_S:
            known = self._known[lane] = now, self._computed(lane, now)
        return known[1]

    def _computed(self, lane: Lane, now: float) -> float | None:
        recent = [one for one in self._samples[lane] if one.seconds >= _SAMPLE_S and now - one.at < _MAX_AGE_S]
        if len(recent) < _MIN_SAMPLES:
            return None
        slowest = min(recent, key=lambda one: one.tokens / one.seconds)
        counted = [one for one in recent if one is not slowest]
        return sum(one.tokens for one in counted) / sum(one.seconds for one in counted) or None

    def _add(self, lane: Lane, began: float, now: float, tokens: int) -> None:
        samples = self._samples[lane]
        if not samples or samples[-1].seconds >= _SAMPLE_S:
            samples.append(_Sample(now))
            self._known.clear()
        samples[-1].at = now
        samples[-1].seconds += now - began
        samples[-1].tokens += tokens


class TokenCap:
    """The maximum tokens of a batch: `most`, and fewer after a batch ran out of memory; used by one thread.

    Another process may have taken the memory, so the limit doubles after every minute without such a batch. A batch
    that runs out of memory costs several times its own time: its work is lost, and torch's cached memory is freed.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._tokens = most
        self._clock = clock
        self._changed_at = clock()

    @property
    def tokens(self) -> int:
        if self._tokens < self._most and self._clock() - self._changed_at >= _RAISE_AFTER_S:
            self._tokens, self._changed_at = min(self._most, 2 * self._tokens), self._clock()
        return self._tokens

    def did_not_fit(self, tokens: int) -> None:
        """Lower the limit after a batch of this many tokens ran out of memory."""
        self._tokens = min(self._tokens, max(MIN_TOKENS, tokens // 2))
        self._changed_at = self._clock()


class Feeder(Protocol):
    """Puts entries into the queue."""

    def waiting(self, lane: Lane) -> int:
        """Return the tokens of a lane on their way to the queue."""

    def room_was_made(self) -> None:
        """Called without the queue's lock after entries have left."""


class EntryQueue:
    """Entries of both lanes. Any thread puts entries; one thread takes the batches of a lane.

    `clock` returns monotonic seconds, `token_s` the minimum seconds per token. After `close` the remaining entries are
    still served; after `abandon` no entry is.
    """

    def __init__(
        self,
        limits: BatchLimits,
        clock: Callable[[], float] = time.monotonic,
        token_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._limits = limits
        self._clock = clock
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the thread of both lanes, or of bulk
        self._has_queries = threading.Condition(lock) if limits.own_threads else self._changed
        self.token_s = token_s
        self._lanes = {lane: FairLane() for lane in Lane}
        self.token_cap = TokenCap(limits.tokens, clock)
        self._bulk_credit = 0.0
        self._interactive_seen = -float("inf")
        self._closed = False
        self._abandoned = False
        self._throughput = LaneThroughput()
        self._feeder: Feeder | None = None

    def fed_by(self, feeder: Feeder) -> None:
        """Notify `feeder` when there is room, and count what waits there."""
        self._feeder = feeder

    def coming_tokens(self, lane: Lane) -> int:
        """Return the tokens of a lane on their way to the queue."""
        return self._feeder.waiting(lane) if self._feeder is not None else 0

    def put(self, entries: Iterable[QueueEntry]) -> None:
        with self._changed:
            lanes = set()
            for entry in entries:
                lane = entry.job.lane
                self._lanes[lane].put(entry)
                lanes.add(lane)
            if Lane.INTERACTIVE in lanes:
                self._interactive_seen = self._clock()
                self._has_queries.notify()
            if Lane.BULK in lanes:
                self._changed.notify()

    def fits_batch(self, texts: int, tokens: int) -> bool:
        """True if this is within the bounds of one batch."""
        return tokens <= self.token_cap.tokens and (self._limits.texts is None or texts <= self._limits.texts)

    def queries_were_served(self) -> None:
        """Keep bulk batches small for a while after queries that bypassed the queue, as after queries in it."""
        self._interactive_seen = self._clock()

    def next_batch(self, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> BatchDraft | None:
        """Return the next batch of `lanes`; an empty one after `timeout_s` without entries; None once closed and
        empty."""
        changed = self._has_queries if lanes == (Lane.INTERACTIVE,) else self._changed
        with changed:
            if not len(self) and not any(map(self.coming_tokens, Lane)):
                self._throughput.idle()  # entries counted as waiting were in the last batch or were cancelled
            changed.wait_for(lambda: self._closed or self._texts(lanes), timeout_s)
            if self._abandoned or (self._closed and not self._texts(lanes)):
                return None
            lane = self._next_lane() if len(lanes) > 1 else lanes[0]
            now = self._clock()
            draft = self._lanes[lane].take(self._budget(lane), self._limits.texts, now, self.token_s())
            self._settle(lane, draft.tokens)
            if draft.entries:
                left = [one for one in Lane if self._lanes[one].texts or self.coming_tokens(one)]
                self._throughput.took(now, lane, draft.tokens, left)
        if self._feeder is not None:
            self._feeder.room_was_made()
        return draft

    def tokens(self, lane: Lane) -> int:
        return self._lanes[lane].tokens

    def tokens_before(self, lane: Lane, share: Share) -> int:
        """Return the tokens that are taken before a further text of a tenant."""
        with self._changed:
            return self._lanes[lane].tokens_before(share)

    def texts(self, lane: Lane) -> int:
        return self._lanes[lane].texts

    def tokens_per_s(self, lane: Lane) -> float | None:
        """Return the throughput of a lane with a backlog; None if it had none recently."""
        with self._changed:
            return self._throughput.tokens_per_s(lane, self._clock())

    def has_room(self, lane: Lane) -> bool:
        """True if more of `lane` should be tokenized; False if enough waits for full batches of equal lengths."""
        waiting, ahead = self._lanes[lane], max(_AHEAD_TOKENS, _AHEAD_BATCHES * self._limits.tokens)
        return waiting.texts < _AHEAD_TEXTS and waiting.tokens < ahead

    def __len__(self) -> int:
        return self._texts(tuple(Lane))

    def _texts(self, lanes: Sequence[Lane]) -> int:
        return sum([self._lanes[lane].texts for lane in lanes])

    def drain(self) -> list[QueueEntry]:
        with self._changed:
            left = [entry for buckets in self._lanes.values() for entry in buckets.drain()]
            return [entry for entry in left if not entry.job.cancelled]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._has_queries.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._closed = self._abandoned = True
            self._changed.notify_all()
            self._has_queries.notify_all()

    def _next_lane(self) -> Lane:
        interactive, bulk = self._lanes[Lane.INTERACTIVE], self._lanes[Lane.BULK]
        if not interactive.texts or not bulk.texts:
            self._bulk_credit = 0.0
            return Lane.INTERACTIVE if interactive.texts else Lane.BULK
        due = self._bulk_credit >= self._limits.bulk_tokens_beside_interactive
        return Lane.BULK if due else Lane.INTERACTIVE

    def _budget(self, lane: Lane) -> int:
        recently = self._clock() - self._interactive_seen < self._limits.interactive_memory_s
        is_small = lane is Lane.BULK and recently and not self._limits.own_threads
        most = self._limits.bulk_tokens_beside_interactive if is_small else self._limits.tokens
        return min(most, self.token_cap.tokens)

    def _settle(self, lane: Lane, tokens: int) -> None:
        """Credit or charge the bulk lane for a batch; `_next_lane` resets the credit while no bulk entries wait."""
        cost = tokens + BATCH_OVERHEAD_TOKENS
        share = self._limits.bulk_share
        if lane is Lane.INTERACTIVE:
            self._bulk_credit += cost * share / (1 - share)
        else:
            self._bulk_credit = max(0.0, self._bulk_credit - cost)


FailedRow = tuple[Job, int, TeimgrError]


@dataclass(slots=True)
class _Held:
    """Tokenized rows of a job that has rows to be tokenized."""

    rows_left: int
    entries: list[QueueEntry] = field(default_factory=list)
    failures: list[FailedRow] = field(default_factory=list)


class Charging:
    """Holds back the rows of a job with an account until the last one is tokenized, then charges all of them at once.

    So a job is computed as a whole or not at all. Used by all threads that tokenize. If another host decides, `wake`
    is called once `take_decided` has the rows.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._held: dict[Job, _Held] = {}
        self._asked: dict[Job, _Held] = {}
        self._decided: list[tuple[Job, _Held]] = []

    @property
    def has_decided(self) -> bool:
        return bool(self._decided)

    def take_decided(self) -> tuple[list[QueueEntry], list[FailedRow], list[Job]]:
        """Like the result of `admit`, of jobs on which another host has decided since."""
        with self._lock:
            decided, self._decided = self._decided, []
        admitted = [held for job, held in decided if job.refused is None]
        return (
            [entry for held in admitted for entry in held.entries],
            [failure for held in admitted for failure in held.failures],
            [job for job, _ in decided if job.refused is not None],
        )

    def admit(
        self, jobs: Sequence[Job], entries: Sequence[QueueEntry], failures: Sequence[FailedRow]
    ) -> tuple[list[QueueEntry], list[FailedRow], list[Job]]:
        """Return those of `entries` and `failures`, rows of `jobs`, that may go on, and the jobs that are refused."""
        ready: list[QueueEntry] = []
        parts: list[QueueEntry] = []
        refused: list[Job] = []
        for entry in entries:
            job = entry.job
            if job.account is None:
                ready.append(entry)
            elif entry.texts != len(job.inputs) or job.cancelled or job.account.decides_later:
                parts.append(entry)
            elif _is_charged(job, entry.tokens, refused):
                ready.append(entry)
        if not parts and not failures:
            return ready, [], refused
        failed = self._admit_parts(dict.fromkeys(jobs), parts, failures, ready, refused)
        return ready, failed, refused

    def _admit_parts(
        self,
        jobs: Collection[Job],
        entries: Sequence[QueueEntry],
        failures: Sequence[FailedRow],
        ready: list[QueueEntry],
        refused: list[Job],
    ) -> list[FailedRow]:
        """`admit` for jobs of which no single entry has all rows; what may go on joins `ready` and the result."""
        charged = {entry.job for entry in entries if not entry.job.cancelled}
        charged |= {job for job, _, _ in failures if job.account is not None and not job.cancelled}
        ready += [entry for entry in entries if entry.job not in charged]
        failed = [failure for failure in failures if failure[0] not in charged]
        with self._lock:
            for job in jobs:
                if job.cancelled:
                    self._held.pop(job, None)
            whole = self._held_with(charged, entries, failures)
        for job, held in whole:
            tokens = sum([entry.tokens for entry in held.entries])
            if job.account is not None and job.account.decides_later:
                self._ask(job, job.account, held, tokens)
            elif _is_charged(job, tokens, refused):
                ready += held.entries
                failed += held.failures
        return failed

    def forget(self, job: Job) -> None:
        """Drop the rows of a job that was cancelled before all of them were tokenized."""
        if job.account is not None:
            with self._lock:
                self._held.pop(job, None)

    def drain(self, error: TeimgrError) -> list[FailedRow]:
        """Remove all rows that are held, as failures with `error`."""
        with self._lock:
            left = [*self._held.items(), *self._asked.items(), *self._decided]
            self._held, self._asked, self._decided = {}, {}, []
        return [
            failure
            for job, held in left
            for failure in (
                *held.failures,
                *((job, row, error) for entry in held.entries for row in entry.rows.tolist()),
            )
        ]

    def _held_with(
        self, jobs: Collection[Job], entries: Sequence[QueueEntry], failures: Sequence[FailedRow]
    ) -> list[tuple[Job, _Held]]:
        """Add rows; the jobs that are complete now, which are held no longer."""
        for job in jobs:
            self._held.setdefault(job, _Held(len(job.inputs)))
        for entry in entries:
            if (held := self._held.get(entry.job)) is not None and entry.job in jobs:
                held.entries.append(entry)
                held.rows_left -= entry.texts
        for failure in failures:
            if (held := self._held.get(failure[0])) is not None and failure[0] in jobs:
                held.failures.append(failure)
                held.rows_left -= 1
        return [(job, self._held.pop(job)) for job in jobs if not self._held[job].rows_left]

    def _ask(self, job: Job, account: Account, held: _Held, tokens: int) -> None:
        """Have another host charge a job."""
        with self._lock:
            self._asked[job] = held
        account.charge(tokens, partial(self._decide, job))

    def _decide(self, job: Job, refusal: TeimgrError | None) -> None:
        with self._lock:
            if (held := self._asked.pop(job, None)) is None:  # the engine was closed
                return
            if refusal is not None:
                job.refuse(refusal)
            self._decided.append((job, held))
        self._wake()


def _is_charged(job: Job, tokens: int, refused: list[Job]) -> bool:
    """Charge a whole job; False where that is refused: then it joins `refused`."""
    assert job.account is not None
    if (error := job.account.charge(tokens)) is None:
        return True
    job.refuse(error)
    refused.append(job)
    return False
