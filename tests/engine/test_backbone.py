"""Which class of the library, or of the model's own code, holds the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.support.models import edit
from tests.support.plain_models import CPU, layout_of, random_texts, run, save_headed

from teimgr.engine.job import Output
from teimgr.engine.model import load_model
from teimgr.errors import ModelLoadFailed
from teimgr.model_files import Backbone, Kind, Layout

OWN_CODE = """
import transformers

class OwnConfig(transformers.BertConfig):
    model_type = "own-bert"

class OwnModel(transformers.BertModel):
    config_class = OwnConfig

    def forward(self, **inputs):
        found = super().forward(**inputs)
        found.last_hidden_state = 2.0 * found.last_hidden_state
        return found
"""


def encoder(folder: Path) -> Layout:
    return layout_of(folder, Backbone.ENCODER, Kind.EMBEDDING)


def plain_mean(model: transformers.PreTrainedModel, text: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        found = model.base_model(input_ids=torch.from_numpy(text.astype(np.int64))[None])
    return found.last_hidden_state[0].mean(0)


@pytest.mark.parametrize(
    "auto",
    [transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification, transformers.AutoModel],
)
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_an_encoder_is_read_from_a_checkpoint_with_another_head(
    family: str, auto: type[transformers.AutoModel], tmp_path: Path
) -> None:
    theirs, texts = save_headed(family, auto, tmp_path), random_texts()

    for text, vector in zip(texts, run(load_model(encoder(tmp_path), CPU), texts, Output.DENSE), strict=True):
        np.testing.assert_allclose(vector, plain_mean(theirs, text), atol=1e-5)


def test_code_in_the_models_directory_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    theirs, texts = save_headed("bert", transformers.AutoModel, folder), random_texts()
    (folder / "own_code.py").write_text(OWN_CODE)
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    edit(folder / "config.json", model_type="own-bert", auto_map=auto_map)
    trusted = load_model(replace(encoder(folder), trust_remote_code=True), CPU)

    np.testing.assert_allclose(
        run(trusted, texts, Output.DENSE), [2.0 * plain_mean(theirs, text) for text in texts], atol=1e-5
    )
    with pytest.raises(ModelLoadFailed, match="trust_remote_code"):
        load_model(encoder(folder), CPU)


def test_a_model_that_the_library_knows_runs_the_librarys_code_unless_its_own_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    theirs, texts = save_headed("bert", transformers.AutoModel, folder), random_texts()
    (folder / "own_code.py").write_text("raise AssertionError('never to be run')")
    edit(folder / "config.json", auto_map={"AutoModel": "own_code.OwnModel"})

    vectors = run(load_model(encoder(folder), CPU), texts, Output.DENSE)
    np.testing.assert_allclose(vectors, [plain_mean(theirs, text) for text in texts], atol=1e-5)


def test_missing_weights_are_counted_and_named(tmp_path: Path) -> None:
    save_headed("bert", transformers.AutoModel, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", num_hidden_layers=config["num_hidden_layers"] + 1)

    with pytest.raises(ModelLoadFailed, match=r"16 weights are missing from the files, first encoder\.layer\.2"):
        load_model(encoder(tmp_path), CPU)
