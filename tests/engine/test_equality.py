"""Vectors of the whole engine, of no one module: those of sentence-transformers, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.conftest import Served
from tests.support.models import FAMILIES, TEXTS

from teimgr.engine.job import Lane

MINILM_TEST = (0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755)


def reference(path: Path, texts: Sequence[str], **options: Any) -> NDArray[np.float32]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    return np.asarray(model.encode(list(texts), show_progress_bar=False, **options))


def assert_same(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Cosine and largest difference of unit vectors."""
    ours, theirs = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
    assert (ours * theirs).sum(axis=1).min() >= 0.99999


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_gives_the_vectors_of_sentence_transformers(
    family: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir(family)
    served = serve(path)
    job = served.embed(TEXTS)

    assert job.errors == {}
    assert served.engine.info.batching == ("equal-length" if family in ("deberta_v2", "mpnet", "t5") else "packed")
    assert_same(job.vectors, reference(path, TEXTS, normalize_embeddings=True))
    np.testing.assert_allclose(np.linalg.norm(job.vectors, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_neighbours_do_not_change_a_vector(
    family: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    """Alone, with all others, and with its own copies: the same within what a matrix product's shape changes."""
    served = serve(model_dir(family))
    together = served.embed(TEXTS).vectors
    alone = np.concatenate([served.embed([text]).vectors for text in TEXTS])
    copies = served.embed([TEXTS[3]] * 20 + [TEXTS[6]]).vectors

    np.testing.assert_allclose(together, alone, atol=1e-6, rtol=0)
    np.testing.assert_allclose(copies[:20], np.repeat(alone[3:4], 20, axis=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "cls+mean"]
)
def test_every_pooling_of_the_files_is_served(
    pooling: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir("bert", pooling=pooling)
    job = serve(path).embed(TEXTS, normalize=False)

    assert_same(job.vectors, reference(path, TEXTS, normalize_embeddings=False))


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"])
def test_dense_modules_change_the_vectors_and_their_dimension(
    activation: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir("bert", dense=(24, activation))
    served = serve(path)

    assert served.engine.info.dimension == 24
    assert_same(served.embed(TEXTS).vectors, reference(path, TEXTS))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_go_before_the_text_and_may_be_left_out_of_the_pooling(
    include_prompt: bool, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    prompts = {"query": "The lazy fox asks: ", "document": ""}
    path = model_dir("bert", prompts=prompts, default_prompt_name="query", include_prompt=include_prompt)
    served = serve(path)

    assert_same(served.embed(TEXTS).vectors, reference(path, TEXTS))
    assert_same(served.embed(TEXTS, prompt_name="query").vectors, reference(path, TEXTS, prompt_name="query"))
    assert_same(served.embed(TEXTS, prompt_name="document").vectors, reference(path, TEXTS, prompt_name="document"))


def test_dimensions_are_cut_before_the_norm(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    served = serve(model_dir("bert"))
    raw = served.embed(TEXTS, normalize=False).vectors
    cut = served.embed(TEXTS, dimensions=8).vectors

    assert cut.shape == (len(TEXTS), 8)
    np.testing.assert_allclose(cut, raw[:, :8] / np.linalg.norm(raw[:, :8], axis=1, keepdims=True), atol=2e-6)


def test_bfloat16_stays_close(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    path = model_dir("bert")
    served = serve(path, dtype="bfloat16")
    cosines = (served.embed(TEXTS).vectors * reference(path, TEXTS, normalize_embeddings=True)).sum(axis=1)

    assert served.engine.info.dtype == "bfloat16"
    assert cosines.min() >= 0.999


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_real_minilm_gives_its_published_vector(dtype: str, minilm: Path, serve: Callable[..., Served]) -> None:
    served = serve(minilm, dtype=dtype)
    job = served.embed(["test"] * 3, Lane.INTERACTIVE, dimensions=128)

    assert served.engine.info.max_input_length == 256
    np.testing.assert_allclose(job.vectors[:, :8], [MINILM_TEST] * 3, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(job.vectors, axis=1), 1.0, atol=1e-6)


def test_the_real_minilm_is_sentence_transformers_exactly(minilm: Path, serve: Callable[..., Served]) -> None:
    texts = [" ".join(TEXTS[i % 6 : i % 6 + 1 + i % 3]) for i in range(40)] + [" ".join(TEXTS) * 4]
    job = serve(minilm).embed(texts)

    assert_same(job.vectors, reference(minilm, texts))
