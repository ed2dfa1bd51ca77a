"""Compare what an engine serves with a plain forward of the same weights, alone and in a batch, at many lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tests.engine.conftest import Served
from tests.support.plain_forwards import POOLINGS

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Input, Output
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.models.reading import read_layout

Forward = Callable[[torch.Tensor], torch.Tensor]
# Below, at, and beyond the length up to which NomicBERT was trained (48 here), up to that of the models (192).
LENGTHS = (3, 17, 30, 48, 49, 96, 150, 192, 17)


def ids_of(lengths: Sequence[int] = LENGTHS, vocabulary: int = 90) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(5)
    return [random.integers(5, vocabulary, length).astype(np.int32) for length in lengths]


def assert_exact(
    served: Served, forward: Forward, pooling: str, batching: str = "packed", lengths: Sequence[int] = LENGTHS
) -> None:
    """Alone and in one batch, the vectors of a plain forward."""
    texts = ids_of(lengths)
    truth = true_vectors(texts, forward, pooling)
    alone = np.concatenate([served.embed([text]).vectors for text in texts])
    together = served.embed(texts)

    assert together.errors == {}
    assert served.engine.info.batching == batching
    assert (together.vectors * truth.numpy()).sum(axis=1).min() >= 0.99999
    np.testing.assert_allclose(together.vectors, truth.numpy(), atol=3e-5, rtol=0)
    np.testing.assert_allclose(alone, truth.numpy(), atol=3e-5, rtol=0)


def assert_close(served: Served, forward: Forward, pooling: str, *, least: float) -> None:
    """In one batch, cosines of at least `least` to the vectors of a plain forward."""
    texts = ids_of()
    cosines = (served.embed(texts).vectors * true_vectors(texts, forward, pooling).numpy()).sum(axis=1)
    assert cosines.min() >= least, cosines


def true_vectors(texts: Sequence[NDArray[np.int32]], forward: Forward, pooling: str) -> torch.Tensor:
    """The vectors of a plain forward, of length 1."""
    truth = torch.stack([POOLINGS[pooling](forward(torch.from_numpy(text.astype(np.int64)))) for text in texts])
    return torch.nn.functional.normalize(truth, dim=-1)


def assert_scores_exact(served: Served, pairs: Sequence[Input], score: Callable[[Encoded], torch.Tensor]) -> None:
    """Raw scores of pairs are those of `score`, which is given their ids and types; alone and in one batch."""
    layout = read_layout(served.path)
    encoded = TextTokenizer(layout, served.engine.info.max_input_length).encode(pairs, TokenizeOptions())
    scores = frozenset({Output.SCORES})
    together = served.embed(pairs, outputs=scores, raw_scores=True).scores
    alone = [served.embed([pair], outputs=scores, raw_scores=True).scores[0] for pair in pairs]
    for batched, single, each in zip(together, alone, encoded, strict=True):
        assert isinstance(each, Encoded)
        truth = score(each).numpy()
        np.testing.assert_allclose(batched, truth, atol=2e-5)
        np.testing.assert_allclose(single, truth, atol=2e-5)
