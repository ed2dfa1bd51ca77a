"""Embedding models: lengths, poolings and modules are read as sentence-transformers reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from bench import weights

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.layout import Backbone, Dense, LayerNorm, Normalize
from teimgr.models.reading import read_layout
from teimgr.spec import Kind
from tests.support.models import build, build_m3, build_splade, build_static, edit, read, write, write_modules
from tests.support.models.encoders import IDENTITY, TANH


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return build("bert", tmp_path / "model")


def test_the_users_pooling_is_taken_over_that_of_the_files(bert: Path) -> None:
    assert read_layout(bert, "last-token").poolings == ("last_token",)
    with pytest.raises(InvalidConfig, match="pooling 'middle'"):
        read_layout(bert, "middle")


def test_the_newer_form_of_the_pooling_file_is_read(bert: Path) -> None:
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "lasttoken"]}))

    assert read_layout(bert).poolings == ("cls", "last_token")


@pytest.mark.clause("D-local")
def test_a_bare_transformer_of_the_bert_kind_pools_its_first_token(bert: Path) -> None:
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        (bert / name).unlink()
    layout = read_layout(bert)
    assert layout.poolings == ("cls",)
    assert "cls" in layout.warnings[0]

    edit(bert / "config.json", model_type="qwen3")
    with pytest.raises(InvalidConfig, match="set the pooling"):
        read_layout(bert)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"model_type": None}, "model_type"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "enables no pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "sum"}, "the pooling 'sum'.* is not served"),
        ("sentence_bert_config.json", {"config_kwargs": {"is_causal": False}}, "changes is_causal of config.json"),
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "task is retrieval"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "are served only for feature-extraction"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "every text into a chat template"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "length limit 'long'"),
    ],
)
def test_what_the_files_cannot_mean_is_refused_with_the_reason(
    bert: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    edit(bert / file, **changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(bert)


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        (["Transformer", "Dense"], "0 Pooling modules, not one: Transformer > Dense"),
        (["Transformer", "Pooling", "Pooling"], "2 Pooling modules, not one"),
        (["Transformer", "Dense", "Pooling"], "between transformer and Pooling"),
        (["Pooling"], "start with one transformer"),
        (["Transformer", "Transformer", "Pooling"], "start with one transformer"),
        (["Transformer", "Pooling", "MultiVectorMask"], "a Pooling module is not served in this place"),
        (["Transformer", "Pooling", "LSTM"], "LSTM module: .*recurrent"),
        (["Transformer", "CNN", "Pooling"], "CNN module: .*convolution"),
        (["Router"], "names a Router module, and its router_config.json is missing"),
        (["Asym"], "Asym module"),
        (["BoW"], "BoW module: .*counts words"),
        (["WordEmbeddings", "Pooling"], "WordEmbeddings module"),
        (["CLIPModel"], "a CLIPModel module, and its config.json is that of a bert"),
        (["Transformer", "WeightedLayerPooling", "Pooling"], "WeightedLayerPooling module"),
        (["Transformer", "Pooling", "SparseAutoEncoder"], "SparseAutoEncoder module"),
        (["Transformer", "Pooling", "Quantum"], "Quantum module, which is not known here"),
    ],
)
def test_chains_of_modules_that_are_not_served_are_refused_by_name(bert: Path, types: list[str], reason: str) -> None:
    write_modules(bert, *(f"sentence_transformers.models.{name}" for name in types))

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(bert)


def test_modules_that_read_another_output_of_the_transformer_are_refused(tmp_path: Path) -> None:
    """sentence-transformers gives them that of the task, or of none hidden states."""
    bert, splade = build("bert", tmp_path / "bert"), build_splade("bert", tmp_path / "splade")
    pooled = "sentence_transformers.models.Pooling"
    write_modules(bert, "sentence_transformers.sparse_encoder.models.MLMTransformer", pooled)
    write_modules(splade, "sentence_transformers.models.Transformer", read(splade / "modules.json")[1]["type"])

    with pytest.raises(ModelLoadFailed, match="task is fill-mask, and modules after it are served only for feature"):
        read_layout(bert)
    with pytest.raises(ModelLoadFailed, match=r"task is feature-extraction, .* for fill-mask"):
        read_layout(splade)
    edit(splade / "sentence_bert_config.json", transformer_task="fill-mask")
    assert read_layout(splade).splade is not None


@pytest.mark.parametrize(("given", "pooled"), [(None, False), (0, False), (True, True), (1, True)])
def test_include_prompt_is_read_as_a_truth_value(bert: Path, given: object, pooled: bool) -> None:
    write(bert / "1_Pooling" / "config.json", read(bert / "1_Pooling" / "config.json") | {"include_prompt": given})

    assert read_layout(bert).include_prompt is pooled


def test_modules_of_the_models_own_code_are_refused(bert: Path) -> None:
    write_modules(bert, "custom_st.Transformer", "sentence_transformers.models.Pooling")

    with pytest.raises(ModelLoadFailed, match=r"custom_st\.Transformer, code in the model's own repository"):
        read_layout(bert)


def test_modules_stay_in_the_models_directory(bert: Path) -> None:
    rows = [{"idx": 0, "name": "0", "path": "../other", "type": "sentence_transformers.models.Transformer"}]
    write(bert / "modules.json", rows)

    with pytest.raises(ModelLoadFailed, match="out of the model's directory"):
        read_layout(bert)


@pytest.mark.clause("D-local")
def test_modules_behind_the_pooling_are_read_in_order(tmp_path: Path) -> None:
    modules = ("Dense:Tanh", "LayerNorm", "Normalize", "Dense", "Normalize")
    layout = read_layout(build("bert", tmp_path, pooling="mean+max", modules=modules, prompts={"q": "ask: "}))

    assert layout.poolings == ("max", "mean")
    first, norm, middle, last = layout.projections  # a Normalize at the end is the request's business
    assert isinstance(first, Dense)
    assert (first.in_features, first.out_features, first.bias, first.activation) == (64, 32, True, TANH)
    assert isinstance(norm, LayerNorm)
    assert norm.dimension == 32
    assert isinstance(middle, Normalize)
    assert isinstance(last, Dense)
    assert last.activation == IDENTITY
    assert layout.prompts == {"q": "ask: "}


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"activation_function": None}, TANH),  # the key is absent
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "torch.nn.modules.activation.GELU"),
    ],
)
def test_a_dense_module_without_a_known_activation_has_that_of_sentence_transformers(
    tmp_path: Path, changes: dict[str, Any], activation: str
) -> None:
    path = build("bert", tmp_path, dense=(8, IDENTITY))
    edit(path / "2_Dense" / "config.json", **changes)

    (dense,) = read_layout(path).projections
    assert isinstance(dense, Dense)
    assert dense.activation == activation


def test_bge_m3_has_two_further_layers(tmp_path: Path) -> None:
    layout = read_layout(build_m3(tmp_path))

    assert (layout.kind, layout.poolings) == (Kind.EMBEDDING, ("cls",))
    assert layout.m3 is not None
    assert (layout.m3.sparse.name, layout.m3.multi_vector.name) == ("sparse_linear.pt", "colbert_linear.pt")
    assert layout.m3.unused_ids == (0, 1, 2, 3)

    (tmp_path / "colbert_linear.pt").unlink()
    assert read_layout(tmp_path).m3 is None


@pytest.mark.parametrize("layout", ["sentence-transformers", "model2vec"])
def test_static_embeddings_have_no_transformer_and_no_limit(
    tmp_path: Path, layout: Literal["sentence-transformers", "model2vec"]
) -> None:
    found = read_layout(build_static(tmp_path, layout=layout))

    assert (found.kind, found.backbone, found.poolings, found.projections) == (
        Kind.EMBEDDING,
        Backbone.STATIC,
        ("mean",),
        (),
    )
    assert found.max_length == 1_000_000
    assert (found.transformer_dir / "model.safetensors").is_file()


@pytest.mark.parametrize("own", [{}, {"max_length": 7}])
def test_without_modules_model2vecs_length_counts_and_not_tokenizer_json(own: dict[str, int], tmp_path: Path) -> None:
    edit(build_static(tmp_path, layout="model2vec") / "config.json", **own)
    edit(tmp_path / "tokenizer.json", truncation={"direction": "Left", "max_length": 9})
    for longest, left in ((9, True), (own.get("max_length", 512), False)):
        found = read_layout(tmp_path, strict=True)
        assert (found.backbone, found.max_length, found.truncate_left) == (Backbone.STATIC, longest, left)
        (tmp_path / "modules.json").unlink(missing_ok=True)


def test_the_real_minilm_is_read() -> None:
    layout = read_layout(weights.minilm())

    assert (layout.kind, layout.poolings, layout.type_ids) == (Kind.EMBEDDING, ("mean",), True)
    assert (layout.max_length, layout.position_offset, layout.lower_case) == (256, 0, False)


def test_big_birds_sparse_attention_is_refused_where_a_text_is_long_enough_for_it(tmp_path: Path) -> None:
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 3}
    edit(build("big_bird", tmp_path) / "config.json", **sparse)

    with pytest.raises(ModelLoadFailed, match="served up to 44 tokens: set max_seq_length to at most 44"):
        read_layout(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", max_seq_length=44)
    assert read_layout(tmp_path, strict=True).max_length == 44


def test_a_pipe_in_the_place_of_a_layer_of_m3_is_refused(tmp_path: Path) -> None:
    build_m3(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    os.mkfifo(tmp_path / "sparse_linear.pt")

    with pytest.raises(ModelLoadFailed, match=r"sparse_linear\.pt is a FIFO"):
        read_layout(tmp_path)
