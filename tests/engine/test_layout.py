"""What the files say is read as sentence-transformers reads it, and what cannot be served is refused at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models import build, edit

from teimgr.errors import InvalidConfig, ModelLoadFailed, ModelNotFound
from teimgr.layout import read_layout


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return build("bert", tmp_path / "model")


def test_the_real_minilm_is_read(minilm: Path) -> None:
    layout = read_layout(minilm)

    assert layout.poolings == ("mean",)
    assert (layout.max_length, layout.position_offset, layout.lower_case) == (256, 0, False)


def test_the_length_limit_never_exceeds_the_positions(bert: Path) -> None:
    edit(bert / "sentence_bert_config.json", max_seq_length=4000)
    assert read_layout(bert).max_length == 128

    edit(bert / "config.json", model_type="roberta", pad_token_id=1)
    assert read_layout(bert).max_length == 126


def test_without_a_saved_length_the_tokenizer_and_the_positions_decide(bert: Path) -> None:
    (bert / "sentence_bert_config.json").unlink()
    assert read_layout(bert).max_length == 128

    edit(bert / "tokenizer_config.json", model_max_length=77)
    assert read_layout(bert).max_length == 77


def test_the_users_pooling_is_taken_over_that_of_the_files(bert: Path) -> None:
    assert read_layout(bert, "last-token").poolings == ("last_token",)
    with pytest.raises(InvalidConfig, match="pooling 'middle'"):
        read_layout(bert, "middle")


def test_the_newer_form_of_the_pooling_file_is_read(bert: Path) -> None:
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "lasttoken"]}))

    assert read_layout(bert).poolings == ("cls", "last_token")


def test_a_bare_transformer_of_the_bert_kind_pools_its_first_token(bert: Path) -> None:
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        (bert / name).unlink()
    layout = read_layout(bert)
    assert layout.poolings == ("cls",)
    assert "cls" in layout.notes[0]

    edit(bert / "config.json", model_type="qwen3")
    with pytest.raises(InvalidConfig, match="set the pooling"):
        read_layout(bert)


def test_a_missing_directory_or_config_is_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_layout(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a"}}, "reranker"),
        (
            "config.json",
            {"architectures": ["BertForTokenClassification"], "id2label": {"0": "a", "1": "b"}},
            "classifier",
        ),
        ("config.json", {"architectures": ["HF_ColBERT"]}, "ColBERT"),
        ("config.json", {"model_type": None}, "model_type"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SPLADE"),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "reranker"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "no pooling on"),
        ("1_Pooling/config.json", {"pooling_mode": "sum"}, "not served"),
    ],
)
def test_other_kinds_of_model_are_refused_with_the_reason(
    bert: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    edit(bert / file, **changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(bert)


def test_splade_pooling_is_refused(bert: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="SPLADE"):
        read_layout(bert, "splade")


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (["Transformer", "Dense"], "every token"),
        (["Transformer", "LSTM", "Pooling"], "LSTM"),
        (["Transformer", "Pooling", "Pooling"], "more than one pooling"),
        (["Pooling"], "0 transformers"),
    ],
)
def test_unknown_chains_of_modules_are_refused(bert: Path, order: list[str], reason: str) -> None:
    modules = [{"idx": i, "path": "", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(order)]
    (bert / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(bert)


def test_broken_json_names_the_file(bert: Path) -> None:
    (bert / "config.json").write_text("{")

    with pytest.raises(ModelLoadFailed, match=r"config\.json is not valid JSON"):
        read_layout(bert)


def test_dense_modules_and_prompts_are_read(model_dir: Callable[..., Path]) -> None:
    path = model_dir("bert", dense=(24, "torch.nn.modules.activation.Tanh"), prompts={"q": "ask: "})
    layout = read_layout(path)

    assert [(d.in_features, d.out_features, d.bias) for d in layout.projections] == [(32, 24, True)]
    assert layout.prompts == {"q": "ask: "}
