"""A call that became several jobs is one again when the last of them is finished."""

from __future__ import annotations

import numpy as np
import pytest

from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair
from teimgr.errors import InvalidInput
from teimgr.worker.calls import CallReply, WorkerCall
from teimgr.worker.dispatcher import Submission, parts_of

CUT = InferOptions(frozenset({Output.SCORES}), truncate=True)
WHOLE = InferOptions(frozenset({Output.SCORES}), truncate=False)
PAIRS = [Pair("q", text) for text in ("a", "bb", "ccc", "dddd")]


def finish(job: Job, scores: list[float], each_ns: int) -> None:
    """As the finisher leaves it."""
    job.scores = np.array(scores, np.float32)[:, None]
    job.tokens = 10 * len(scores)
    job.queue_ns = job.inference_ns = job.tokenization_ns = each_ns


def work(options: list[InferOptions]) -> Submission:
    call = WorkerCall(1, Lane.BULK, deadline=7.0)
    return Submission(call, parts_of(PAIRS, options), lambda job: CallReply(b""))


def test_inputs_with_the_same_options_are_one_job_in_their_order() -> None:
    one, two = parts_of(PAIRS, [CUT, WHOLE, CUT, CUT])

    assert (one.rows, one.options) == ([0, 2, 3], CUT)
    assert (two.rows, two.inputs) == ([1], [PAIRS[1]])
    assert len(parts_of(PAIRS, [CUT] * 4)) == 1


def test_scores_and_errors_come_back_in_their_rows() -> None:
    several = work([CUT, WHOLE, CUT, WHOLE])
    cut, whole = several.jobs
    finish(cut, [0.1, 0.3], 100)
    finish(whole, [0.0, 0.4], 400)
    whole.errors[0] = InvalidInput("too long")

    assert several.complete() is None
    joined = several.complete()

    assert joined is not None
    assert joined.scores[:, 0].tolist() == pytest.approx([0.1, 0.0, 0.3, 0.4])
    assert {row: error.message for row, error in joined.errors.items()} == {1: "too long"}
    assert joined.inputs == PAIRS
    assert joined.chars == 14
    assert joined.tokens == 40
    assert joined.queue_ns == joined.inference_ns == joined.tokenization_ns == (2 * 100 + 400) // 3


def test_a_single_part_is_the_job_itself() -> None:
    single = work([CUT] * 4)

    (job,) = single.jobs
    assert single.complete() is job
    assert not single.jobs  # or the two would keep each other


def test_every_job_has_the_calls_lane_and_deadline_and_is_cancelled_with_it() -> None:
    several = work([CUT, WHOLE, CUT, WHOLE])

    several.cancel()

    assert {(job.lane, job.deadline, job.cancelled) for job in several.jobs} == {(Lane.BULK, 7.0, True)}
