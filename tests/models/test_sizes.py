"""Sizes in config.json that no model has are refused before the library takes memory for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models.metadata import read_metadata


@pytest.mark.parametrize("part", [None, "text_config", "encoder"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_labels", 10**9),
        ("num_hidden_layers", 10**9),
        ("vocab_size", -1),
        ("num_experts", 2**20),
        ("relative_attention_num_buckets", 2**40),
        ("hidden_size", 32.5),
    ],
)
def test_a_size_that_no_model_has_is_refused_by_name(tmp_path: Path, part: str | None, key: str, value: Any) -> None:
    config = {key: value} if part is None else {part: {key: value}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | config))

    where = "config.json" if part is None else f"{part} of config.json"
    with pytest.raises(ModelLoadFailed, match=f"^{where} has {key} = .*, which should be a whole number"):
        read_metadata(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize(
    "given",
    [{"num_labels": 0}, {"label2id": {"dim": 0}}, {"text_config": {"num_experts": 0}}, {"num_local_experts": 0}],
)
def test_sizes_that_models_have_are_not(tmp_path: Path, given: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | given))
    assert read_metadata(tmp_path, trust_remote_code=False).config["model_type"] == "bert"


@pytest.mark.parametrize("value", [[[]], [], 5, True, False, "x", "", float("nan")], ids=repr)
@pytest.mark.parametrize("place", ["text_config", "vlm_config", "vlm_config.text_config"])
def test_a_part_of_another_type_is_refused_by_name(tmp_path: Path, place: str, value: Any) -> None:
    outer, _, inner = place.partition(".")
    config = {"model_type": "bert", outer: {inner: value} if inner else value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed, match=f"^config.json has {place} = .*, which should be an object"):
        read_metadata(tmp_path, trust_remote_code=False)
