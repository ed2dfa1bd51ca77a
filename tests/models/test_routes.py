"""Sparse models whose queries go another way than documents: served by role, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from teimgr.engine.job import Output
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import TEXTS, build_routed_sparse, edit, read, write

TABLE = "query_0_SparseStaticEmbedding"
BOTH = frozenset({Output.SPARSE, Output.DENSE})


def vectors(served: Served, texts: list[str], **options: Any) -> np.ndarray[Any, Any]:
    """Dense vectors, after a comparison with the sparse entries."""
    job = served.embed(texts, outputs=BOTH, normalize=False, **options)
    assert job.errors == {}
    for row, sparse in zip(job.vectors, job.sparse, strict=True):
        filled = np.zeros_like(row)
        assert sparse is not None
        filled[sparse.indices] = sparse.values
        np.testing.assert_array_equal(filled, row)
    return job.vectors


@pytest.mark.parametrize(
    ("nested", "default"), [(False, "document"), (True, "query"), (False, None)], ids=["opensearch", "nested", "first"]
)
def test_queries_and_documents_are_those_of_sentence_transformers(
    nested: bool,
    default: str | None,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    """The first route in the file is the default where none is named; queries are cut at their own length."""
    from sentence_transformers import SparseEncoder

    build_routed_sparse(tmp_path, nested=nested, default_route=default)
    served = serve(tmp_path)
    texts = [*TEXTS, "The quick brown fox jumps over the lazy dog. " * 4, "fog fog fog"]
    theirs = SparseEncoder(str(tmp_path), device="cpu")
    options = {"convert_to_sparse_tensor": False, "show_progress_bar": False}

    assert served.engine.info.prompts == ("query", "document")
    assert served.engine.info.default_prompt_name == (default or "query")
    assert served.engine.info.warnings == ()
    for role, truth in {
        "query": theirs.encode_query(texts, **options),
        "document": theirs.encode_document(texts, **options),
        None: theirs.encode(texts, **options),
    }.items():
        np.testing.assert_allclose(vectors(served, texts, prompt_name=role), truth.numpy(), atol=2e-5)
        alone = np.concatenate([vectors(served, [text], prompt_name=role) for text in texts])
        np.testing.assert_allclose(alone, truth.numpy(), atol=2e-5)


def test_both_roles_of_a_text_in_one_batch(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    build_routed_sparse(tmp_path)
    served = serve(tmp_path)
    text = ["the lazy dog"]
    expected = {role: vectors(served, text, prompt_name=role) for role in ("query", "document")}
    jobs = {
        role: [served.send(text, outputs=BOTH, normalize=False, prompt_name=role) for _ in range(8)]
        for role in expected
    }

    assert not np.allclose(expected["query"], expected["document"])
    for role, sent in jobs.items():
        for job in sent:
            np.testing.assert_allclose(served.wait(job).vectors, expected[role], atol=2e-5)


def test_prompts_go_before_their_role(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    from sentence_transformers import SparseEncoder

    build_routed_sparse(tmp_path)
    edit(tmp_path / "config_sentence_transformers.json", prompts={"query": "fox ", "document": "", "other": "dog "})
    served = serve(tmp_path)
    theirs = SparseEncoder(str(tmp_path), device="cpu")
    options = {"convert_to_sparse_tensor": False, "show_progress_bar": False}

    assert served.engine.info.prompts == ("query", "document", "other")
    truth = theirs.encode_query(list(TEXTS), **options).numpy()
    np.testing.assert_allclose(vectors(served, list(TEXTS), prompt_name="query"), truth, atol=2e-5)
    truth = theirs.encode(list(TEXTS), prompt_name="other", **options).numpy()
    np.testing.assert_allclose(vectors(served, list(TEXTS), prompt_name="other"), truth, atol=2e-5)


def change(folder: Path, **keys: Any) -> None:
    edit(folder / "router_config.json", **keys)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda at: (at / "router_config.json").unlink(), r"router_config\.json is missing"),
        (lambda at: change(at, structure={"document": ["", "document_1_SpladePooling"]}), "Router module of document"),
        (lambda at: change(at, structure={"query": [TABLE], "image": [""]}), "Router module of query.*image"),
        (lambda at: change(at, parameters={"default_route": "other"}), "default_route 'other'"),
        (
            lambda at: change(at, parameters={"route_mappings": {"(None, 'text')": "query"}}),
            "chosen by route_mappings .* only a route for queries",
        ),
        (lambda at: write(at / TABLE / "config.json", {"path": "idf.json"}), "path = 'idf.json'"),
        (lambda at: change(at, types={**read(at / "router_config.json")["types"], TABLE: "own.Table"}), "own.Table"),
        (lambda at: change(at, structure={"query": [], "document": []}), "query: nothing"),
    ],
)
def test_other_routes_are_refused_by_name(spoil: Callable[[Path], Any], named: str, tmp_path: Path) -> None:
    build_routed_sparse(tmp_path)
    spoil(tmp_path)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"weight": torch.ones(100_000)}, r"a weight of \(100000,\)"),
        ({"weight": torch.ones(4, 4)}, r"a weight of \(4, 4\)"),
        ({"other": torch.ones(4)}, "no weight and other"),
        ({"weight": torch.full((50,), torch.nan)}, "NaN"),
    ],
)
def test_weights_of_queries_that_do_not_fit_are_refused(
    weights: dict[str, torch.Tensor],
    named: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build_routed_sparse(tmp_path)
    save_file(weights, tmp_path / TABLE / "model.safetensors")

    with pytest.raises(ModelLoadFailed, match=named):
        serve(tmp_path)
