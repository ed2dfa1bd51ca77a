"""Loading a model of the library: every weight in the files has a place, or the model is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.engine.plain_models import layout_of
from tests.support.models import TEXTS, build, build_cross_encoder, build_multi_vector, build_splade, edit, read, write
from tests.support.models.own_code import build_decoder
from tests.support.models.single_families import build_t5gemma
from torch import nn

from teimgr.engine.library_model import load_module, load_plain_module
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Backbone, Kind
from teimgr.models.reading import read_layout

CPU = torch.device("cpu")


def load(path: Path, **options: str) -> Any:
    return load_module(read_layout(path, **options), CPU)


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["encoder.layer.0.attention.self.distance_embedding.weight", "linear.weight", "adapter.down.weight"]
)
def test_a_weight_that_no_module_takes_refuses_the_model(name: str, tmp_path: Path) -> None:
    build("bert", tmp_path)
    change_weights(tmp_path, lambda weights: weights | {name: torch.ones(3, 8)})

    with pytest.raises(ModelLoadFailed, match=rf"weights .* does not use: {name}"):
        load(tmp_path)


def test_voyages_linear_layer_is_not_dropped(tmp_path: Path) -> None:
    build_decoder("qwen3", tmp_path, extra={"linear.weight": torch.ones(16, 32)}, use_bidirectional_attention=True)

    with pytest.raises(ModelLoadFailed, match=r"does not use: linear\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("pooler.dense.weight", "bert.pooler.dense.bias", "cls.predictions.bias", "cls.seq_relationship.weight"),
        *("classifier.weight", "embeddings.position_ids", "lm_head.weight"),
    ],
)
def test_a_head_that_is_not_asked_for_and_a_computed_table_are_left_out(name: str, tmp_path: Path) -> None:
    build("bert", tmp_path)
    change_weights(tmp_path, lambda weights: weights | {name: torch.ones(1, 128)})

    load(tmp_path)


def test_models_with_heads_serve_as_embedding_models_too(tmp_path: Path) -> None:
    load(build_cross_encoder("bert", tmp_path / "scores"), kind="embedding", pooling="cls")
    load(build_splade("bert", tmp_path / "sparse"), kind="embedding", pooling="cls")
    load(build_multi_vector("bert", tmp_path / "late", layout="stanford"))


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    build("bert", tmp_path)
    edit(tmp_path / "config.json", intermediate_size=2 * read(tmp_path / "config.json")["intermediate_size"])

    with pytest.raises(
        ModelLoadFailed, match=r"intermediate\.dense\.bias is \(64,\) in the files, .* \(128,\), and \d+ more"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vocab_size": 1 << 24}, "16,777,216 × 32 (vocab_size)"),
        ({"head_dim": 1 << 17}, "524,288 × 32 (head_dim)"),
        ({"hidden_size": 1 << 14}, "16,384 × 16,384 (hidden_size)"),
        ({"text_config": {"hidden_size": 64, "intermediate_size": 1 << 20}}, "× 64 (text_config.intermediate_size)"),
    ],
)
def test_a_matrix_larger_than_all_weights_is_refused_before_memory_is_taken(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    build_decoder("qwen3", tmp_path)
    known = {"hidden_size": 32, "vocab_size": 8, "num_attention_heads": 4}

    with pytest.raises(ModelLoadFailed, match=rf"^config\.json makes a weight of .*{re.escape(what)}"):
        load_module(layout_of(tmp_path, Backbone.ENCODER, Kind.EMBEDDING, config=known | changes), CPU)


def test_missing_weights_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    build("bert", tmp_path)
    change_weights(tmp_path, lambda weights: {k: v for k, v in weights.items() if "layer.1.output.dense" not in k})

    with pytest.raises(ModelLoadFailed, match=r"2 weights are missing .* encoder\.layer\.1\.output\.dense\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("prefix", ["auto_model.", "0.auto_model.", "auto_model.bert."])
def test_a_prefix_of_all_names_is_taken_off(prefix: str, tmp_path: Path) -> None:
    """As of a state dict of sentence-transformers' Transformer that was saved by hand."""
    build("bert", tmp_path)
    plain = load(tmp_path).state_dict()
    change_weights(tmp_path, lambda weights: {f"{prefix}{name}": weight for name, weight in weights.items()})
    found = load(tmp_path).state_dict()

    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("student.{}", "teacher.{}"), r"does not use: teacher\.embeddings\.LayerNorm\.bias"),
        (("auto_model.{}", "2.linear.weight"), r"does not use: 2\.linear\.weight"),
        (("layers.{}.x",), r"37 weights are missing .* the files have others, first layers\."),
    ],
)
def test_names_that_are_not_the_models_alone_behind_one_prefix_are_refused(
    names: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    build("bert", tmp_path)
    change_weights(tmp_path, lambda all: {name.format(key): all[key].clone() for key in all for name in names})

    with pytest.raises(ModelLoadFailed, match=reason):
        load(tmp_path)


def test_code_of_the_library_that_fails_is_a_sentence(tmp_path: Path) -> None:
    build("bert", tmp_path)
    edit(tmp_path / "config.json", hidden_act="no-such-function")

    with pytest.raises(ModelLoadFailed, match=r"cannot load .*no-such-function"):
        load(tmp_path)


def test_of_t5gemmas_files_with_a_decoder_the_encoder_is_loaded(tmp_path: Path) -> None:
    whole = load(build_t5gemma(tmp_path / "whole", whole=True)).state_dict()
    encoder = load(build_t5gemma(tmp_path / "encoder")).state_dict()

    assert whole.keys() == encoder.keys()
    assert all(torch.equal(whole[name], encoder[name]) for name in whole)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_what_a_forward_returns_besides_changes_nothing(
    family: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build(family, tmp_path)
    truth = serve(tmp_path).embed(TEXTS).vectors
    edit(tmp_path / "config.json", return_dict=False, output_hidden_states=True, output_attentions=True)

    np.testing.assert_allclose(serve(tmp_path).embed(TEXTS).vectors, truth, atol=1e-6)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    build("bert", tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    write(tmp_path / "model.safetensors.index.json", index)

    with pytest.raises(ModelLoadFailed, match=r"model-00001-of-00001\.safetensors is missing"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "qwen3"])
def test_the_short_way_gives_the_weights_and_buffers_of_the_librarys_own(family: str, tmp_path: Path) -> None:
    layout = read_layout(build(family, tmp_path))
    plain, own = load_plain_module(layout, CPU), load_module(layout, CPU)

    assert plain is not None
    assert type(plain) is type(own)
    for given in (nn.Module.named_parameters, nn.Module.named_buffers):
        ours, theirs = dict(given(plain)), dict(given(own))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (plain.training, plain.config._attn_implementation) == (False, own.config._attn_implementation)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {name: weight for name, weight in weights.items() if "word_embeddings" not in name},
        lambda weights: {f"bert.{name}": weight for name, weight in weights.items()},
        lambda weights: {name: weight.half() for name, weight in weights.items()},
        lambda weights: weights | {"linear.weight": torch.ones(3, 8)},
        lambda weights: weights | {"embeddings.LayerNorm.bias": torch.ones(3)},
    ],
)
def test_files_that_need_the_librarys_own_loading_have_no_short_way(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    build("bert", tmp_path)
    change_weights(tmp_path, change)

    assert load_plain_module(read_layout(tmp_path), CPU) is None
