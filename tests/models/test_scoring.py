"""Activations, labels and templates of rerankers and classifiers, from their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from teimgr.engine.job import Output, Pair
from teimgr.engine.text.listwise import list_scores
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.errors import InvalidConfig, ModelLoadFailed, WrongModelKind
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import (
    TEXTS,
    build_classifier,
    build_cross_encoder,
    build_prompted_reranker,
    build_yes_no_reranker,
    edit,
    write,
)
from tests.support.models.listwise import DOCUMENT_MARK, QUERY_MARK, PlainList, build_listwise


@pytest.mark.parametrize("layout", ["plain", "version-4", "saved"])
def test_the_activation_of_a_cross_encoder_is_its_authors(
    tmp_path: Path, layout: Literal["plain", "version-4", "saved"]
) -> None:
    path = build_cross_encoder("bert", tmp_path, layout=layout, activation="torch.nn.modules.linear.Identity")
    scoring = read_layout(path).scoring

    assert scoring is not None
    assert (scoring.labels, scoring.activation, scoring.causal) == (("LABEL_0",), "identity", None)


@pytest.mark.parametrize(
    ("labels", "multi_label", "own", "activation"),
    [
        (("yes",), False, None, "sigmoid"),
        (("a", "b"), False, None, "softmax"),
        (("a", "b"), True, None, "sigmoid"),
        (("a", "b"), False, "torch.nn.modules.activation.ReLU", "torch.nn.modules.activation.ReLU"),
        (("a", "b"), False, "own_code.Activation", "softmax"),
    ],
)
def test_where_the_authors_name_no_activation_the_labels_decide(
    tmp_path: Path, labels: tuple[str, ...], multi_label: bool, own: str | None, activation: str
) -> None:
    path = build_classifier("bert", tmp_path, labels=labels, multi_label=multi_label)
    edit(path / "config.json", sbert_ce_default_activation_function=own)
    if labels == ("a", "b"):
        edit(path / "config.json", id2label={"1": "b", "0": "a"})  # their order in the file means nothing
    scoring = read_layout(path).scoring

    assert scoring is not None
    assert (scoring.labels, scoring.activation) == (labels, activation)


def test_num_labels_counts_before_names_of_another_number(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path, labels=("a", "b", "c"))
    edit(path / "config.json", num_labels=3, id2label={"0": "a"})

    layout = read_layout(path)
    assert layout.kind == "classifier"
    assert layout.scoring is not None
    assert layout.scoring.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_labels_without_names_are_numbered_as_the_library_does(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path, labels=("a", "b"))
    edit(path / "config.json", id2label=None, label2id=None)
    scoring = read_layout(path).scoring

    assert scoring is not None
    assert scoring.labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"1": "a", "2": "b"}, "number the labels from 0, and has: 1, 2"),
        ({"first": "a", "second": "b"}, "number the labels from 0"),
    ],
)
def test_labels_that_cannot_be_told_are_refused(tmp_path: Path, labels: Any, reason: str) -> None:
    path = build_classifier("bert", tmp_path)
    edit(path / "config.json", id2label=labels)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(path)


@pytest.mark.parametrize(
    ("family", "typed"), [("bert", True), ("roberta", False), ("distilbert", False), ("deberta_v2", False)]
)
def test_pairs_have_token_types_where_tokenizer_and_model_do(tmp_path: Path, family: str, typed: bool) -> None:
    path = build_cross_encoder(family, tmp_path)
    assert read_layout(path).type_ids is typed

    edit(path / "tokenizer_config.json", model_input_names=None, tokenizer_class="BertTokenizerFast")
    assert read_layout(path).type_ids is typed
    edit(path / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    assert read_layout(path).type_ids is False


def test_the_card_of_qwen3_reranker_is_followed(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path)
    tokens = Tokenizer.from_file(str(path / "tokenizer.json"))
    scoring = read_layout(path).scoring

    assert scoring is not None
    assert scoring.causal is not None
    assert (scoring.activation, scoring.labels) == ("sigmoid", ("LABEL_0",))
    assert scoring.causal.true_token_id == tokens.token_to_id("yes")
    assert scoring.causal.false_token_id == tokens.token_to_id("no")
    assert scoring.template is not None
    assert scoring.template.prefix.endswith('can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
    assert scoring.template.body.endswith("<Query>: {query}\n<Document>: {document}")
    assert scoring.template.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_chat_template_is_rendered_around_query_and_document(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    layout = read_layout(path)
    assert layout.scoring is not None
    template = layout.scoring.template

    assert template is not None
    assert template.prefix.endswith("<Instruct>: Find what answers the query\n<Query>: ")
    assert template.body == "{query}\n<Document>: {document}"
    assert template.suffix.startswith("<|im_end|>\n<|im_start|>assistant")
    assert (layout.prompts, layout.default_prompt_name) == ({}, None)  # the instruction is in the template already


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "query once and then the document once"),
        ("{{ raise_error() }}", "cannot be used for the model's inputs"),
        ("{% for message in messages %}", "cannot be used for the model's inputs"),
        ("{{ 1 / 0 }}", "cannot be used for the model's inputs"),
        ("{{ 'a' * 10 ** 15 }}", "cannot be used for the model's inputs"),
        ("{{ 'a'.encode('nothing') }}", "cannot be used for the model's inputs"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot be used for the model's inputs"),
    ],
)
def test_a_chat_template_without_places_for_both_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text(template)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(path)
    assert read_layout(path, render=False).scoring is not None  # the daemon runs no template


def test_a_reranker_without_yes_and_no_is_refused(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path)
    write(path / "tokenizer.json", {"model": {"vocab": {"yes": 0}}})

    with pytest.raises(ModelLoadFailed, match=r'"yes" and "no" of Qwen3-Reranker.s prompt are not tokens'):
        read_layout(path)


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_a_reranker_whose_card_does_not_name_it_is_served_by_request_with_a_warning(
    tmp_path: Path, family: Literal["qwen2", "gemma"]
) -> None:
    path = build_prompted_reranker(tmp_path, family, card="\n# Ours\n")
    if family == "gemma":  # the card's tag says nothing about pairs
        with pytest.raises(InvalidConfig, match="set the pooling"):
            read_layout(path)
    layout = read_layout(path, kind="reranker")

    assert [warning.partition(":")[0] for warning in layout.warnings] == [
        "the files do not define how pairs are scored"
    ]
    with pytest.raises(ModelLoadFailed, match="strict_model_files"):
        read_layout(path, kind="reranker", strict=True)


def test_a_reranker_with_another_way_to_score_is_refused_by_name(tmp_path: Path) -> None:
    path = build_prompted_reranker(tmp_path, "qwen2", card="\n# ContextualAI/ctxl-rerank-v2\n")

    with pytest.raises(ModelLoadFailed, match="ctxl-rerank"):
        read_layout(path)


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
    with pytest.raises(ModelLoadFailed, match=r"like jina-reranker-v3\.5, whose prompt differs"):
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
