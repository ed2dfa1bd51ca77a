"""Fair sharing of a lane between tenants: a virtual counter of tokens for each, of which the least goes next.

After Sheng et al. 2024 (arXiv 2401.00588). A text is counted when it is taken into a batch, divided by its tenant's
weight. A tenant that comes back after a pause begins at the least counter of those that wait, so a pause gives no
credit. Of two tenants that always have texts waiting, neither gets more than the other, over any time, by more than
twice the largest text divided by the weight. Nothing waits while there is room: where one tenant waits, it gets all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from teimgr.engine.job import Share
from teimgr.engine.length_buckets import BatchDraft, LengthBuckets, QueueEntry


class FairLane:
    """The waiting entries of one lane by tenant; otherwise like `LengthBuckets`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.texts = 0
        self._waiting: dict[int, LengthBuckets] = {}
        self._shares: dict[int, Share] = {}  # of those that wait
        self._served: dict[int, float] = {}
        self._last: dict[int, float] = {}  # by priority: the counter of the tenant that was last to wait

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
        """Remove the texts whose turn it is, within both budgets, and late ones before them.

        Of a tenant that waits alone these are its oldest text and those of nearest length; of several, the oldest of
        each.
        """
        if len(self._waiting) == 1:
            ((tenant, buckets),) = self._waiting.items()
            draft = buckets.take(budget_tokens, budget_texts, now, token_s)
            self._count(tenant, draft.tokens)
        else:
            draft = BatchDraft()
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
        """Tokens that are taken before a further text of a tenant, by its share."""
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
        """A tenant begins to wait: at the least counter of the others of its priority, or the last one's."""
        others = [self._served[each.tenant] for each in self._shares.values() if each.priority == share.priority]
        least = min(others) if others else self._last.get(share.priority, 0.0)
        self._served[share.tenant] = max(self._served.get(share.tenant, 0.0), least)
        self._shares[share.tenant] = share

    def _count(self, tenant: int, tokens: int) -> None:
        self._served[tenant] += tokens / self._shares[tenant].weight

    def _turns(self, budget_tokens: int, budget_texts: int | None) -> dict[int, int]:
        """How many of its oldest texts each tenant has in the next batch, which one text at least fits.

        A tenant's counter before each of its texts is known at once, and the texts go in the order of these counters:
        the same as taking them one by one from the tenant whose counter is least.
        """
        turns: dict[int, int] = {}
        texts = 0
        for priority in sorted({share.priority for share in self._shares.values()}):
            tenants = sorted(tenant for tenant, share in self._shares.items() if share.priority == priority)
            waiting = [self._waiting[tenant].lengths_by_age(budget_tokens) for tenant in tenants]
            lengths = np.concatenate(waiting)
            owners = np.repeat(np.arange(len(tenants)), [len(each) for each in waiting])
            counters = [
                self._served[tenant] + (np.cumsum(each) - each) / self._shares[tenant].weight
                for tenant, each in zip(tenants, waiting, strict=True)
            ]
            order = np.argsort(np.concatenate(counters), kind="stable")  # of equal ones the least tenant is first
            taken = np.cumsum(lengths[order])
            fitting = int(np.searchsorted(taken, budget_tokens, "right"))
            fitting = max(fitting, 0 if texts else min(1, len(order)))
            if budget_texts is not None:
                fitting = min(fitting, budget_texts - texts)
            counts = np.bincount(owners[order[:fitting]], minlength=len(tenants)).tolist()
            turns |= zip(tenants, counts, strict=True)  # what is left of one with 0 may be dead, and is removed
            texts += fitting
            budget_tokens -= int(taken[-1]) if fitting else 0
            if fitting < len(order) or budget_tokens <= 0:
                break
        return turns


class HasShare(Protocol):
    """What waits for its tenant's turn."""

    @property
    def share(self) -> Share:
        """Whose it is."""


ItemT = TypeVar("ItemT", bound=HasShare)


class TenantTurns(Generic[ItemT]):
    """A queue like a deque, in which the tenants take turns: none waits for all that another has sent."""

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
        """Put back what was taken: it is its tenant's next one."""
        tenant = item.share.tenant
        waiting = self._of.get(tenant)
        if waiting is None:
            waiting = self._of[tenant] = deque()
        waiting.appendleft(item)

    def popleft(self) -> ItemT:
        """The next item of the tenant whose turn it is."""
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
        """The part of the items that have their turn before a further one of a tenant, 1 for all."""
        if self._of.keys() <= {tenant}:
            return 1.0
        own = len(self._of[tenant]) if tenant in self._of else 0
        return min(1.0, own * len(self._of) / len(self))
