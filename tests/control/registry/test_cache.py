"""What the registry reads from the disk: caches whole, partial and broken; directories; its own file."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

import orjson
import pytest
from tests.support.models import MAX_LENGTH, build
from tests.support.models.other_forms import move_to_gguf

from teimgr.control.registry import cache as disk
from teimgr.control.registry.cache import HubCache
from teimgr.control.registry.records import (
    ModelRecord,
    ModelRecords,
    ModelStatus,
    ModelView,
    parse,
    records_path,
    render,
)

MODEL = "somebody/tiny"
OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "config.json": json.dumps({"model_type": "bert", "hidden_size": 32}).encode(),
    "model.safetensors": b"weights",
    "1_Pooling/config.json": b"{}",
}


def lay_out(
    cache: Path, model_id: str = MODEL, commit: str = NEW, files: dict[str, bytes] = FILES, ref: str | None = "main"
) -> Path:
    """One commit of a model as the hub's library keeps it."""
    folder = cache / ("models--" + model_id.replace("/", "--"))
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / str(abs(hash(content)))
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    if ref is not None:
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


@pytest.mark.clause("M2.8-info", "M2.8-discovery")
def test_a_cached_model_is_found_with_its_files(tmp_path: Path) -> None:
    snapshot = lay_out(tmp_path)
    cache = HubCache(tmp_path)

    found = cache.find(MODEL)

    assert cache.model_ids() == [MODEL]
    assert found is not None
    assert (found.path, found.commit, found.refs, found.complete) == (snapshot, NEW, ("main",), True)
    assert {file.path: file.size_bytes for file in found.files} == {name: len(text) for name, text in FILES.items()}
    assert found.metadata() == {"model_type": "bert", "hidden_size": 32}


def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path) -> None:
    lay_out(tmp_path, commit=OLD, ref="refs/pr/1")
    lay_out(tmp_path, commit=NEW)
    cache = HubCache(tmp_path)

    def commit_of(revision: str | None) -> str | None:
        found = cache.find(MODEL, revision)
        return found.commit if found else None

    assert [commit_of(name) for name in (None, "main", "refs/pr/1", OLD, "other")] == [NEW, NEW, OLD, OLD, None]


def test_without_main_a_whole_snapshot_goes_before_a_newer_partial_one(tmp_path: Path) -> None:
    whole = lay_out(tmp_path, commit=OLD, ref=None)
    os.utime(whole, (1, 1))
    lay_out(tmp_path, commit=NEW, ref=None, files={"config.json": b"{}"})

    found = HubCache(tmp_path).find(MODEL)

    assert found is not None
    assert found.commit == OLD


def test_a_snapshot_without_weights_is_partial(tmp_path: Path) -> None:
    lay_out(tmp_path, files={"config.json": b"{}"})
    found = HubCache(tmp_path).find(MODEL)
    assert found is not None
    assert not found.complete


def test_a_snapshot_that_lacks_what_its_listing_names_is_partial(tmp_path: Path) -> None:
    lay_out(tmp_path)
    names = [*FILES, "tokenizer.json", "onnx/model.onnx"]
    tree = tmp_path / "models--somebody--tiny" / "trees" / f"{NEW}.json"
    tree.parent.mkdir()
    tree.write_text(json.dumps({"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in names}}))
    cache = HubCache(tmp_path)
    (before,) = cache.snapshots(MODEL)

    (before.path / "tokenizer.json").write_bytes(b"{}")
    (after,) = cache.snapshots(MODEL)

    assert (before.complete, after.complete) == (False, True)


@pytest.mark.parametrize("damage", ["no snapshots", "dangling link", "file for a folder", "index", "ref", "config"])
def test_damage_never_raises(tmp_path: Path, damage: str) -> None:
    snapshot = lay_out(tmp_path)
    lay_out(tmp_path, "other/whole")
    folder = snapshot.parent.parent
    match damage:
        case "no snapshots":
            snapshot.parent.rename(folder / "elsewhere")
        case "dangling link":
            (snapshot / "model.safetensors").resolve().unlink()
        case "file for a folder":
            (tmp_path / "models--x--y").write_text("not a folder")
            snapshot.parent.rename(folder / "elsewhere")
            snapshot.parent.write_text("not a folder")
        case "index":
            (snapshot / "model.safetensors.index.json").write_text('["not", "an", "index"]')
        case "ref":
            (folder / "refs" / "main").write_bytes(b"\xff\xfe")
        case "config":
            (snapshot / "config.json").unlink()
            (snapshot / "config.json").write_bytes(b"\x00")
    cache = HubCache(tmp_path)

    for model_id in cache.model_ids():
        found = cache.find(model_id)
        if found is not None:
            found.metadata()

    assert [each.complete for each in cache.snapshots("other/whole")] == [True]
    if damage in ("dangling link", "index"):
        assert [each.complete for each in cache.snapshots(MODEL)] == [False]


@pytest.mark.clause("M2.8-info")
def test_metadata_falls_back_and_a_wrong_type_drops_it_all(tmp_path: Path) -> None:
    gpt = lay_out(tmp_path, "a/gpt", files={"config.json": b'{"d_model": 8, "n_positions": 16, "vocab_size": null}'})
    bad = lay_out(tmp_path, "a/bad", files={"config.json": b'{"hidden_size": "8", "model_type": "bert"}'})

    assert disk.Snapshot(path=gpt).metadata() == {"hidden_size": 8, "max_position_embeddings": 16}
    assert disk.Snapshot(path=bad).metadata() is None


def test_a_gguf_file_tells_what_its_model_is(tmp_path: Path) -> None:
    found = disk.find_directory(str(move_to_gguf(build("qwen3_128", tmp_path / "model"))))

    assert found is not None
    assert found.metadata() == {
        **{"model_type": "qwen3", "hidden_size": 32, "max_position_embeddings": MAX_LENGTH},
        **{"num_hidden_layers": 2, "num_attention_heads": 4},
    }


def test_a_directory_is_read_one_level_deep(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", "a/b/deep"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    found = disk.find_directory(str(tmp_path))

    assert found is not None
    assert [file.path for file in found.files] == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert (found.complete, found.commit) == (True, None)
    assert disk.find_directory(str(tmp_path / "a")) is None
    assert disk.find_directory("/nowhere/at/all") is None


@pytest.mark.parametrize("model_id", ["x" * 5000, "a\0b", "/a\0b", "~nobody-of-that-name/x", "..", "/" + "x" * 300, ""])
def test_an_id_that_can_be_no_name_is_no_model(tmp_path: Path, model_id: str) -> None:
    cache = HubCache(tmp_path / "cache")
    assert disk.find_directory(model_id) is None
    assert cache.find(model_id) is None
    assert not cache.has_folder(model_id)
    disk.is_directory(model_id)


def test_deleting_leaves_nothing_of_that_model_alone(tmp_path: Path) -> None:
    lay_out(tmp_path)
    lay_out(tmp_path, "other/whole")
    cache = HubCache(tmp_path)

    cache.delete(MODEL)

    assert cache.model_ids() == ["other/whole"]
    assert not cache.folder_of(MODEL).exists()


# The registry's own file.


async def test_records_come_back_as_they_were_saved(tmp_path: Path) -> None:
    expected = {
        "a/b": ModelRecord(added_at="2026-03-04T12:00:00Z", revision="main", trial={"dimension": 32}, tried_commit=NEW),
        "c": ModelRecord(added_at="2026-03-05T12:00:00Z"),
    }
    records = ModelRecords(records_path(tmp_path / "state.toml"))
    for model_id, record in expected.items():
        records.note(model_id, **{each.name: getattr(record, each.name) for each in fields(record)})
    await records.save()

    assert records.path.name == "state.models.json"
    loaded = ModelRecords(records.path)
    await loaded.load()
    assert {model_id: loaded.of(model_id) for model_id in loaded} == expected
    assert [path.name for path in tmp_path.iterdir()] == ["state.models.json"]


def test_a_record_of_defaults_is_kept() -> None:
    assert parse(render({"c": ModelRecord()})) == {"c": ModelRecord()}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"models": 3}', b'{"models": {"a": []}}', b"\xff"])
async def test_a_file_that_cannot_be_read_is_kept_and_is_an_alarm(tmp_path: Path, content: bytes) -> None:
    records = ModelRecords(tmp_path / "state.models.json")
    records.path.write_bytes(content)
    await records.load()

    assert list(records) == []
    [alarm] = records.alarms()
    (kept,) = tmp_path.glob("state.models.json.corrupt-*")
    assert kept.read_bytes() == content
    assert str(kept) in alarm


async def test_a_key_of_a_newer_version_is_left_out(tmp_path: Path) -> None:
    records = ModelRecords(tmp_path / "f.json")
    records.path.write_text('{"version": 2, "models": {"a": {"added_at": "x", "colour": "green"}}}')
    await records.load()
    assert {model_id: records.of(model_id) for model_id in records} == {"a": ModelRecord(added_at="x")}


def test_weights_that_are_cut_short_are_not_complete(tmp_path: Path) -> None:
    path = build("bert", tmp_path / "model")
    assert disk.find_directory(str(path)).complete  # type: ignore[union-attr]
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (len(whole) - 1, 20):  # within the data, within the head
        weights.write_bytes(whole[:cut])
        assert not disk.find_directory(str(path)).complete  # type: ignore[union-attr]


DEEP = b"[" * 90_000 + b"]" * 90_000


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", b'{"model_type": ' + DEEP + b"}", "config.json is nested more than 64 levels deep"),
        ("model.safetensors.index.json", DEEP, "model.safetensors.index.json is nested more than 64 levels deep"),
        ("model.safetensors.index.json", b'{"weight_map": 5}', "model.safetensors.index.json has no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../b"}}', "'../../b', which is not in its folder"),
    ],
)
def test_a_model_with_a_bad_file_is_listed_as_failed(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    lay_out(tmp_path, files=FILES | {name: content})

    found = HubCache(tmp_path).find(MODEL)

    assert found is not None
    view = ModelView(model_id=MODEL, record=ModelRecord(), started_at="now", snapshot=found, metadata=found.metadata())
    assert view.status is ModelStatus.FAILED
    assert reason in view.to_dict()["verification_error"]
    orjson.dumps(view.to_dict())


@pytest.mark.parametrize("value", [10**30, "\ud800", "x" * 1000, [], True])
def test_what_no_reader_of_json_takes_is_not_shown(value: object, tmp_path: Path) -> None:
    """Numbers beyond 53 bits and lone surrogates made the whole list fail."""
    odd = {"config.json": json.dumps({"model_type": value, "vocab_size": value}).encode()}
    snapshot = lay_out(tmp_path, files=FILES | odd)
    (snapshot / os.fsdecode(b"\xff.txt")).write_text("no UTF-8 in its name")

    found = HubCache(tmp_path).find(MODEL)

    assert found is not None
    assert found.metadata() is None
    view = ModelView(model_id=MODEL, record=ModelRecord(), started_at="now", snapshot=found, metadata=None)
    orjson.dumps(view.to_dict())


def test_a_record_with_values_of_another_type_is_listed_as_broken() -> None:
    found = parse(json.dumps({"models": {"a": {"trial": 5}, "b": {"revision": "main"}}}).encode())

    assert "value of a wrong type" in (found["a"].verification_error or "")
    assert found["b"].revision == "main"
