"""The space is one for the same model, however it is stored, loaded and run, and another for each part that changes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import (
    build,
    build_classifier,
    build_m3,
    build_multi_vector,
    build_routed_sparse,
    build_splade,
    build_static,
    edit,
    read,
    write,
)

from teimgr.engine import space as space_module
from teimgr.engine.loading import EngineOptions, load_parts
from teimgr.engine.space import SpaceDigest, precision_class
from teimgr.engine.text.tokenizer import Prompts, TextTokenizer
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Layout
from teimgr.models.reading import read_layout

PROMPTS = {"query": "query: ", "passage": "passage: "}


def space(
    path: Path,
    *,
    pooling: str | None = None,
    default: str | None = None,
    text: str | None = None,
    most: int = 16384,
    folder: Path | None = None,
    **changes: Any,
) -> str:
    layout = dataclasses.replace(read_layout(path, pooling), **changes)
    tokenizer = TextTokenizer(layout, min(layout.max_length, most))
    digest = SpaceDigest(layout, tokenizer, Prompts(layout, default, text), threads=2, folder=folder)
    digest.begin()
    return digest.result()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(
        "bert", tmp_path_factory.mktemp("space"), prompts=PROMPTS, modules=("Dense", "LayerNorm", "Dense", "Normalize")
    )


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "another place" / "and name")


def change_weight(path: Path, name: str = "model.safetensors") -> None:
    tensors = load_file(path / name)
    first = sorted(tensors)[0]
    tensors[first] = tensors[first].clone()
    tensors[first].view(-1)[0] += 1e-3
    save_file(tensors, path / name, {"format": "pt"})


def rename_weight(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    first = sorted(tensors)[0]
    tensors["other." + first] = tensors.pop(first)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def cast_weights(path: Path) -> None:
    tensors = {name: each.to(torch.bfloat16) for name, each in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def change_tokenizer(path: Path) -> None:
    tokenizer = read(path / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    one, other = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    write(path / "tokenizer.json", tokenizer)


def set_pooling(path: Path) -> None:
    edit(path / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)


def drop_normalize_between(path: Path) -> None:
    modules = json.loads((path / "modules.json").read_text())
    modules.insert(2, dict(modules[-1], idx=9, path="9_Normalize"))
    (path / "modules.json").write_text(json.dumps(modules))


CHANGES: dict[str, Callable[[Path], None]] = {
    "a weight": change_weight,
    "the name of a weight": rename_weight,
    "the element type of the weights": cast_weights,
    "a weight of a module": lambda path: change_weight(path, "2_Dense/model.safetensors"),
    "a weight of a norm": lambda path: change_weight(path, "3_LayerNorm/model.safetensors"),
    "an activation of a module": lambda path: edit(
        path / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Tanh"
    ),
    "the order of modules' weights": lambda path: swap(path / "2_Dense", path / "4_Dense"),
    "the tokenizer": change_tokenizer,
    "pooling": set_pooling,
    "prompts in the pooling": lambda path: edit(path / "1_Pooling" / "config.json", include_prompt=False),
    "normalisation": drop_normalize_between,
    "the text of a prompt": lambda path: edit(
        path / "config_sentence_transformers.json", prompts=PROMPTS | {"query": "Query: "}
    ),
    "the default prompt": lambda path: edit(path / "config_sentence_transformers.json", default_prompt_name="query"),
    "dimensions": lambda path: edit(path / "config_sentence_transformers.json", truncate_dim=4),
    "the length": lambda path: edit(path / "sentence_bert_config.json", max_seq_length=32),
    "the side that is cut": lambda path: edit(path / "tokenizer_config.json", truncation_side="left"),
    "the activation in config.json": lambda path: edit(path / "config.json", hidden_act="relu"),
    "heads of attention": lambda path: edit(path / "config.json", num_attention_heads=4),
    "the epsilon of norms": lambda path: edit(path / "config.json", layer_norm_eps=1e-5),
}


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_that_changes_makes_another_space(model: Path, copy: Path, change: str) -> None:
    CHANGES[change](copy)
    assert space(copy) != space(model)


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "cls"},
        {"default": "passage"},
        {"text": "passage: "},
        {"most": 32},
    ],
    ids=str,
)
def test_what_an_instance_sets_makes_another_space(model: Path, options: dict[str, Any]) -> None:
    assert space(model, **options) != space(model)


def move_to_shards(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    halves = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, path / file)
    (path / "model.safetensors").unlink()
    named = {name: file for file, part in halves.items() for name in part}
    write(path / "model.safetensors.index.json", {"weight_map": named})


def pickle_weights(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


SAME: dict[str, Callable[[Path], None]] = {
    "another folder": lambda path: None,
    "shards": move_to_shards,
    "pickled weights": pickle_weights,
    "other files": lambda path: (path / "README.md").write_text("new"),
    "padding and truncation in tokenizer.json": lambda path: edit(path / "tokenizer.json", padding=None),
    "who saved config.json": lambda path: write(
        path / "config.json", read(path / "config.json") | {"transformers_version": "9", "_name_or_path": "x/y"}
    ),
}


@pytest.mark.parametrize("change", SAME)
def test_another_form_of_the_same_files_has_the_same_space(model: Path, copy: Path, change: str) -> None:
    SAME[change](copy)
    assert space(copy) == space(model)


def test_code_that_is_trusted_is_of_the_space_only_where_it_runs(model: Path, copy: Path) -> None:
    def trusted(**config: Any) -> str:
        return space(copy, trust_remote_code=True, config=read(copy / "config.json") | config)

    unused, used = set(), set()
    for code in ("", "VALUE = 1", "VALUE = 2"):
        (copy / "modeling.py").write_text(code)
        unused.add(trusted())
        used.add(trusted(auto_map={"AutoModel": "modeling.Own"}))
    assert unused == {space(model)}
    assert len(used) == 3


def test_loads_of_any_precision_and_batch_have_one_space_and_their_class(model: Path, tmp_path: Path) -> None:
    def loaded(**options: Any) -> tuple[str, str]:
        info = load_parts(EngineOptions(path=model, model_id="m", spaces=tmp_path / "spaces", **options)).info
        return info.space, info.precision

    whole = space(model)
    assert loaded(dtype="float32") == (whole, "fp32")
    assert loaded(dtype="bfloat16", threads=2, max_batch_tokens=512) == (whole, "16-bit")
    assert loaded(dtype="float32", max_batch_requests=1) == (whole, "fp32")


def test_every_kind_has_a_space_of_its_own(tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], Any]] = {
        "static": build_static,
        "splade": partial(build_splade, "bert"),
        "routed": build_routed_sparse,
        "m3": build_m3,
        "colbert": partial(build_multi_vector, "bert"),
        "classifier": partial(build_classifier, "bert"),
    }
    spaces = {}
    for name, make in makers.items():
        make(tmp_path / name)
        spaces[name] = space(tmp_path / name)
    assert len(set(spaces.values())) == len(makers)
    for file in ("sparse_linear.pt", "colbert_linear.pt"):
        before = space(tmp_path / "m3")
        weights = torch.load(tmp_path / "m3" / file)
        torch.save(weights | {"bias": weights["bias"] + 1}, tmp_path / "m3" / file)
        assert space(tmp_path / "m3") != before


def test_the_files_are_hashed_once_and_again_after_each_change(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Layout] = []
    digests_of = space_module.digests_of

    def counted(layout: Layout, *rest: Any) -> Any:
        hashed.append(layout)
        return digests_of(layout, *rest)

    monkeypatch.setattr(space_module, "digests_of", counted)
    first = space(copy, folder=tmp_path / "spaces")
    assert space(copy, folder=tmp_path / "spaces", default="query") != first
    assert len(hashed) == 1

    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # in place, of the same size
    assert space(copy, folder=tmp_path / "spaces") != first
    assert len(hashed) == 2


def test_a_damaged_file_of_digests_is_made_again(copy: Path, tmp_path: Path) -> None:
    first = space(copy, folder=tmp_path / "spaces")
    (kept,) = (tmp_path / "spaces").iterdir()
    kept.write_bytes(b"[")
    assert space(copy, folder=tmp_path / "spaces") == first


def test_weights_that_end_too_soon_fail_the_load(copy: Path) -> None:
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises((ModelLoadFailed, OSError), match=r"model\.safetensors"):
        space(copy)


def test_the_classes_of_precision() -> None:
    assert [precision_class(dtype) for dtype in ("float32", "float16", "bfloat16", "int8")] == [
        "fp32",
        "16-bit",
        "16-bit",
        "int8",
    ]
