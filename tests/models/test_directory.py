"""Layouts of repositories: what is downloaded of them, what makes a copy complete, what is opened."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from teimgr.control.registry.cache import HubCache, find_directory
from teimgr.engine.heads.projections import read_weights
from teimgr.errors import ModelLoadFailed, ModelNotFound
from teimgr.models import directory as model_directory
from teimgr.models import hub
from teimgr.models.directory import (
    base_model_of,
    broken_file,
    files_below,
    missing_file,
    needed,
    other_format,
    use_original,
    weight_files,
)
from teimgr.models.modules import read_chain
from teimgr.models.reading import read_layout
from tests.support.hub_server import SHA, files_of, lay_out
from tests.support.models import build

MODEL = "somebody/tiny"
OTHER_SHA = "f" * 40
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def _modules(*rows: tuple[str, str]) -> bytes:
    kind = "sentence_transformers.models."
    return json.dumps([{"idx": i, "path": path, "type": kind + name} for i, (name, path) in enumerate(rows)]).encode()


WITH_DENSE = _modules(("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
IN_FOLDER = _modules(("Transformer", "0_Transformer"), ("Pooling", "1_Pooling"))
SHARDS = json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}})
COMMON = {"config.json": b'{"model_type": "bert"}', "tokenizer.json": b"{}", "1_Pooling/config.json": b"{}"}
DENSE = {"modules.json": WITH_DENSE, "2_Dense/config.json": b"{}"}
UNUSED = ("onnx/model.onnx", "tf_model.h5", "training_args.bin", "checkpoint-9/model.safetensors")

LAYOUTS: dict[str, tuple[dict[str, bytes], set[str]]] = {
    "safetensors, pickled Dense": (
        {**COMMON, **DENSE, "model.safetensors": b"w", "pytorch_model.bin": b"p", "2_Dense/pytorch_model.bin": b"d"},
        {"model.safetensors", "2_Dense/pytorch_model.bin"},
    ),
    "pickled, Dense in safetensors": (
        {**COMMON, **DENSE, "pytorch_model.bin": b"p", "2_Dense/model.safetensors": b"w"},
        {"pytorch_model.bin", "2_Dense/model.safetensors"},
    ),
    "both in both": (
        {
            **{**COMMON, **DENSE, "pytorch_model.bin": b"p", "model.safetensors": b"w"},
            **{"2_Dense/model.safetensors": b"w", "2_Dense/pytorch_model.bin": b"p"},
        },
        {"model.safetensors", "2_Dense/model.safetensors"},
    ),
    "pickled shards": (
        {
            **{**COMMON, "pytorch_model.bin.index.json": SHARDS.encode()},
            **{"pytorch_model-00001-of-00002.bin": b"1", "pytorch_model-00002-of-00002.bin": b"2"},
        },
        {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"},
    ),
    "a folder for the transformer": (
        {
            **{"modules.json": IN_FOLDER, "1_Pooling/config.json": b"{}", "0_Transformer/tokenizer.json": b"{}"},
            **{"0_Transformer/config.json": COMMON["config.json"], "0_Transformer/pytorch_model.bin": b"p"},
        },
        {"0_Transformer/pytorch_model.bin"},
    ),
    "a router": (
        {
            **COMMON,
            "modules.json": _modules(("Router", "")),
            "router_config.json": json.dumps({"types": {"document_0_MLMTransformer": "x.MLMTransformer"}}).encode(),
            "document_0_MLMTransformer/config.json": b"{}",
            "document_0_MLMTransformer/model.safetensors": b"w",
        },
        {"document_0_MLMTransformer/model.safetensors"},
    ),
}


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_downloaded_whole_and_found_offline(layout: str, tmp_path: Path) -> None:
    files, weights = LAYOUTS[layout]
    kept = needed([*files, *UNUSED])
    assert {name for name in kept if _is_weights(name)} == weights
    assert {name for name in files if not _is_weights(name)} <= set(kept)

    snapshot = lay_out(tmp_path, MODEL, {name: files[name] for name in kept})

    assert hub.find_cached(MODEL, None, tmp_path) == hub.ModelSource(snapshot, SHA)
    listed = HubCache(tmp_path).find(MODEL)
    assert listed is not None
    assert listed.complete
    for name in weights:
        (snapshot / name).unlink()
        assert hub.find_cached(MODEL, None, tmp_path) is None
        assert missing_file(snapshot) is not None
        (snapshot / name).write_bytes(files[name])
    assert missing_file(snapshot) is None


@pytest.mark.parametrize("lost", ["1_Pooling/config.json", "2_Dense/config.json", "config.json"])
def test_a_module_without_its_configuration_is_incomplete(lost: str, tmp_path: Path) -> None:
    files, _ = LAYOUTS["safetensors, pickled Dense"]
    snapshot = lay_out(tmp_path, MODEL, {name: content for name, content in files.items() if name != lost})

    assert missing_file(snapshot) == lost
    assert hub.find_cached(MODEL, None, tmp_path) is None


def test_a_module_folder_may_be_a_link_within_the_models_cache(tmp_path: Path) -> None:
    files, _ = LAYOUTS["safetensors, pickled Dense"]
    older = lay_out(tmp_path, MODEL, files, commit=OTHER_SHA, ref="old")
    snapshot = lay_out(tmp_path, MODEL, {name: files[name] for name in files if not name.startswith("2_Dense/")})
    (snapshot / "2_Dense").symlink_to(Path("..") / OTHER_SHA / "2_Dense")

    assert hub.find_cached(MODEL, None, tmp_path) == hub.ModelSource(snapshot, SHA)
    assert read_chain(snapshot).modules[-1].path == snapshot / "2_Dense"
    listed = HubCache(tmp_path).find(MODEL)
    assert listed is not None
    assert {file.path for file in listed.files} == set(files)

    (snapshot / "2_Dense").unlink()
    (snapshot / "2_Dense").symlink_to(tmp_path)
    with pytest.raises(ModelLoadFailed, match="points out of the model's directory"):
        read_chain(snapshot)
    assert older.is_dir()


@pytest.mark.parametrize("path", ["../../../elsewhere", "/etc", "../" + OTHER_SHA + "/2_Dense"])
def test_modules_json_leads_nowhere_else(path: str, tmp_path: Path) -> None:
    lay_out(tmp_path, MODEL, LAYOUTS["safetensors, pickled Dense"][0], commit=OTHER_SHA, ref="old")
    snapshot = lay_out(tmp_path, MODEL, {**COMMON, "modules.json": _modules(("Transformer", ""), ("Dense", path))})

    with pytest.raises(ModelLoadFailed, match="points out of the model's directory"):
        read_chain(snapshot)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "top").symlink_to(tmp_path)

    assert list(files_below(tmp_path)) == [tmp_path / "a" / "config.json"]


def test_shards_of_pickled_weights_are_read_together(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(SHARDS)

    assert {name: len(rows) for name, rows in read_weights(tmp_path).items()} == {"a": 2, "b": 3}

    save_file({"c": torch.ones(1)}, tmp_path / model_directory.SINGLE)
    assert weight_files(tmp_path) == (tmp_path / model_directory.SINGLE,)


@pytest.mark.parametrize(
    "name",
    [
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"),
        *("1_Pooling/config.json", "2_Normalize/config.json", "adapter_config.json"),
    ],
)
def test_a_link_to_nothing_is_no_missing_file(name: str, tmp_path: Path) -> None:
    """A cache that lost a blob: without its prompts or modules the model would give other vectors."""
    model = build("bert", tmp_path / "model", prompts={"query": "query: "})
    read_layout(model)
    (model / name).unlink(missing_ok=True)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(tmp_path / "blobs" / "gone")

    assert missing_file(model) == name
    with pytest.raises(ModelLoadFailed, match=f"{name} is a link to a file that is not there"):
        read_layout(model)


def test_a_snapshot_that_another_library_fetched_in_part_is_a_warning(tmp_path: Path) -> None:
    """AutoModel fetches config.json, weights and tokenizer alone: prompts and a Dense would be lost without a word."""
    snapshot = build(
        "bert", tmp_path / "models--a--b" / "snapshots" / SHA, modules=("Dense",), prompts={"query": "q: "}
    )
    assert read_layout(snapshot).warnings == ()
    (snapshot / "modules.json").unlink()

    (warning,) = read_layout(snapshot, "mean").warnings
    assert "the hub's cache has no modules.json of this model" in warning
    with pytest.raises(ModelLoadFailed, match="strict_model_files"):
        read_layout(snapshot, "mean", strict=True)
    model_directory.note_without_modules(snapshot)
    assert read_layout(snapshot, "mean").warnings == ()


def test_a_link_to_nothing_that_is_not_read_is_harmless(tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    for name in ("README.md", "pytorch_model.bin", "onnx/config.json"):
        (model / name).unlink(missing_ok=True)
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).symlink_to(tmp_path / "blobs" / "gone")

    assert missing_file(model) is None
    read_layout(model)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "1_Pooling/config.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    assert broken_file(model) is None
    (model / name).write_bytes(POINTER)

    assert (broken_file(model) or "").startswith(f"{name} is a pointer of git-lfs")
    if name.endswith(".safetensors"):
        assert missing_file(model) == name


def test_metadata_of_a_transformer_in_a_folder_is_shown(tmp_path: Path) -> None:
    for name, content in LAYOUTS["a folder for the transformer"][0].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    found = find_directory(str(tmp_path))

    assert found is not None
    assert found.complete
    assert found.metadata() == {"model_type": "bert"}


def test_files_of_a_directory_follow_links(tmp_path: Path) -> None:
    model = build("bert", tmp_path / "model")
    (tmp_path / "linked").symlink_to(model)

    assert {path.relative_to(tmp_path / "linked").as_posix() for path in files_below(tmp_path / "linked")} == set(
        files_of(model)
    )


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["README.md", "nomic-embed-text-v1.5.Q8_0.gguf"], ("GGUF (llama.cpp)", "nomic-embed-text-v1.5.Q8_0.gguf")),
        (["config.json", "tf_model.h5"], ("TensorFlow", "tf_model.h5")),
        (["config.json", "openvino_model.xml", "openvino_model.bin"], ("OpenVINO", "openvino_model.xml")),
        (
            ["config.json", "onnx/model_quantized.onnx"],
            ("ONNX, optimised or quantised", "onnx/model_quantized.onnx"),
        ),
        (["config.json", "onnx/model.onnx", "onnx/model_quantized.onnx"], None),
        (["config.json", "model.safetensors", "x.gguf"], None),
        (["config.json"], None),
    ],
)
def test_weights_of_another_format_are_known_by_their_files(names: list[str], form: tuple[str, str] | None) -> None:
    assert other_format(names) == form


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ("---\nbase_model: Qwen/Qwen3-Embedding-0.6B\n---\n# GGUF", "Qwen/Qwen3-Embedding-0.6B"),
        ("---\nlicense: mit\nbase_model:\n- BAAI/bge-m3\n---\n", "BAAI/bge-m3"),
        ("---\nlicense: mit\n---\nbase_model: x", None),
        ("base_model: x", None),
        ("", None),
    ],
)
def test_the_original_of_a_model_is_in_its_card(card: str, named: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)

    assert base_model_of(tmp_path) == named
    assert use_original(base_model_of(tmp_path)) == "use the original model" + (f", {named}" if named else "")


def test_a_directory_of_llama_cpps_files_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "README.md").write_text("---\nbase_model: BAAI/bge-m3\n---\n")

    assert hub.resolve(str(tmp_path)).path == tmp_path
    with pytest.raises(ModelNotFound, match="is a file: name its directory"):
        hub.resolve(str(tmp_path / "model-Q8_0.gguf"))

    (tmp_path / "model-f16.gguf").write_bytes(b"GGUF")
    alone = r"alone .model-Q8_0.gguf., read of .* as the one .gguf file of a directory.* original model, BAAI/bge-m3"
    for place in (tmp_path, tmp_path / "model-Q8_0.gguf"):
        with pytest.raises(ModelNotFound, match=alone):
            hub.resolve(str(place))


def test_a_repository_of_llama_cpps_files_is_refused_by_name() -> None:
    info = SimpleNamespace(card_data=SimpleNamespace(base_model=["Qwen/Qwen3-Embedding-0.6B"]))
    refusal = (
        "has weights in GGUF (llama.cpp) alone (Q-f16.gguf), read of Qwen3 embedding models as the one .gguf file of a "
        "directory, without config.json: name such a directory as model_id, or use the original model, "
        "Qwen/Qwen3-Embedding-0.6B"
    )

    assert hub.format_problem(["README.md", "Q-f16.gguf", "Q-Q8_0.gguf"], info) == refusal
    assert hub.format_problem(["README.md", "Q-f16.gguf", "config.json"], info) == refusal
    assert hub.format_problem(["Q-f16.gguf"], SimpleNamespace(**vars(info), gguf={"architecture": "bert"})) == refusal
    assert hub.format_problem(["Q-f16.gguf"], SimpleNamespace(gguf={"architecture": "qwen3"})) is None
    assert hub.format_problem(["README.md", "Q-f16.gguf"], info) is None
    assert hub.format_problem(["model.safetensors", "Q-f16.gguf"], info) is None
    assert needed(["model.safetensors", "config.json", "x.gguf"]) == ["model.safetensors", "config.json"]
    assert needed(["README.md", "x.gguf"]) == ["README.md", "x.gguf"]
