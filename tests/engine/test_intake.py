"""The tokenizer thread runs ahead of the device only so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from teimgr.engine.batching import queue as queues
from teimgr.engine.batching.batch import TokenizedTexts
from teimgr.engine.batching.queue import BatchLimits, EntryQueue, QueueEntry
from teimgr.engine.finisher import Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import InferOptions, Job, Lane, Share
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import Unavailable

LIMIT_S = 20.0


class FakeTokenizer:
    """A token per text."""

    max_length = 8

    def encode_all(self, inputs: Sequence[Any], options: TokenizeOptions) -> TokenizedTexts:
        return TokenizedTexts(
            np.zeros(len(inputs), np.int32), np.arange(len(inputs)), np.ones(len(inputs), dtype=np.int64)
        )


class Queries:
    """A thread for queries, which the caller may serve or not; `served` are those."""

    def __init__(self, idle: bool, serves: bool = False) -> None:
        self._idle, self._serves = idle, serves
        self.served: list[Job] = []

    def is_idle(self) -> bool:
        return self._idle

    def serve_queries(self, entries: list[QueueEntry]) -> bool:
        if self._serves:
            self.served.extend(entry.job for entry in entries)
        return self._serves


def test_queries_that_were_served_are_not_in_the_queue_and_a_bad_one_waits() -> None:
    class Tokenizer(FakeTokenizer):
        def encode_all(self, inputs: Sequence[Any], options: TokenizeOptions) -> TokenizedTexts:
            if "bad" in inputs:
                raise RuntimeError("no text")
            return super().encode_all(inputs, options)

    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    queries = Queries(idle=True, serves=True)
    intake = Intake(cast(Any, Tokenizer()), queue, finisher, 10**9, queries)
    jobs = [Job([text], InferOptions(), Lane.INTERACTIVE) for text in ("one", "bad", "two")]

    for job in jobs:
        intake.put(job, TokenizeOptions(), starts=False)
    intake.start()

    assert queries.served == [jobs[0], jobs[2]]
    assert not len(queue)
    assert [job for job, _, _ in intake.drain(Unavailable("closed"))] == [jobs[1]]


@pytest.mark.parametrize("bound", [("_AHEAD_TEXTS", 1000), ("_AHEAD_TOKENS", 1000)])
def test_texts_are_tokenized_as_the_device_takes_them_and_other_lanes_go_on(
    bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, *bound)
    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    intake = Intake(cast(Any, FakeTokenizer()), queue, cast(Any, None), 10**9, Queries(idle=False))
    stalled = threading.Event()
    has_room = queue.has_room

    def observed(lane: Lane) -> bool:
        if not (room := has_room(lane)):
            stalled.set()
        return room

    monkeypatch.setattr(queue, "has_room", observed)
    thread = threading.Thread(target=intake.run, daemon=True)
    thread.start()
    options = TokenizeOptions()
    intake.put(Job(["x"] * 20_000, InferOptions(), Lane.BULK), options)

    assert stalled.wait(LIMIT_S), "everything was tokenized"
    assert queue.texts(Lane.BULK) < 1000 + 1024
    intake.put(Job(["query"], InferOptions(), Lane.INTERACTIVE), options)
    taken = 0
    intake.close()
    while taken < 20_001:
        batch = queue.next_batch(LIMIT_S)
        assert batch is not None
        assert batch.entries, "tokenization did not go on"
        taken += batch.texts
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("jobs", "lane", "is_idle", "expected"),
    [
        ([["query"]], Lane.INTERACTIVE, True, 1),
        ([["query"]] * 32, Lane.INTERACTIVE, True, 32),
        ([["query"]] * 33, Lane.INTERACTIVE, True, 0),
        ([["query"]], Lane.INTERACTIVE, False, 0),
        ([["query"]], Lane.BULK, True, 0),
        ([["query"], ["one", "two"]], Lane.INTERACTIVE, True, 0),
        ([["x" * 1001], ["x" * 1000]], Lane.INTERACTIVE, True, 0),
        ([["bad"]], Lane.INTERACTIVE, True, 0),
        ([["query"], ["panic"]], Lane.INTERACTIVE, True, 0),
    ],
)
def test_few_queries_are_tokenized_where_they_arrive_and_all_else_waits(
    jobs: list[list[str]], lane: Lane, is_idle: bool, expected: int
) -> None:
    class Tokenizer(FakeTokenizer):
        def encode_all(self, inputs: Sequence[Any], options: TokenizeOptions) -> TokenizedTexts:
            if inputs == ["bad"]:
                raise RuntimeError("no text")
            if "panic" in inputs:
                raise BaseException("the library panicked")
            return super().encode_all(inputs, options)

    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    intake = Intake(cast(Any, Tokenizer()), queue, finisher, 10**9, Queries(is_idle))

    for texts in jobs:  # there is no tokenizer thread
        intake.put(Job(texts, InferOptions(), lane), TokenizeOptions(), starts=False)
    intake.start()

    texts = sum(map(len, jobs))
    assert queue.texts(lane) == expected
    assert bool(intake.waiting(lane)) is (expected < texts)
    assert len(intake.drain(Unavailable("closed"))) == texts - expected


def test_a_tenants_flood_is_tokenized_in_turns_with_what_others_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_AHEAD_TEXTS", 4096)
    queue = EntryQueue(BatchLimits(tokens=64, bulk_tokens_beside_interactive=64))
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    intake = Intake(cast(Any, FakeTokenizer()), queue, finisher, 10**9, Queries(idle=False))
    for _ in range(50):
        flood = Job(["x"] * 2000, InferOptions(), Lane.BULK)
        flood.belongs_to(Share(1))
        intake.put(flood, TokenizeOptions(""))
    while queue.has_room(Lane.BULK):
        assert intake._tokenize_next()
    quiet = Job(["x"] * 100, InferOptions(), Lane.BULK)
    quiet.belongs_to(Share(2))
    intake.put(quiet, TokenizeOptions(""))

    assert intake.waiting_before(Lane.BULK, quiet.share) < intake.waiting(Lane.BULK) / 10
    for _ in range(2):  # the flood's turn, and the other's
        while not queue.has_room(Lane.BULK):
            queue.next_batch(0.0)
        assert intake._tokenize_next()
    draft = queue.next_batch(0.0)
    assert draft is not None
    assert sum(entry.texts for entry in draft.entries if entry.job is quiet) == 32  # half of the batch
