"""The tokenizer thread runs ahead of the device only so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from teimgr.engine import queue as queues
from teimgr.engine.batch import TokenizedTexts
from teimgr.engine.finisher import Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.engine.queue import BatchLimits, EntryQueue, QueueEntry
from teimgr.engine.tokenizer import TokenizeOptions
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
        self.served: list[QueueEntry] = []

    def is_idle(self) -> bool:
        return self._idle

    def serve_query(self, entry: QueueEntry) -> bool:
        if self._serves:
            self.served.append(entry)
        return self._serves


def test_a_lone_query_that_was_served_is_not_in_the_queue() -> None:
    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    queries = Queries(idle=True, serves=True)
    intake = Intake(cast(Any, FakeTokenizer()), queue, finisher, 10**9, queries)
    job = Job(["query"], InferOptions(), Lane.INTERACTIVE)

    intake.put(job, TokenizeOptions(), is_lone=True)

    assert [entry.job for entry in queries.served] == [job]
    assert not len(queue)
    assert not intake.waiting(Lane.INTERACTIVE)


@pytest.mark.parametrize("bound", [("_AHEAD_TEXTS", 1000), ("_AHEAD_TOKENS", 1000)])
def test_texts_are_tokenized_as_the_device_takes_them_and_other_lanes_go_on(
    bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, *bound)
    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    intake = Intake(cast(Any, FakeTokenizer()), queue, cast(Any, None), limit_tokens=10**9)
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
    ("texts", "lane", "is_lone", "is_idle", "expected"),
    [
        (["query"], Lane.INTERACTIVE, True, True, True),
        (["query"], Lane.INTERACTIVE, False, True, False),
        (["query"], Lane.INTERACTIVE, True, False, False),
        (["query"], Lane.BULK, True, True, False),
        (["one", "two"], Lane.INTERACTIVE, True, True, False),
        (["x" * 501], Lane.INTERACTIVE, True, True, False),
        (["bad"], Lane.INTERACTIVE, True, True, False),
    ],
)
def test_a_lone_query_is_tokenized_where_it_arrives_and_all_else_waits(
    texts: list[Any], lane: Lane, is_lone: bool, is_idle: bool, expected: bool
) -> None:
    class Tokenizer(FakeTokenizer):
        def encode_all(self, inputs: Sequence[Any], options: TokenizeOptions) -> TokenizedTexts:
            if inputs == ["bad"]:
                raise RuntimeError("the library panicked")
            return super().encode_all(inputs, options)

    queue = EntryQueue(BatchLimits(tokens=100, bulk_tokens_beside_interactive=100))
    finisher = Finisher(lambda jobs: None, lambda reason: None)
    intake = Intake(cast(Any, Tokenizer()), queue, finisher, 10**9, Queries(is_idle))

    intake.put(Job(texts, InferOptions(), lane), TokenizeOptions(), is_lone=is_lone)  # there is no tokenizer thread

    assert queue.texts(lane) == expected
    assert bool(intake.waiting(lane)) is not expected
    assert bool(intake.drain(Unavailable("closed"))) is not expected
