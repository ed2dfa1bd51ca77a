"""Output precision: sentence-transformers' own numbers, for every vector by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sentence_transformers.util import quantize_embeddings

from teimgr.wire.quantisation import Precision, converted

QUANTIZED = [Precision.INT8, Precision.UINT8, Precision.BINARY, Precision.UBINARY]

matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 5), st.integers(1, 40)),
    elements=st.floats(-2.0, 2.0, width=32),
)


@pytest.mark.parametrize("precision", QUANTIZED)
@settings(deadline=None)
@given(vectors=matrices)
def test_integers_are_those_of_sentence_transformers_with_the_range_of_unit_vectors(
    precision: Precision, vectors: np.ndarray
) -> None:
    ranges = np.array([[-1.0], [1.0]], np.float32).repeat(vectors.shape[1], axis=1)

    reference = quantize_embeddings(vectors, precision.value, ranges=ranges)

    ours = converted(vectors, precision)
    assert ours.dtype == reference.dtype == precision.dtype
    np.testing.assert_array_equal(ours, reference)
    assert ours.shape == (len(vectors), precision.elements(vectors.shape[1]))


@pytest.mark.parametrize("precision", list(Precision))
@settings(deadline=None)
@given(vectors=matrices.filter(len))
def test_a_vector_alone_gives_what_it_gives_among_others(precision: Precision, vectors: np.ndarray) -> None:
    together = converted(vectors, precision)

    np.testing.assert_array_equal(converted(vectors[-1:], precision)[0], together[-1])
    np.testing.assert_array_equal(converted(vectors[-1], precision), together[-1])


@pytest.mark.parametrize("precision", list(Precision))
def test_a_vector_takes_the_bytes_that_are_told_beforehand(precision: Precision) -> None:
    for width in (1, 7, 8, 9, 384):
        vectors = np.zeros((3, width), np.float32)
        assert converted(vectors, precision).nbytes == 3 * precision.size_bytes(width)


def test_float32_is_not_copied() -> None:
    vectors = np.ones((2, 3), np.float32)

    assert converted(vectors, Precision.FLOAT32) is vectors


def test_float16_rounds_and_never_becomes_infinite() -> None:
    vectors = np.array([[0.1, -1e30, 1e30, 65519.0, 65536.0]], np.float32)

    halves = converted(vectors, Precision.FLOAT16)

    assert halves.dtype == np.float16
    assert halves[0, 0] == np.float16(0.1)
    np.testing.assert_array_equal(halves[0, 1:], np.array([-65504, 65504, 65504, 65504], np.float16))


@pytest.mark.parametrize(
    ("number", "uint8"),
    [(-1.0, 0), (-0.999, 0), (0.0, 127), (0.0079, 128), (0.999, 254), (1.0, 254), (1.01, 255), (7.0, 255), (-7.0, 0)],
)
def test_the_steps_run_from_minus_one_to_one(number: float, uint8: int) -> None:
    vector = np.array([number], np.float32)

    assert converted(vector, Precision.UINT8)[0] == uint8
    assert converted(vector, Precision.INT8)[0] == uint8 - 128


def test_bits_are_set_where_numbers_are_positive_with_the_first_one_highest() -> None:
    vector = np.array([0.5, 0.0, -0.5, 1e-30, 0, 0, 0, 0, 3.0], np.float32)

    np.testing.assert_array_equal(converted(vector, Precision.UBINARY), [0b1001_0000, 0b1000_0000])
    np.testing.assert_array_equal(converted(vector, Precision.BINARY), [0b1001_0000 - 128, 0])
