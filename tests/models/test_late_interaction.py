"""Late-interaction models, as their files describe them in three layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer

from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Dense, LateInteraction
from teimgr.models.reading import read_layout
from tests.support.models import (
    TOKEN_WIDTH,
    build_multi_vector,
    edit,
    read,
    write,
)

Layouts = Literal["saved", "pylate", "stanford"]


def late_of(path: Path) -> LateInteraction:
    late = read_layout(path).late
    assert late is not None
    return late


def test_pylate_before_sentence_transformers_5_names_no_kind_of_model(tmp_path: Path) -> None:
    """LiquidAI's and LightOn's first models: config_sentence_transformers.json has PyLate's keys and no model_type."""
    path = build_multi_vector("bert", tmp_path, layout="pylate", query_length=12, document_length=40)
    saved = read_layout(path)
    edit(path / "config_sentence_transformers.json", model_type=None)

    assert read_layout(path) == saved


@pytest.mark.parametrize("layout", ["saved", "pylate", "stanford"])
def test_the_three_layouts_of_late_interaction_mean_the_same(tmp_path: Path, layout: Layouts) -> None:
    path = build_multi_vector("bert", tmp_path, layout=layout, query_length=12, document_length=40, attend=True)
    tokens = Tokenizer.from_file(str(path / "tokenizer.json"))
    late = late_of(path)

    (dense,) = late.projections
    assert isinstance(dense, Dense)
    assert (dense.out_features, dense.bias, late.normalize) == (TOKEN_WIDTH, False, True)
    assert (late.query_length, late.document_length, late.expand_queries, late.attend_to_expansion) == (
        12,
        40,
        True,
        True,
    )
    assert late.expansion_token_id == tokens.token_to_id("[MASK]")
    assert tokens.token_to_id(".") in late.skip_ids
    assert tokens.token_to_id("[UNK]") not in late.skip_ids  # of punctuation that is no token
    assert not late.skip_in_queries


@pytest.mark.parametrize(
    ("layout", "query", "document"), [("pylate", "[Q] ", "[D] "), ("stanford", "[unused0]", "[unused1]")]
)
def test_prefixes_that_are_tokens_are_ids_and_no_text(
    tmp_path: Path, layout: Layouts, query: str, document: str
) -> None:
    path = build_multi_vector("bert", tmp_path, layout=layout)
    tokens = Tokenizer.from_file(str(path / "tokenizer.json"))
    late = late_of(path)

    assert late.query_prefix_ids == (tokens.token_to_id(query),)
    assert late.document_prefix_ids == (tokens.token_to_id(document),)
    assert read_layout(path).prompts == {"query": "", "document": ""}
    assert read_layout(path).default_prompt_name == "document"


def test_a_prefix_that_is_no_token_is_text_before_the_prompt(tmp_path: Path) -> None:
    path = build_multi_vector("bert", tmp_path, layout="pylate")
    edit(path / "config_sentence_transformers.json", query_prefix="search: ", prompts={"query": "search: now "})

    assert late_of(path).query_prefix_ids == ()
    assert read_layout(path).prompts["query"] == "search: now "


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"do_query_expansion": False}, (12, False)),
        ({"do_query_expansion": None, "query_length": None}, (32, True)),
        ({"query_expansion": {"strategy": "fixed", "length": 20}}, (20, True)),
    ],
)
def test_pylates_keys_are_read_as_sentence_transformers_reads_them(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, bool]
) -> None:
    path = build_multi_vector("bert", tmp_path, layout="pylate")
    edit(path / "config_sentence_transformers.json", **changes)
    late = late_of(path)

    assert (late.query_length, late.expand_queries) == expected


def test_pylate_skips_punctuation_where_it_names_no_words(tmp_path: Path) -> None:
    path = build_multi_vector("bert", tmp_path, layout="pylate")
    punctuation = late_of(path).skip_ids
    edit(path / "config_sentence_transformers.json", skiplist_words=None)
    assert late_of(path).skip_ids == punctuation != ()

    edit(path / "config_sentence_transformers.json", skiplist_words=[])
    assert late_of(path).skip_ids == ()


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [1]}, "MultiVectorMask that keeps"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query"]}, "MultiVectorMask that keeps"),
        ("1_Dense/config.json", {"module_output_name": "sentence_embedding"}, "turns token_embeddings into sentence"),
        ("1_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Softmax"}, "over the texts"),
        ("1_Dense/config.json", {"activation_function": "torch.nn.LogSoftmax"}, "over the texts"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 8}},
            "other than to a fixed length",
        ),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 8, "token": "[X]"}},
            r"filled with \[X\], which the tokenizer does not have",
        ),
    ],
)
def test_late_interaction_of_another_way_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    path = build_multi_vector("bert", tmp_path)
    edit(path / file, **changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(path)


@pytest.mark.parametrize(
    ("most", "query", "document", "limits"),
    [
        (7, 12, 40, (40, 12, 40)),  # PyLate leaves in max_seq_length what it was set to last: for queries here
        (39, 12, 40, (40, 12, 40)),
        (96, 12, 40, (96, 12, 40)),
        (7, 12, 4000, (128, 12, 4000)),  # the positions that there are
        (20, 12, None, (20, 12, None)),
        (8, 12, None, (12, 12, 8)),
    ],
)
def test_the_length_of_a_role_counts_in_place_of_that_of_all_texts(
    tmp_path: Path, most: int, query: int, document: int | None, limits: tuple[int, int | None, int | None]
) -> None:
    path = build_multi_vector("bert", tmp_path, layout="pylate", query_length=query)
    edit(path / "sentence_bert_config.json", max_seq_length=most)
    edit(path / "config_sentence_transformers.json", document_length=document)
    layout = read_layout(path)

    assert layout.late is not None
    assert (layout.max_length, layout.late.query_length, layout.late.document_length) == limits


def test_settings_of_the_transformer_win_over_pylates_keys(tmp_path: Path) -> None:
    path = build_multi_vector("bert", tmp_path, layout="pylate", query_length=8, document_length=16)
    edit(path / "sentence_bert_config.json", query_length=12, document_length=20)
    write(path / "sentence_bert_config.json", read(path / "sentence_bert_config.json") | {"query_expansion": None})
    late = late_of(path)

    assert (late.query_length, late.document_length, late.expand_queries) == (12, 20, False)


def test_a_mask_for_no_task_skips_nothing_and_one_for_unknown_words_skips_these(tmp_path: Path) -> None:
    path = build_multi_vector("bert", tmp_path)
    unknown = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("[UNK]")
    edit(path / "2_MultiVectorMask" / "config.json", skiplist_words=[".", "[UNK]"])
    assert unknown in late_of(path).skip_ids

    edit(path / "2_MultiVectorMask" / "config.json", skiplist_tasks=[])
    assert late_of(path).skip_ids == ()
