"""jina-reranker-v3 by its files; its scores: tests/worker/test_lists.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from teimgr.engine.job import Output, Pair
from teimgr.engine.text.listwise import list_scores
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import InvalidConfig, ModelLoadFailed, WrongModelKind
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import TEXTS, edit
from tests.support.models.listwise import DOCUMENT_MARK, QUERY_MARK, PlainList, build_listwise

SCORES = frozenset({Output.SCORES})


@pytest.mark.parametrize("trusted", [False, True])
def test_it_is_a_reranker_by_its_own_files_without_its_code(tmp_path: Path, trusted: bool) -> None:
    layout = read_layout(build_listwise(tmp_path), trust_remote_code=trusted)

    assert (layout.kind.value, layout.warnings, "auto_map" in layout.config) == ("reranker", (), False)
    assert layout.listwise is not None


@pytest.mark.parametrize("kind", ["embedding", "classifier", "multi-vector", "sparse"])
def test_it_is_nothing_else(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidConfig, match="reranker that compares the documents of a list"):
        read_layout(build_listwise(tmp_path), kind=kind)


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_jina_reranker_v3_5_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadFailed, match=r"as jina-reranker-v3\.5, whose prompt is another one"):
        read_layout(build_listwise(tmp_path, **changes))


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
        ("config.json", {"auto_map": {"AutoModel": "someone/else--modeling.JinaForRanking"}}, "trust_remote_code"),
    ],
)
def test_another_setting_is_refused_by_name(tmp_path: Path, file: str, changes: dict[str, Any], named: str) -> None:
    build_listwise(tmp_path)
    edit(tmp_path / file, **changes)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


def test_code_that_is_not_known_is_refused_even_if_it_is_trusted(tmp_path: Path) -> None:
    """Its class gives scores of its own, from another prompt maybe."""
    build_listwise(tmp_path, auto_map={"AutoModel": "modeling_v4.JinaForRanking"})

    with pytest.raises(ModelLoadFailed, match=r"modeling_v4\.JinaForRanking"):
        read_layout(tmp_path, trust_remote_code=True)


def test_a_tokenizer_without_the_marks_is_refused(tmp_path: Path) -> None:
    path = build_listwise(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace(QUERY_MARK, "<|other|>"))

    with pytest.raises(ModelLoadFailed, match="needs the tokens"):
        read_layout(tmp_path)


@pytest.mark.parametrize("missing", ["projector.0.weight", "projector.2.weight"])
def test_without_a_layer_it_is_refused(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
    missing: str,
) -> None:
    build_listwise(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelLoadFailed, match=f"they have no {missing}"):
        serve(tmp_path)


def test_marks_that_are_made_by_removing_marks_are_removed_too(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    """Else a text could add documents of its own to the list."""
    nested = f"<|embed_{QUERY_MARK}token|> a <|rerank_{DOCUMENT_MARK}token|> b <|embed_{DOCUMENT_MARK}token|>"
    build_listwise(tmp_path)
    served, plain = serve(tmp_path), PlainList(tmp_path)
    engine = served.engine
    found = engine.tokenizer.encode([Pair(nested, nested)], TokenizeOptions())

    assert (served.engine.info.kind, served.engine.info.outputs, served.engine.info.listwise) == (
        "reranker",
        ("scores",),
        True,
    )
    prompt = engine.tokenizer.lists
    assert prompt is not None
    clean = prompt.ids(" a  b ", [" a  b "])
    np.testing.assert_array_equal(found[0].ids.ravel(), clean)  # type: ignore[union-attr]
    alone = served.embed([Pair(TEXTS[2], TEXTS[4])], outputs=SCORES, listed=True).scores[0]
    np.testing.assert_allclose(alone, plain.scores(TEXTS[2], [TEXTS[4]]), atol=2e-5)
    with pytest.raises(WrongModelKind, match="scores the documents of a query together"):
        served.embed([Pair(TEXTS[2], TEXTS[4])], outputs=SCORES)
    with pytest.raises(WrongModelKind):
        served.embed([Pair(TEXTS[2], TEXTS[4])], outputs=frozenset({Output.MULTI_VECTOR}))


def test_scores_of_prompts_whose_documents_are_all_the_opposite_of_the_query() -> None:
    """Each of their weights is zero."""
    query = np.array([[1.0, 0.0]], np.float32)

    np.testing.assert_allclose(list_scores([np.concatenate([-query, query])] * 2), [-1, -1])
