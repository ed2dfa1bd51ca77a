"""Which kind a model is: from the files of every layout, and from the instance where the files leave room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.layout import Backbone
from teimgr.models.reading import read_layout
from teimgr.spec import Kind
from tests.support.models import (
    build,
    build_classifier,
    build_cross_encoder,
    build_m3,
    build_multi_vector,
    build_splade,
    build_static,
    build_yes_no_reranker,
    edit,
)
from tests.support.models.scoring import build_token_classifier

Make = Callable[[Path], Path]


def _bare_masked_lm(folder: Path) -> Path:
    return build_splade("bert", folder, layout="plain")


@pytest.mark.parametrize(
    ("make", "kind", "backbone"),
    [
        (lambda folder: build("bert", folder), "embedding", "ENCODER"),
        (lambda folder: build("qwen3", folder), "embedding", "ENCODER"),
        (build_m3, "embedding", "ENCODER"),
        (build_static, "embedding", "STATIC"),
        (_bare_masked_lm, "embedding", "ENCODER"),
        (lambda folder: build_splade("bert", folder, layout="version-5"), "sparse", "MASKED_LM"),
        (lambda folder: build_splade("distilbert", folder, layout="saved"), "sparse", "MASKED_LM"),
        (lambda folder: build_multi_vector("bert", folder, layout="saved"), "multi-vector", "ENCODER"),
        (lambda folder: build_multi_vector("bert", folder, layout="pylate"), "multi-vector", "ENCODER"),
        (lambda folder: build_multi_vector("bert", folder, layout="stanford"), "multi-vector", "ENCODER"),
        (lambda folder: build_cross_encoder("bert", folder), "reranker", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_cross_encoder("bert", folder, layout="saved"), "reranker", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_classifier("bert", folder), "classifier", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_yes_no_reranker(folder, layout="plain"), "reranker", "CAUSAL_LM"),
        (lambda folder: build_yes_no_reranker(folder, layout="saved"), "reranker", "CAUSAL_LM"),
    ],
)
def test_the_kind_is_told_by_the_files(tmp_path: Path, make: Make, kind: str, backbone: str) -> None:
    layout = read_layout(make(tmp_path))

    assert (layout.kind, layout.backbone) == (Kind(kind), Backbone[backbone])
    assert read_layout(tmp_path, kind=kind).kind is layout.kind  # to name it again changes nothing


def test_a_masked_lm_is_sparse_where_the_instance_says_so(tmp_path: Path) -> None:
    path = _bare_masked_lm(tmp_path)

    for layout in (
        read_layout(path, "splade"),
        read_layout(path, kind="sparse"),
        read_layout(path, "splade", kind="sparse"),
    ):
        assert (layout.kind, layout.pooling, layout.backbone) == (Kind.SPARSE, "splade", Backbone.MASKED_LM)


def test_the_encoder_of_a_scoring_or_sparse_model_may_be_asked_for(tmp_path: Path) -> None:
    classifier = build_classifier("bert", tmp_path / "classifier")
    splade = build_splade("bert", tmp_path / "splade")

    assert read_layout(classifier, "mean", kind="embedding").poolings == ("mean",)
    assert read_layout(splade, "cls", kind="embedding").backbone is Backbone.ENCODER


def test_a_reranker_may_be_served_as_a_classifier_of_one_label(tmp_path: Path) -> None:
    assert read_layout(build_cross_encoder("bert", tmp_path), kind="classifier").kind is Kind.CLASSIFIER


def test_a_language_model_is_a_reranker_where_its_card_or_the_instance_says_so(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path)
    (path / "README.md").unlink()

    with pytest.raises(InvalidConfig, match="set the pooling"):
        read_layout(path)
    assert read_layout(path, "last-token").kind is Kind.EMBEDDING
    assert read_layout(path, kind="reranker").scoring == read_layout(build_yes_no_reranker(tmp_path)).scoring

    edit(path / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelLoadFailed, match="bge-reranker-v2-gemma, monoT5, mT5 on mMARCO are served"):
        read_layout(path, kind="reranker")


@pytest.mark.parametrize(
    ("make", "pooling", "kind", "reason"),
    [
        (lambda folder: build("bert", folder), None, "bi-encoder", "kind 'bi-encoder' is not one of embedding, sparse"),
        (lambda folder: build("bert", folder), "middle", None, "pooling 'middle' is not one of cls"),
        (lambda folder: build("bert", folder), "splade", None, "needs a masked-LM head, and the model is BertModel"),
        (lambda folder: build("bert", folder), None, "sparse", "BertModel has no masked-LM head"),
        (lambda folder: build("bert", folder), None, "reranker", "BertModel has no head that scores texts"),
        (lambda folder: build("bert", folder), None, "classifier", "BertModel has no head that scores texts"),
        (lambda folder: build("bert", folder), None, "multi-vector", "no projection of token vectors"),
        (lambda folder: build_classifier("bert", folder), None, "reranker", "3 labels, and a reranker has one"),
        (lambda folder: build_multi_vector("bert", folder), None, "embedding", "a vector per token and no pooling"),
        (lambda folder: build_yes_no_reranker(folder), None, "classifier", "answers yes or no to pairs"),
        (lambda folder: build_splade("bert", folder), "mean", None, "pooling 'mean' contradicts the sparse"),
        (_bare_masked_lm, "splade", "embedding", 'pooling "splade" makes a sparse model, and kind is "embedding"'),
    ],
)
def test_contradictions_are_refused_with_the_reason(
    tmp_path: Path, make: Make, pooling: str | None, kind: str | None, reason: str
) -> None:
    path = make(tmp_path)

    with pytest.raises(InvalidConfig, match=reason):
        read_layout(path, pooling, kind=kind)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: build_classifier("bert", folder),
        lambda folder: build_yes_no_reranker(folder),
        lambda folder: build_multi_vector("bert", folder),
        build_static,
    ],
)
def test_a_pooling_that_means_nothing_is_a_warning(tmp_path: Path, make: Make) -> None:
    layout = read_layout(make(tmp_path), "cls")

    assert "cls" not in layout.poolings
    kind = layout.kind.value
    assert f"pooling = 'cls' is ignored: models of the kind {kind} have their own pooling" in layout.warnings
    with pytest.raises(ModelLoadFailed, match="strict_model_files"):
        read_layout(tmp_path, "cls", strict=True)


@pytest.mark.parametrize("make", [build_cross_encoder, build_classifier, build_token_classifier])
def test_splade_on_a_model_that_scores_is_ignored_as_by_tei(tmp_path: Path, make: Callable[..., Path]) -> None:
    layout = read_layout(make("bert", tmp_path), "splade")

    assert layout.kind in (Kind.RERANKER, Kind.CLASSIFIER, Kind.TOKEN_CLASSIFIER)
    assert "pooling = 'splade' is ignored" in layout.warnings[-1]


def test_heads_on_tokens_are_refused(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path)
    edit(path / "config.json", architectures=["BertForFrameClassification"])

    with pytest.raises(ModelLoadFailed, match="BertForFrameClassification labels the parts of an input"):
        read_layout(path)


def test_a_head_without_labels_beside_an_encoder_is_not_asked(tmp_path: Path) -> None:
    """As Alibaba's gte-multilingual-base lists it."""
    path = build("bert", tmp_path)
    (path / "modules.json").unlink()
    edit(path / "config.json", architectures=["BertModel", "BertForTokenClassification"])

    assert read_layout(path).kind is Kind.EMBEDDING
