"""Token pooling gives what sentence-transformers does, vector for vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from teimgr.engine.token_pooling import pooled


def vectors(tokens: int, width: int = 24, seed: int = 0, groups: int | None = None) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    found = numbers.standard_normal((tokens, width)).astype(np.float32)
    if groups is not None:  # near each other, as the tokens of a text are
        found = found[numbers.integers(0, groups, tokens)] + 0.3 * found
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def reference(given: np.ndarray, factor: float) -> np.ndarray:
    return HierarchicalTokenPooling(factor).pool([torch.from_numpy(given)])[0].numpy()


@pytest.mark.parametrize("factor", [1.5, 2, 3, 7, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 64, 300])
def test_a_document_has_the_vectors_of_sentence_transformers_in_their_order(tokens: int, factor: float) -> None:
    for groups in (None, 5):
        given = vectors(tokens, seed=tokens, groups=min(groups, tokens) if groups else None)
        expected = reference(given, factor)
        found = pooled(given, factor)
        assert found.shape == expected.shape
        assert np.allclose(found, expected, atol=1e-6)


def test_a_page_of_1030_vectors() -> None:
    given = vectors(1030, 128, groups=40)
    assert np.allclose(pooled(given, 3), reference(given, 3), atol=1e-6)


def test_equal_vectors_make_fewer_clusters_and_nothing_fails() -> None:
    given = np.tile(vectors(1), (50, 1))
    found = pooled(given, 2)
    assert 2 <= len(found) <= 25
    assert np.allclose(found, given[0], atol=1e-6)
