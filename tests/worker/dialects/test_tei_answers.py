"""TEI's answers from finished jobs, in cases that no small model produces."""

from __future__ import annotations

import numpy as np
import orjson

from teimgr.engine.job import InferOptions, Job, Lane, SparseRow
from teimgr.worker.dialects.tei import per_token, ranks, similarities, sparse
from teimgr.worker.http_inference import number_count


def finished(inputs: int) -> Job:
    return Job(["a"] * inputs, InferOptions(), Lane.INTERACTIVE)


def test_a_zero_vector_is_like_nothing() -> None:
    """TEI divides by its length and tells NaN."""
    job = finished(4)
    job.vectors = np.array([[3, 4], [0, 0], [6, 8], [-3, -4]], np.float32)

    assert orjson.loads(similarities(job)) == [0.0, 1.0, -1.0]

    job.vectors = np.array([[0, 0], [1, 0]], np.float32)
    assert orjson.loads(similarities(job)) == [0.0]


def test_vectors_whose_squares_are_beyond_32_bits_have_a_cosine() -> None:
    job = finished(2)
    job.vectors = np.array([[1e30, 1e30], [1e30, 0]], np.float32)

    assert np.isclose(orjson.loads(similarities(job))[0], 0.5**0.5)


def test_of_equal_scores_the_higher_index_comes_first() -> None:
    job = finished(4)
    job.scores = np.array([[0.5], [0.9], [0.5], [0.1]], np.float32)

    ranked = orjson.loads(ranks(["a", "b", "c", "d"], job))

    assert [(rank["index"], rank["text"]) for rank in ranked] == [(1, "b"), (2, "c"), (0, "a"), (3, "d")]


def test_numbers_are_written_as_32_bits() -> None:
    job = finished(1)
    job.sparse = [SparseRow(np.array([3, 70_000], np.uint32), np.array([0.020964134, 1 / 3], np.float32))]
    job.tokens_of = [np.arange(6, dtype=np.float32).reshape(3, 2)[:, :1] / 10]  # not contiguous

    assert sparse(job) == b'[[{"index":3,"value":0.020964134},{"index":70000,"value":0.33333334}]]'
    assert per_token(job) == b"[[[0.0],[0.2],[0.4]]]"
    assert number_count(job) == 5
