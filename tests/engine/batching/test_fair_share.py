"""Fair sharing by simulation: tenants with floods, pauses, weights and priorities, over many batches."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.batching.fair_share import BatchDraft, FairLane, QueueEntry, TenantTurns
from teimgr.engine.job import InferOptions, Job, Lane, Share

LARGEST = 120
NOW = 100.0


def entry_of(share: Share, length: int, texts: int = 1, deadline: float | None = None) -> QueueEntry:
    job = Job(["x"] * texts, InferOptions(), Lane.BULK, deadline)
    job.belongs_to(share)
    return QueueEntry(job, np.arange(texts), Encoded(np.zeros((texts, length), np.int32)))


def tokens_of(draft: BatchDraft) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for entry in draft.entries:
        found[entry.job.share.tenant] += entry.tokens
    return found


class Backlog:
    """A lane in which the tenants in `busy` always have texts of random length and number waiting."""

    def __init__(self, seed: int, shares: list[Share]) -> None:
        self.draw = random.Random(seed)
        self.shares = {share.tenant: share for share in shares}
        self.lane = FairLane()
        self.waiting: dict[int, int] = defaultdict(int)

    def send(self, tenant: int) -> None:
        texts = self.draw.choice((1, 1, 3, 40))
        entry = entry_of(self.shares[tenant], self.draw.choice((1, 7, 30, LARGEST)), texts)
        self.lane.put(entry)
        self.waiting[tenant] += texts

    def batch(self, busy: set[int], budget: int) -> dict[int, int]:
        for tenant in busy:
            while self.waiting[tenant] < budget:
                self.send(tenant)
        draft = self.lane.take(budget, None, NOW)
        for entry in draft.entries:
            self.waiting[entry.job.share.tenant] -= entry.texts
        return tokens_of(draft)


@pytest.mark.parametrize("seed", range(8))
def test_the_gap_of_busy_tenants_is_within_twice_the_largest_text_by_weight(seed: int) -> None:
    weights = {1: 1, 2: 2, 3: 4, 4: 1}
    backlog = Backlog(seed, [Share(tenant, weight) for tenant, weight in weights.items()])
    served: dict[int, float] = defaultdict(float)
    paths: dict[tuple[int, int], list[float]] = {(a, b): [0.0] for a in (1, 2, 3) for b in (1, 2, 3) if a < b}

    for number in range(200):
        busy = {1, 2, 3} | ({4} if number // 7 % 2 else set())  # the fourth comes and goes
        for tenant, tokens in backlog.batch(busy, backlog.draw.choice((50, 300, 1000))).items():
            served[tenant] += tokens / weights[tenant]
        for (a, b), path in paths.items():
            path.append(served[a] - served[b])

    for (a, b), path in paths.items():
        assert max(path) - min(path) <= 2 * LARGEST / min(weights[a], weights[b])
    assert min(served[tenant] for tenant in (1, 2, 3)) > 1000


class OneByOne:
    """Which texts are in a batch, taken one by one from the tenant whose counter is least."""

    def __init__(self, shares: list[Share]) -> None:
        self.waiting: dict[Share, deque[int]] = {share: deque() for share in shares}
        self.counters = dict.fromkeys(shares, 0.0)

    def batch(self, tokens: int, texts: int | None) -> dict[int, int]:
        taken = {share: [0] for share in self.waiting}
        count = 0
        while waiting := [share for share, lengths in self.waiting.items() if lengths]:
            first = [share for share in waiting if share.priority == min(each.priority for each in waiting)]
            after = {share: self.counters[share] + sum(taken[share]) / share.weight for share in first}
            share = min(first, key=lambda each: (after[each], each.tenant))
            length = self.waiting[share][0]
            if (count and length > tokens) or count == texts:
                break
            taken[share].append(self.waiting[share].popleft())
            tokens -= length
            count += 1
        for share, lengths in taken.items():
            self.counters[share] += sum(lengths) / share.weight
        return {share.tenant: found for share, lengths in taken.items() if (found := sum(lengths))}


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_has_the_texts_that_would_be_taken_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    shares = [Share(number, draw.choice((1, 2, 7)), draw.choice((0, 0, 1))) for number in range(1, 6)]
    lane, one_by_one = FairLane(), OneByOne(shares)
    for share in shares:
        for _ in range(draw.choice((1, 10, 60))):
            length, texts = draw.choice((1, 7, 30, LARGEST)), draw.choice((1, 1, 3, 40))
            lane.put(entry_of(share, length, texts))
            one_by_one.waiting[share].extend([length] * texts)
    while sum(map(bool, one_by_one.waiting.values())) > 1:  # one alone has texts of nearest length taken together
        budget, texts = draw.choice((50, 300, 3000)), draw.choice((None, None, 20))
        assert tokens_of(lane.take(budget, texts, NOW)) == one_by_one.batch(budget, texts)
    assert lane.texts == sum(map(len, one_by_one.waiting.values()))


def test_a_pause_gives_no_credit_and_takes_none() -> None:
    backlog = Backlog(1, [Share(1), Share(2)])
    for _ in range(50):
        backlog.batch({1}, 1000)  # the other pauses

    first = backlog.batch({1, 2}, 1000)
    assert abs(first[1] - first[2]) <= 2 * LARGEST
    for _ in range(50):
        backlog.batch({2}, 1000)
    again = backlog.batch({1, 2}, 1000)
    assert abs(again[1] - again[2]) <= 2 * LARGEST + abs(first[1] - first[2])


def test_a_higher_priority_goes_first_and_leaves_the_rest_of_a_batch_to_others() -> None:
    lane = FairLane()
    for _ in range(10):
        lane.put(entry_of(Share(1, priority=2), 10))
        lane.put(entry_of(Share(2, priority=0), 10, 3))
    assert tokens_of(lane.take(200, None, NOW)) == {2: 200}
    assert tokens_of(lane.take(200, None, NOW)) == {2: 100, 1: 100}
    assert (lane.texts, lane.tokens, tokens_of(lane.take(200, 3, NOW))) == (0, 0, {})


def test_a_batch_takes_one_text_at_least_and_no_more_than_its_budgets() -> None:
    lane = FairLane()
    for tenant in (1, 2):
        lane.put(entry_of(Share(tenant), 500, 2))
    assert tokens_of(lane.take(100, None, NOW)) == {1: 500}
    assert tokens_of(lane.take(100, None, NOW)) == {2: 500}
    draft = lane.take(10_000, 1, NOW)
    assert (draft.texts, lane.texts, lane.tokens) == (1, 1, 500)


def test_cancelled_and_late_texts_cost_nobody_anything() -> None:
    lane = FairLane()
    cancelled, late = entry_of(Share(1), 100, 5), entry_of(Share(1), 90, 5, deadline=NOW - 1)
    alive, other = entry_of(Share(1), 10, 5), entry_of(Share(2), 10, 20)
    for entry in (cancelled, late, alive, other):
        lane.put(entry)
    cancelled.job.cancel()

    draft = lane.take(100, None, NOW)
    assert draft.expired == [late]
    assert set(tokens_of(draft)) <= {1, 2}
    while lane.texts:
        draft = lane.take(100, None, NOW)
    assert lane.tokens == 0


def test_what_waits_before_a_tenant_is_by_its_share() -> None:
    lane = FairLane()
    lane.put(entry_of(Share(1), 10, 1000))
    assert lane.tokens_before(Share(1)) == 10_000
    assert lane.tokens_before(Share(2)) == 0
    lane.put(entry_of(Share(2, 2), 10, 10))
    assert lane.tokens_before(Share(2, 2)) == 150
    assert lane.tokens_before(Share(3, priority=2)) == 10_100
    assert lane.tokens_before(Share(3, priority=0)) == 0
    assert len(lane.drain()) == 2


def test_tenants_take_turns_before_they_are_tokenized() -> None:
    turns: TenantTurns[SimpleNamespace] = TenantTurns()
    flood, late = ([SimpleNamespace(share=Share(tenant)) for _ in range(count)] for tenant, count in ((1, 5), (2, 2)))
    for entry in (*flood, *late):
        turns.append(entry)
    assert (turns.part_before(1), turns.part_before(2), turns.part_before(3)) == (1.0, 4 / 7, 0.0)

    taken = [turns.popleft() for _ in range(4)]
    assert list(map(id, taken)) == list(map(id, [flood[0], late[0], flood[1], late[1]]))
    turns.appendleft(taken[2])
    assert [id(turns.popleft()) for _ in range(len(turns))] == list(map(id, flood[1:]))
    assert not turns
