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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from teimgr.engine.job import Lane
from teimgr.engine.shelf import Entry, Shelf, Take

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
        self._shelves = {lane: Shelf() for lane in Lane}
        self._bulk_credit = 0.0
        self._interactive_seen = -float("inf")
        self._closed = False
        self._abandoned = False

    def put(self, entries: Iterable[Entry]) -> None:
        """Queue `entries`, each in the lane of its job."""
        with self._changed:
            for entry in entries:
                self._shelves[entry.job.lane].put(entry)
                if entry.job.lane is Lane.INTERACTIVE:
                    self._interactive_seen = self._clock()
            self._changed.notify()

    def next_batch(self, timeout_s: float) -> Take | None:
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

    def drain(self) -> list[Entry]:
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

    def _take(self) -> Take:
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
