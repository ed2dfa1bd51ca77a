"""The metadata of a model directory: what is missing, and code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from teimgr.errors import ModelLoadFailed, ModelNotFound
from teimgr.models.reading import read_layout
from tests.support.models import build, edit


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return build("bert", tmp_path / "model")


def test_a_missing_directory_or_config_is_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_layout(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "classes", "served"),
    [
        ("eurobert", ["configuration_eurobert.EuroBertConfig", "modeling_eurobert.EuroBertModel"], True),
        ("eurobert", ["configuration_eurobert.EuroBertConfig", "modeling.EuroBertModel"], False),
        ("bert", ["jinaai/jina-bert-implementation--modeling.JinaBertModel"], False),
        ("xlm-roberta", ["modeling_lora.XLMRobertaLora"], False),
    ],
)
def test_a_models_own_code_is_needed_only_where_it_is_not_known_to_be_the_librarys(
    bert: Path, model_type: str, classes: list[str], served: bool
) -> None:
    edit(bert / "config.json", model_type=model_type, auto_map={f"Auto{i}": name for i, name in enumerate(classes)})

    if served:
        assert not read_layout(bert).trust_remote_code
    else:
        with pytest.raises(ModelLoadFailed, match="trust_remote_code = true"):
            read_layout(bert)
    assert read_layout(bert, trust_remote_code=True).trust_remote_code
