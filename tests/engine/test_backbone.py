"""Backbones: classes of transformers, a model's own code, static tables of vectors, prepacked linear layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tests.engine.plain_models import CPU, layout_of, random_texts, run, save_headed
from tests.support.models import WIDTH, edit
from tests.support.models.files import word_piece
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import backbone
from teimgr.engine.backbone import Batching, PackedLinear, convert_linears, prepacking_works
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Backbone, Layout
from teimgr.spec import Kind

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


CODE_WITH_TABLES = """
import torch
from torch import nn
import transformers

class TabledConfig(transformers.BertConfig):
    model_type = "tabled-bert"

class Widened(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.5, 2.0, width), persistent=False)
        self.shift = torch.full((width,), 0.25)  # neither parameter nor buffer

    def forward(self, hidden):
        return hidden * self.factors + self.shift

class TabledModel(transformers.BertModel):
    config_class = TabledConfig

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.widened = Widened(config.hidden_size)
        self.post_init()

    def forward(self, **inputs):
        found = super().forward(**inputs)
        dense = self.encoder.layer[0].output.dense
        assert dense.bias is None or dense.bias.shape[0] == dense.weight.shape[0]
        found.last_hidden_state = self.widened(found.last_hidden_state).to(found.last_hidden_state.dtype)
        return found
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_own_code_makes_hold_their_values_and_layers_their_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    theirs, texts = save_headed("bert", transformers.AutoModel, folder), random_texts()
    (folder / "tabled.py").write_text(CODE_WITH_TABLES)
    auto_map = {"AutoConfig": "tabled.TabledConfig", "AutoModel": "tabled.TabledModel"}
    edit(folder / "config.json", model_type="tabled-bert", auto_map=auto_map)

    model = load_model(replace(encoder(folder), trust_remote_code=True), CPU)
    model.backbone.convert(dtype)
    model.backbone.use(Batching.EQUAL_LENGTH)

    factors = torch.linspace(0.5, 2.0, theirs.config.hidden_size)
    expected = [plain_mean(theirs, text) * factors + 0.25 for text in texts]
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    np.testing.assert_allclose(run(model, texts, Output.DENSE), expected, atol=tolerance)


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


def test_the_width_is_that_behind_a_projection_of_the_last_layer(tmp_path: Path) -> None:
    """facebook/opt-350m: 1,024 numbers in a layer, and 512 behind them."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 64}
    config = transformers.OPTConfig(vocab_size=120, num_hidden_layers=2, num_attention_heads=4, **sizes)
    theirs = transformers.OPTModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model, texts = load_model(layout_of(tmp_path, Backbone.ENCODER, Kind.EMBEDDING), CPU), random_texts()

    assert model.widths[Output.DENSE] == 16
    for text, vector in zip(texts, run(model, texts, Output.DENSE), strict=True):
        with torch.inference_mode():
            hidden = theirs(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden.mean(dim=0).numpy(), atol=1e-5)


def test_missing_weights_are_counted_and_named(tmp_path: Path) -> None:
    save_headed("bert", transformers.AutoModel, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", num_hidden_layers=config["num_hidden_layers"] + 1)

    with pytest.raises(ModelLoadFailed, match=r"16 weights are missing from the files, first encoder\.layer\.2"):
        load_model(encoder(tmp_path), CPU)


SIZE = len(word_piece()())

TABLES: dict[str, dict[str, Any]] = {
    "sentence-transformers": {"embedding.weight": torch.randn(SIZE, WIDTH)},
    "model2vec": {"embeddings": torch.randn(SIZE, WIDTH)},
    "half": {"embeddings": torch.randn(SIZE, WIDTH).half()},
    "mapped": {"embeddings": torch.randn(50, WIDTH), "mapping": torch.arange(SIZE) % 50},
    "beside": {"embedding.weight": torch.randn(SIZE, WIDTH), "weights": torch.rand(SIZE)},
    "weighted": {
        "embeddings": torch.randn(50, WIDTH).half(),
        "mapping": (torch.arange(SIZE) % 50).int(),
        "weights": torch.rand(SIZE, dtype=torch.float64),
    },
}


def load(folder: Path, **tensors: Tensor) -> Model:
    save_file(tensors, folder / "model.safetensors")
    return load_model(layout_of(folder, Backbone.STATIC, Kind.EMBEDDING), CPU)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_vectors_are_the_means_of_the_rows(name: str, tmp_path: Path) -> None:
    model, texts = load(tmp_path, **TABLES[name]), random_texts()
    word_piece()().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    bag = StaticEmbedding.load(str(tmp_path)).float()
    ids = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    offsets = torch.tensor([0, *np.cumsum([len(text) for text in texts])[:-1]])
    with torch.inference_mode():
        wanted = bag({"input_ids": ids, "offsets": offsets})["sentence_embedding"]

    assert model.widths == {Output.DENSE: WIDTH, Output.TOKENS: WIDTH}
    for batching in (Batching.BY_RUN, Batching.EQUAL_LENGTH):
        model.backbone.use(batching)
        np.testing.assert_allclose(run(model, texts, Output.DENSE), wanted, atol=2e-5)
    plain = [model.run_reference(Encoded(text))[Output.DENSE].values[0] for text in texts]
    np.testing.assert_allclose(plain, wanted, atol=2e-5)


def test_an_eight_bit_table_is_taken_without_a_scale(tmp_path: Path) -> None:
    table = torch.randint(-127, 127, (SIZE, WIDTH), dtype=torch.int8)
    model, texts = load(tmp_path, embeddings=table), random_texts()

    for text, vector in zip(texts, run(model, texts, Output.DENSE), strict=True):
        np.testing.assert_allclose(vector, table.numpy()[text].mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"linear.weight": torch.zeros(4, 4)}, "no table"),
        ({"embeddings": torch.zeros(4, 4, dtype=torch.int32)}, "no table"),
        ({"embeddings": torch.zeros(4, 4), "mapping": torch.tensor([0, 4])}, "outside the table"),
        ({"embeddings": torch.zeros(4, 4), "weights": torch.zeros(3)}, "another number of weights"),
    ],
)
def test_a_file_without_a_sound_table_is_refused(tensors: dict[str, Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        load(tmp_path, **tensors)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")

    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        load_model(layout_of(tmp_path, Backbone.STATIC, Kind.EMBEDDING), CPU)


needs_operators = pytest.mark.skipif(not prepacking_works(torch.float32), reason="this torch cannot prepack")


class LinearAndActivation(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(24, 40)
        self.intermediate_act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(x))


@needs_operators
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_prepacked_layer_is_exact_in_float32(bias: bool, rows: int) -> None:
    linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, 24)

    torch.testing.assert_close(PackedLinear(linear, torch.float32)(x), linear(x), atol=2e-6, rtol=1e-5)


@needs_operators
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_a_gelu_behind_a_layer_is_fused(form: str) -> None:
    pair = LinearAndActivation(nn.GELU(approximate=form)).requires_grad_(False)
    x = torch.randn(5, 24)
    before = pair(x)

    assert convert_linears(pair, torch.float32) == 1
    assert isinstance(pair.intermediate_act_fn, nn.Identity)
    torch.testing.assert_close(pair(x), before, atol=2e-6, rtol=1e-5)


@needs_operators
def test_another_activation_stays_itself() -> None:
    pair = LinearAndActivation(nn.ReLU()).requires_grad_(False)
    x = torch.randn(5, 24)
    before = pair(x)

    assert convert_linears(pair, torch.float32) == 1
    assert isinstance(pair.intermediate_act_fn, nn.ReLU)
    torch.testing.assert_close(pair(x), before, atol=2e-6, rtol=1e-5)


def test_without_the_operators_plain_layers_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "prepacking_works", lambda dtype: False)
    pair = LinearAndActivation(nn.GELU()).requires_grad_(False)
    x = torch.randn(5, 24).bfloat16()

    assert convert_linears(pair, torch.bfloat16) == 0
    assert pair.dense.weight.dtype is torch.bfloat16
    expected = functional.gelu(functional.linear(x, pair.dense.weight, pair.dense.bias))
    torch.testing.assert_close(pair(x), expected)
