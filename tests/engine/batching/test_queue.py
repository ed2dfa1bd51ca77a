"""The queue decides alone: these tests need no model and no torch."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest

from teimgr.engine.batching.batch import Encoded, TokenizedTexts
from teimgr.engine.batching.queue import (
    BatchDraft,
    BatchLimits,
    EntryQueue,
    LaneThroughput,
    QueueEntry,
    TokenCap,
    halves,
)
from teimgr.engine.finisher import Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import Decided, InferOptions, Job, Lane
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import Cancelled, TeimgrError, TokenRateExceeded

WAIT_S = 60.0
LIMITS = BatchLimits(tokens=100, bulk_tokens_beside_interactive=20)


class Clock:
    """A clock that stands still unless it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def entry(length: int, lane: Lane = Lane.BULK, deadline: float | None = None, job: Job | None = None) -> QueueEntry:
    job = job or Job(["x"], InferOptions(), lane, deadline)
    return QueueEntry(job, np.zeros(1, np.intp), Encoded(np.zeros(length, dtype=np.int32)))


def rows_of(texts: int, length: int, lane: Lane = Lane.BULK, deadline: float | None = None) -> QueueEntry:
    """All rows of a job of equal lengths; the first id of each text is its row."""
    job = Job(["x"] * texts, InferOptions(), lane, deadline)
    ids = np.zeros((texts, length), np.int32)
    ids[:, 0] = np.arange(texts)
    return QueueEntry(job, np.arange(texts), Encoded(ids))


def take(queue: EntryQueue) -> BatchDraft:
    batch = queue.next_batch(timeout_s=0.0)
    assert batch is not None
    return batch


def lengths(queue: EntryQueue) -> list[int]:
    return sorted(e.length for e in take(queue).entries)


def test_a_query_goes_before_bulk_that_came_earlier() -> None:
    queue = EntryQueue(LIMITS)
    query = entry(3, Lane.INTERACTIVE)
    queue.put([entry(10), entry(10)])
    queue.put([query])

    assert take(queue).entries == [query]


def test_a_batch_keeps_both_bounds() -> None:
    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=20, texts=3))
    queue.put([entry(40) for _ in range(3)] + [entry(1) for _ in range(5)])

    assert lengths(queue) == [1, 40, 40]
    assert lengths(queue) == [1, 1, 40]
    assert lengths(queue) == [1, 1]


def test_a_text_longer_than_the_bound_rides_alone() -> None:
    queue = EntryQueue(LIMITS)
    queue.put([entry(400), entry(1)])

    assert lengths(queue) == [400]
    assert lengths(queue) == [1]


def test_a_batch_takes_the_nearest_lengths() -> None:
    queue = EntryQueue(LIMITS)
    queue.put([entry(n) for n in (30, 5, 90, 32, 33, 2)])

    assert lengths(queue) == [5, 30, 32, 33]


def test_every_batch_holds_the_oldest_entry_whatever_comes_later() -> None:
    """So no length can be starved by a stream of another."""
    chance = random.Random(7)
    queue = EntryQueue(LIMITS)
    waiting: list[QueueEntry] = []
    for _ in range(300):
        fresh = [entry(chance.randint(1, 60)) for _ in range(chance.randint(0, 6))]
        queue.put(fresh)
        waiting += fresh
        batch = take(queue).entries
        if waiting:
            assert waiting[0] in batch
        assert sum(e.length for e in batch) <= LIMITS.tokens
        waiting = [e for e in waiting if e not in batch]

    assert len(queue) == len(waiting)
    assert queue.tokens(Lane.BULK) == sum(e.length for e in waiting)


def test_under_a_flood_of_queries_bulk_keeps_about_its_share() -> None:
    queue = EntryQueue(LIMITS)
    served = dict.fromkeys(Lane, 0)
    for _ in range(2000):
        queue.put([entry(10, Lane.INTERACTIVE) for _ in range(10)])
        queue.put([entry(10)])
        for e in take(queue).entries:
            served[e.job.lane] += e.length
    share = served[Lane.BULK] / sum(served.values())

    assert 0.08 < share < 0.3


def test_bulk_batches_are_small_while_queries_were_seen_lately() -> None:
    clock = Clock()
    queue = EntryQueue(LIMITS, clock)
    queue.put([entry(10) for _ in range(30)])
    assert len(take(queue).entries) == 10

    queue.put([entry(3, Lane.INTERACTIVE)])
    assert len(take(queue).entries) == 1
    assert len(take(queue).entries) == 2

    clock.now += LIMITS.interactive_memory_s
    assert len(take(queue).entries) == 10


def test_cancelled_entries_vanish() -> None:
    queue = EntryQueue(LIMITS)
    gone = Job(["x"] * 3, InferOptions(), Lane.BULK)
    stays = entry(10)
    queue.put([entry(10, job=gone), stays, entry(11, job=gone), entry(50, job=gone)])
    gone.cancel()

    assert take(queue).entries == [stays]
    assert take(queue).entries == []
    assert len(queue) == queue.tokens(Lane.BULK) == 0


def test_expired_entries_come_back_apart() -> None:
    clock = Clock()
    queue = EntryQueue(LIMITS, clock)
    late, timely = entry(10, deadline=clock.now + 1), entry(10, deadline=clock.now + 10)
    queue.put([late, timely])
    clock.now += 5
    batch = take(queue)

    assert batch.expired == [late]
    assert batch.entries == [timely]


def test_entries_that_cannot_be_computed_before_their_deadline_are_not_begun() -> None:
    """A text of 10 tokens takes a second at least, one of 40 four."""
    clock = Clock()
    queue = EntryQueue(LIMITS, clock, token_s=lambda: 0.1)
    short, long = entry(10, deadline=clock.now + 3), entry(40, deadline=clock.now + 3)
    several = rows_of(4, length=9, deadline=clock.now + 0.5)
    queue.put([short, long, several])
    batch = take(queue)

    assert batch.expired == [several, long]
    assert batch.entries == [short]
    assert len(queue) == queue.tokens(Lane.BULK) == 0


def test_of_many_equal_rows_a_batch_takes_as_many_as_fit() -> None:
    """Rows and ids stay together, and what is left goes on in order."""
    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=20, texts=7))
    queue.put([rows_of(12, length=20), entry(15)])
    taken: list[list[int]] = []
    while len(queue):
        batch = take(queue)
        assert batch.tokens == sum(e.tokens for e in batch.entries) <= 100
        assert batch.texts == sum(e.texts for e in batch.entries)
        for e in batch.entries:
            if e.length == 20:
                assert e.encoded.ids[:, 0].tolist() == e.rows.tolist()
                taken.append(e.rows.tolist())

    assert taken == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert queue.tokens(Lane.BULK) == queue.texts(Lane.BULK) == 0


def test_a_batch_keeps_its_bound_on_texts_within_an_entry() -> None:
    queue = EntryQueue(BatchLimits(tokens=1000, bulk_tokens_beside_interactive=20, texts=3))
    queue.put([entry(2), rows_of(5, length=2)])

    assert [[e.texts for e in take(queue).entries] for _ in range(2)] == [[1, 2], [3]]


def test_rows_that_expire_or_are_cancelled_after_a_part_was_taken_leave_together() -> None:
    clock = Clock()
    queue = EntryQueue(LIMITS, clock)
    late, gone = rows_of(8, length=20, deadline=clock.now + 1), rows_of(8, length=20)
    queue.put([late])
    assert take(queue).texts == 5
    clock.now += 5
    batch = take(queue)
    assert [e.rows.tolist() for e in batch.expired] == [[5, 6, 7]]

    queue.put([gone])
    assert take(queue).texts == 5
    gone.job.cancel()
    assert take(queue).entries == []
    assert len(queue) == queue.tokens(Lane.BULK) == 0


def test_the_halves_of_a_batch_have_all_of_its_rows() -> None:
    for sizes in ([2], [5], [1, 1], [1, 4, 3], [7, 1], [2, 2, 2, 1]):
        entries = [rows_of(size, length=3) for size in sizes]
        rows = [(id(e.job), row) for e in entries for row in e.rows.tolist()]
        first, second = halves(entries)

        assert [(id(e.job), row) for e in [*first, *second] for row in e.rows.tolist()] == rows
        assert [sum(e.texts for e in half) for half in (first, second)] == [sum(sizes) // 2, -(-sum(sizes) // 2)]
        for e in [*first, *second]:
            assert e.encoded.ids[:, 0].tolist() == e.rows.tolist()


def test_the_taker_sleeps_until_something_comes() -> None:
    queue = EntryQueue(LIMITS)
    seen: list[BatchDraft | None] = []
    taker = threading.Thread(target=lambda: seen.append(queue.next_batch(timeout_s=30.0)))
    taker.start()
    queue.put([entry(5)])
    taker.join(30.0)

    assert [len(batch.entries) for batch in seen if batch] == [1]


def test_a_closed_queue_is_emptied_first_and_an_abandoned_one_is_not() -> None:
    queue = EntryQueue(LIMITS)
    left = entry(60)
    queue.put([entry(60), left])
    queue.close()
    assert lengths(queue) == [60]

    queue.abandon()
    assert queue.next_batch(timeout_s=0.0) is None
    assert queue.drain() == [left]


def test_queue_and_batch_need_no_torch() -> None:
    code = "import sys, teimgr.engine.batching.queue, teimgr.engine.batching.batch; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Throughput of a lane

BOTH = (Lane.INTERACTIVE, Lane.BULK)


def serve_batches(
    throughput: LaneThroughput, began: float, batches: list[tuple[Lane, int, float]], waiting: object
) -> float:
    """Batches of (lane, tokens, seconds), one after the other; returns when the last one ended."""
    for lane, tokens, seconds in batches:
        throughput.took(began, lane, tokens, waiting)  # type: ignore[arg-type]
        began += seconds
    throughput.took(began, lane, 0, ())
    return began


def test_nothing_is_known_of_a_worker_that_never_had_a_backlog() -> None:
    throughput = LaneThroughput()

    now = serve_batches(throughput, 100.0, [(Lane.BULK, 10, 3.0)] * 10, waiting=())

    assert throughput.tokens_per_s(Lane.BULK, now) is None


def test_a_backlog_shows_the_throughput_and_one_slow_batch_does_not_count() -> None:
    throughput = LaneThroughput()

    now = serve_batches(
        throughput, 100.0, [(Lane.BULK, 500, 5.0), *[(Lane.BULK, 1000, 0.125)] * 4], waiting=(Lane.BULK,)
    )

    assert throughput.tokens_per_s(Lane.BULK, now) == 8000
    assert throughput.tokens_per_s(Lane.INTERACTIVE, now) is None


def test_batches_of_a_few_milliseconds_are_counted_together() -> None:
    throughput = LaneThroughput()

    now = serve_batches(throughput, 100.0, [(Lane.BULK, 100, 2**-8)] * 60, waiting=(Lane.BULK,))
    assert throughput.tokens_per_s(Lane.BULK, now) is None  # a quarter of a second is too little to judge by
    now = serve_batches(throughput, now, [(Lane.BULK, 100, 2**-8)] * 200, waiting=(Lane.BULK,))

    assert throughput.tokens_per_s(Lane.BULK, now) == 25600


def test_a_lane_gets_what_the_other_one_leaves() -> None:
    throughput = LaneThroughput()
    turns = [(Lane.INTERACTIVE, 600, 0.5), (Lane.BULK, 100, 0.5)]

    now = serve_batches(throughput, 100.0, turns * 8, waiting=BOTH)

    assert throughput.tokens_per_s(Lane.INTERACTIVE, now) == 600
    assert throughput.tokens_per_s(Lane.BULK, now) == 7 * 100 / 6.5  # the last one is followed by the end


def test_what_comes_during_the_only_batch_of_its_lane_is_no_backlog() -> None:
    """Lanes with threads of their own, each batch of bulk takes all, and queries come beside it; twice in 20 batches
    some is left. Counted by its waits, the lane would have 10 tokens a second."""
    throughput, now = LaneThroughput(), 100.0
    for turn in range(20):
        for lane, tokens, waiting, seconds in (
            (Lane.BULK, 1000, (Lane.BULK,) if turn >= 18 else (), 0.1),
            (Lane.INTERACTIVE, 10, (Lane.BULK,), 0.4),
            (Lane.INTERACTIVE, 10, (Lane.BULK,), 0.5),
        ):
            throughput.took(now, lane, tokens, waiting)
            now += seconds

    assert throughput.tokens_per_s(Lane.BULK, now) in (None, 1000)


def test_an_old_throughput_is_forgotten() -> None:
    throughput = LaneThroughput()

    now = serve_batches(throughput, 100.0, [(Lane.BULK, 100, 0.125)] * 8, waiting=(Lane.BULK,))

    assert throughput.tokens_per_s(Lane.BULK, now) == 800
    assert throughput.tokens_per_s(Lane.BULK, now + 40) is None


class CountingFeeder:
    """A tokenizer with this many tokens on their way to the queue."""

    def __init__(self) -> None:
        self.tokens = 0

    def waiting(self, lane: Lane) -> int:
        return self.tokens

    def room_was_made(self) -> None:
        """Nothing waits for it."""


def test_time_without_work_is_no_backlog_though_rows_of_the_last_batch_still_counted_as_waiting() -> None:
    clock = Clock()
    queue, feeder = EntryQueue(LIMITS, clock), CountingFeeder()
    queue.fed_by(feeder)
    for _ in range(2 * 4):
        feeder.tokens = 5  # the tokenizer counts its rows until it has put them all
        queue.put([entry(5)])
        assert queue.next_batch(0) is not None
        feeder.tokens = 0
        queue.next_batch(0)  # the device is free, nothing is there
        clock.now += 0.5

    assert queue.tokens_per_s(Lane.BULK) is None


def test_lanes_with_threads_of_their_own_do_not_wait_for_each_other() -> None:
    queue = EntryQueue(replace(LIMITS, own_threads=True))
    queries, bulk = (Lane.INTERACTIVE,), (Lane.BULK,)
    taken: Queue[tuple[Lane, int]] = Queue()

    def serve(lanes: tuple[Lane, ...]) -> None:
        while (draft := queue.next_batch(WAIT_S, lanes)) is not None:
            taken.put((draft.entries[0].job.lane, draft.tokens))

    threads = [threading.Thread(target=serve, args=(lanes,)) for lanes in (queries, bulk)]
    for thread in threads:
        thread.start()
    for lane, length in ((Lane.BULK, 7), (Lane.INTERACTIVE, 5), (Lane.INTERACTIVE, 6), (Lane.BULK, 90)):
        queue.put([entry(length, lane)])
        assert taken.get(timeout=WAIT_S) == (lane, length)  # of bulk more than LIMITS has beside queries
    queue.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


# The bound that running out of memory teaches.


def test_a_batch_that_did_not_fit_halves_the_bound_until_a_minute_has_passed() -> None:
    now = 0.0
    cap = TokenCap(16384, lambda: now)
    cap.did_not_fit(10_000)
    assert cap.tokens == 5000

    now = 59.0
    cap.did_not_fit(4000)
    assert cap.tokens == 2000
    now = 118.0
    assert cap.tokens == 2000
    now = 119.0
    assert (cap.tokens, cap.tokens) == (4000, 4000)
    now = 400.0
    assert [cap.tokens for _ in range(3)] == [8000, 8000, 8000]
    now = 10_000.0
    assert cap.tokens == 16000
    now = 20_000.0
    assert cap.tokens == 16384


def test_small_batches_leave_room_for_a_text() -> None:
    cap = TokenCap(16384, lambda: 0.0)
    cap.did_not_fit(20)

    assert cap.tokens == 256
    assert TokenCap(100, lambda: 0.0).tokens == 100


LIMIT_S = 20.0


class Tokenizer:
    """A token for each character."""

    max_length = 60_000

    def encode_all(self, inputs: Sequence[Any], options: TokenizeOptions) -> TokenizedTexts:
        lengths = [len(text) for text in inputs]
        return TokenizedTexts(
            np.zeros(sum(lengths), np.int32), np.cumsum([0, *lengths[:-1]]), np.array(lengths, np.int64)
        )


class Account:
    """Admits up to `left` tokens."""

    decides_later = False
    is_shadowed = False

    def __init__(self, left: int) -> None:
        self.left = left
        self.charged: list[int] = []
        self.taken = 0

    def charge(self, tokens: int, later: Decided | None = None) -> TeimgrError | None:
        self.charged.append(tokens)
        return TokenRateExceeded("later", 3.0) if tokens > self.left else None

    def took(self, tokens: int) -> None:
        self.taken += tokens

    def settle(self, computed: int | None) -> None:
        pass


class LaterAccount(Account):
    """Another host decides, when the test has it."""

    decides_later = True

    def charge(self, tokens: int, later: Decided | None = None) -> TeimgrError | None:
        self.charged.append(tokens)
        self.later = later
        return None


class Queries:
    def is_idle(self) -> bool:
        return True

    def serve_queries(self, entries: list[QueueEntry]) -> bool:
        return False


@contextmanager
def intake() -> Iterator[tuple[Intake, EntryQueue, list[Job], Callable[[], None]]]:
    """An intake with its queue, the jobs that were delivered, and what begins its threads."""
    delivered: list[Job] = []
    queue = EntryQueue(BatchLimits(tokens=10**6, bulk_tokens_beside_interactive=10**6))
    finisher = Finisher(delivered.extend, lambda reason: None)
    made = Intake(cast(Any, Tokenizer()), queue, finisher, 10**9, Queries())
    threads = [threading.Thread(target=body) for body in (made.run, made.run_long, finisher.run)]

    def begin() -> None:
        for thread in threads:
            thread.start()

    def end() -> None:
        made.close()
        for thread in threads[:2]:
            thread.join(LIMIT_S)
        finisher.close(LIMIT_S)
        threads[2].join(LIMIT_S)

    yield made, queue, delivered, lambda: begin() or end()  # type: ignore[func-returns-value]


def job_of(texts: Sequence[str], account: Account | None, lane: Lane = Lane.BULK) -> Job:
    job = Job(texts, InferOptions(), lane)
    if account is not None:
        job.charge_to(account)
    return job


def test_a_job_of_many_chunks_and_long_texts_is_charged_once() -> None:
    account = Account(10**6)
    texts = ["x" * 40, *["y" * 30] * 3000, "z" * 20_000]
    with intake() as (made, queue, delivered, run):
        made.put(job_of(texts, account), TokenizeOptions(""))
        run()
        draft = queue.next_batch(0.0)

    assert account.charged == [40 + 3000 * 30 + 20_000]
    assert draft is not None
    assert (draft.texts, account.taken) == (3002, account.charged[0])
    assert not delivered


def test_a_refused_job_is_delivered_with_its_refusal_and_nothing_of_it_is_queued() -> None:
    account, other = Account(100), Account(100)
    refused = job_of(["y" * 30] * 3000, account)
    with intake() as (made, queue, delivered, run):
        made.put(refused, TokenizeOptions(""))
        made.put(job_of(["y" * 30] * 3, other), TokenizeOptions(""))
        run()

    assert delivered == [refused]
    assert isinstance(refused.refused, TokenRateExceeded)
    assert (len(account.charged), queue.texts(Lane.BULK)) == (1, 3)


def test_a_query_refused_where_it_arrived_is_answered_though_more_arrive() -> None:
    refused = job_of(["y" * 30], Account(1), Lane.INTERACTIVE)
    later = job_of(["y" * 3], None, Lane.INTERACTIVE)
    with intake() as (made, queue, delivered, run):
        for job in (refused, later):
            made.put(job, TokenizeOptions(""), starts=False)
            made.start()
        run()

    assert delivered == [refused]
    assert queue.texts(Lane.INTERACTIVE) == 1
    assert made.waiting(Lane.INTERACTIVE) == 0


@pytest.mark.parametrize("refusal", [None, TokenRateExceeded("later", 3.0)])
def test_rows_wait_for_the_decision_of_another_host_and_hold_up_no_others(refusal: TeimgrError | None) -> None:
    account = LaterAccount(0)
    job, other = job_of(["y" * 30] * 3, account), job_of(["y" * 30], None)
    with intake() as (made, queue, delivered, run):
        for each in (job, other):
            made.put(each, TokenizeOptions(""), starts=False)
        made._tokenize_next()
        assert (account.charged, queue.texts(Lane.BULK)) == ([90], 1)
        assert account.later is not None
        account.later(refusal)
        run()

    assert queue.texts(Lane.BULK) == (4 if refusal is None else 1)
    assert [each.refused for each in delivered] == ([] if refusal is None else [refusal])


def test_rows_whose_decision_never_comes_fail_when_the_engine_closes() -> None:
    job = job_of(["y" * 30] * 3, LaterAccount(0))
    with intake() as (made, _, _, run):
        made.put(job, TokenizeOptions(""))
        run()
        left = made.drain(Cancelled("over"))

    assert sorted(row for _, row, _ in left) == [0, 1, 2]


@pytest.mark.parametrize("long_first", [False, True])
def test_a_cancelled_job_leaves_no_rows_behind(long_first: bool) -> None:
    texts = ["y" * 30] * 3000 + ["z" * 20_000]
    job = job_of(texts[::-1] if long_first else texts, Account(10**6))
    with intake() as (made, queue, delivered, run):
        made.put(job, TokenizeOptions(""), starts=False)
        made._tokenize_next()  # the first chunk is held
        job.cancel()
        run()
        assert made.drain(Cancelled("over")) == []

    assert queue.next_batch(0.0) is None or not delivered


def test_rows_that_are_held_when_the_engine_closes_fail() -> None:
    job = job_of(["y" * 30] * 3000, Account(10**6))
    with intake() as (made, _, _, run):
        made.put(job, TokenizeOptions(""), starts=False)
        made._tokenize_next()
        made.abandon()
        assert sorted(row for _, row, _ in made.drain(Cancelled("over"))) == list(range(3000))
        run()
