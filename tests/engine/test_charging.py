"""Jobs with an account: charged as a whole once tokenized, computed as a whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from teimgr.engine.batching.batch import TokenizedTexts
from teimgr.engine.batching.queue import BatchLimits, EntryQueue, QueueEntry
from teimgr.engine.finisher import Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import Decided, InferOptions, Job, Lane
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import Cancelled, TeimgrError, TokenRateExceeded

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
