"""Fair sharing of a lane between tenants: each has a virtual counter of tokens, and the lowest counter goes next.

After Sheng et al. 2024 (arXiv 2401.00588). A text is counted when it is taken into a batch, divided by its tenant's
weight. A tenant that returns after a pause starts at the lowest counter of the waiting tenants, so a pause earns no
credit. Of two tenants that always have texts waiting, neither ever gets more than the other by more than twice the
largest text divided by the weight. No capacity is reserved: a tenant that waits alone gets all of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Generic, Protocol, TypeVar

from teimgr.engine.batching.length_buckets import BatchDraft, LengthBuckets, QueueEntry
from teimgr.engine.job import Share


class FairLane:
    """The waiting entries of one lane by tenant; otherwise like `LengthBuckets`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._waiting: dict[int, LengthBuckets] = {}
        self._shares: dict[int, Share] = {}  # of waiting tenants
        self._served: dict[int, float] = {}
        self._last: dict[int, float] = {}  # by priority: the counter of the last tenant that waited

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

    @property
    def least_of_several(self) -> int | None:
        """The waiting tokens of the tenant that has the fewest, of the first priority; None if it has one tenant."""
        if len(self._waiting) < 2:
            return None
        first = min([share.priority for share in self._shares.values()])
        tokens = [self._waiting[each.tenant].tokens for each in self._shares.values() if each.priority == first]
        return min(tokens) if len(tokens) > 1 else None

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
    """The texts of a tenant in a batch: its oldest, as `runs` of a length and a number each."""

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
    while True:  # repeated if counted texts turn out to have expired
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
    """An item that waits for its tenant's turn."""

    @property
    def share(self) -> Share:
        """The share that it belongs to."""


ItemT = TypeVar("ItemT", bound=HasShare)


class TenantTurns(Generic[ItemT]):
    """A queue like a deque in which tenants take turns, so that none waits for all that another has sent."""

    def __init__(self) -> None:
        self._of: dict[int, deque[ItemT]] = {}  # the tenant whose turn it is first

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
            self._of[tenant] = self._of.pop(tenant)  # to the end
        return item

    def clear(self) -> None:
        self._of.clear()

    def part_before(self, tenant: int) -> float:
        """Return the share of the items that come before a further item of a tenant; 1 for all."""
        if self._of.keys() <= {tenant}:
            return 1.0
        own = len(self._of[tenant]) if tenant in self._of else 0
        return min(1.0, own * len(self._of) / len(self))
