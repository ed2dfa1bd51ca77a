"""From a model id to files: directories, the hub cache as the hub lays it out, the hub itself, packaged weights."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from teimgr.errors import InvalidConfig, ModelGated, ModelNotFound
from teimgr.models import hub
from tests.models.test_source import PATHS_AS_REVISIONS
from tests.support.hub_server import SHA, Hub, lay_out

MODEL = "somebody/tiny"
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": b"w" * 100_000,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.onnx": b"for another runtime",
    "1_Pooling/config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
}

RESOLVE = """
import json, sys
from teimgr.models import hub
from teimgr.errors import TeimgrError
try:
    source = hub.resolve(*json.loads(sys.argv[1]))
    print(json.dumps({"path": str(source.path), "sha": source.sha}))
except TeimgrError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message}))
"""


NEIGHBOURS = """
import json, sys
from pathlib import Path
from teimgr import errors
from teimgr.models import hub

class Neighbours:
    def __init__(self, order, outcome):
        self.order, self.outcome = (lambda: order), outcome

    def fetch(self, model_id, revision):
        print("asked", file=sys.stderr)
        if self.outcome == "has it":
            return hub.ModelSource(Path("/from/neighbour"), "f" * 40)
        kind = getattr(errors, self.outcome)
        raise kind(model_id, "of host one") if self.outcome == "ModelDownloadFailed" else kind("of host one")

model_id, *how = json.loads(sys.argv[1])
try:
    source = hub.resolve(model_id, None, Neighbours(*how))
    print(json.dumps({"path": str(source.path), "sha": source.sha}))
except errors.TeimgrError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message}))
"""


def resolve(home: Path, *arguments: str, script: str = RESOLVE, **environ: str) -> dict[str, str]:
    """`hub.resolve` in a process of its own, since the hub library reads its environment when it is imported."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)],
        env=own | {"HF_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def lay_out_cache(home: Path, files: dict[str, bytes]) -> Path:
    """A model in the hub cache: blobs, a snapshot of links to them, a ref that names the snapshot."""
    folder = home / "hub" / "models--somebody--tiny"
    snapshot = folder / "snapshots" / SHA
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(SHA)
    (folder / "blobs").mkdir()
    for number, (name, content) in enumerate(files.items()):
        blob = folder / "blobs" / str(number)
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_complete_snapshot_in_the_cache_is_taken_without_asking_the_hub(tmp_path: Path) -> None:
    snapshot = lay_out_cache(tmp_path, FILES)

    with Hub(MODEL, FILES) as hub:
        found = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert found == {"path": str(snapshot), "sha": SHA}
    assert hub.asked == []


def test_a_snapshot_without_its_weights_is_completed_from_the_hub(tmp_path: Path) -> None:
    lay_out_cache(tmp_path, {"config.json": FILES["config.json"]})

    with Hub(MODEL, FILES) as hub:
        found = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert found["sha"] == SHA
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_model_is_downloaded_without_what_other_runtimes_need(tmp_path: Path) -> None:
    with Hub(MODEL, FILES) as hub:
        found = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert found["sha"] == SHA
    assert sorted(hub.asked) == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]


def test_a_second_start_needs_no_hub(tmp_path: Path) -> None:
    with Hub(MODEL, FILES) as hub:
        first = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert resolve(tmp_path, MODEL, HF_HUB_OFFLINE="1") == first


def test_the_base_model_of_an_adapter_comes_with_it(tmp_path: Path) -> None:
    adapter = {
        "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": MODEL}).encode(),
        "adapter_model.safetensors": b"w" * 100,
    }
    snapshot = lay_out(tmp_path / "hub", "acme/adapter", adapter)
    with Hub(MODEL, FILES) as hub:
        found = resolve(tmp_path, "acme/adapter", HF_ENDPOINT=hub.url)

    assert found == {"path": str(snapshot), "sha": SHA}
    assert "model.safetensors" in hub.asked
    assert resolve(tmp_path, "acme/adapter", HF_HUB_OFFLINE="1") == found


def test_offline_an_adapter_without_its_base_model_is_not_found(tmp_path: Path) -> None:
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "acme/base"}).encode()
    lay_out(tmp_path / "hub", "acme/adapter", {"adapter_config.json": config, "adapter_model.safetensors": b"w" * 100})
    found = resolve(tmp_path, "acme/adapter", HF_HUB_OFFLINE="1")

    assert found["error"] == "ModelNotFound"
    assert "acme/base" in found["message"]


def test_adapters_of_each_other_end_the_search_for_their_base(tmp_path: Path) -> None:
    for name, base in (("one", "a/two"), ("two", "a/one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    asked: list[str] = []

    def find(model_id: str, _revision: str | None) -> Path:
        asked.append(model_id)
        return tmp_path / model_id.partition("/")[2]

    hub.follow_bases(tmp_path / "one", find)

    assert asked == ["a/two", "a/one"] * (hub.MAX_ADAPTERS // 2)


def test_code_of_another_repository_is_fetched_once_and_kept(tmp_path: Path) -> None:
    files = {"modeling.py": b"code = 1", "model.safetensors": b"w" * 100, "README.md": b"#"}
    script = RESOLVE.replace("hub.resolve(*", "hub.resolve_code(*")
    with Hub(MODEL, files) as hub:
        found = resolve(tmp_path, MODEL, script=script, HF_ENDPOINT=hub.url)
        again = resolve(tmp_path, MODEL, script=script, HF_ENDPOINT=hub.url)
        pinned = resolve(tmp_path, MODEL, SHA, script=script, HF_ENDPOINT=hub.url)
        unknown = resolve(tmp_path, MODEL, "v9", script=script, HF_ENDPOINT=hub.url)

    assert found == again == pinned
    assert hub.asked == ["modeling.py"]
    assert "has no revision 'v9'" in unknown["message"]
    assert (Path(found["path"]) / "modeling.py").read_bytes() == b"code = 1"
    missing = resolve(tmp_path, "acme/absent", script=script, HF_HUB_OFFLINE="1")
    assert "The code of 'acme/absent', which the model names, is not in the hub cache" in missing["message"]


def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    with Hub("somebody/else", FILES) as hub:
        found = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert found["error"] == "ModelNotFound"
    assert "somebody/tiny" in found["message"]


def test_a_gated_model_says_what_to_do(tmp_path: Path) -> None:
    with Hub(MODEL, FILES, gated=True) as hub:
        found = resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)

    assert found["error"] == "ModelGated"
    assert "HF_TOKEN" in found["message"]


def test_offline_without_a_copy_is_not_found_and_names_the_nearest_copies(tmp_path: Path) -> None:
    with Hub(MODEL, FILES) as hub:
        resolve(tmp_path, MODEL, HF_ENDPOINT=hub.url)
    found = resolve(tmp_path, MODEL.replace("tiny", "tnyi"), HF_HUB_OFFLINE="1")

    assert found["error"] == "ModelNotFound"
    assert "HF_HUB_OFFLINE" in found["message"]
    assert f"did you mean '{MODEL}'?" in found["message"]


def test_packaged_weights_stand_in_where_no_hub_is(tmp_path: Path) -> None:
    found = resolve(tmp_path, "sentence-transformers/all-MiniLM-L6-v2", HF_HUB_OFFLINE="1")

    assert (Path(found["path"]) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("order", "hub_has_it", "neighbours", "found"),
    [
        ("hub-first", True, "has it", SHA),
        ("hub-first", False, "has it", "f" * 40),
        ("hub-first", False, "ModelNotFound", "ModelNotFound"),
        ("hub-first", False, "Unavailable", "Unavailable"),
        ("hub-first", False, "StorageFull", "StorageFull"),
        ("neighbours-first", True, "has it", "f" * 40),
        ("neighbours-first", True, "ModelNotFound", SHA),
        ("neighbours-first", True, "ModelDownloadFailed", SHA),
        ("neighbours-first", False, "ModelDownloadFailed", "ModelDownloadFailed"),
        ("hub-only", False, "has it", "ModelNotFound"),
    ],
)
def test_other_hosts_are_asked_in_the_order_that_is_set(
    tmp_path: Path, order: str, hub_has_it: bool, neighbours: str, found: str
) -> None:
    with Hub(MODEL if hub_has_it else "somebody/else", FILES) as hub:
        answer = resolve(tmp_path, MODEL, order, neighbours, script=NEIGHBOURS, HF_ENDPOINT=hub.url)

    assert answer.get("sha", answer.get("error")) == found
    if "error" in answer and order != "hub-only" and neighbours != "StorageFull":  # which ends the search
        assert "of host one" in answer["message"]
        assert "is not on the hub" in answer["message"]


def test_other_hosts_are_asked_where_the_hub_is_offline(tmp_path: Path) -> None:
    arguments = (MODEL, "hub-first")
    found = resolve(tmp_path, *arguments, "has it", script=NEIGHBOURS, HF_HUB_OFFLINE="1")
    failed = resolve(tmp_path, *arguments, "ModelNotFound", script=NEIGHBOURS, HF_HUB_OFFLINE="1")

    assert found["path"] == "/from/neighbour"
    assert failed["error"] == "ModelNotFound"
    assert "of host one; " in failed["message"]
    assert "HF_HUB_OFFLINE is set" in failed["message"]


def test_directories_are_not_copied_between_hosts(tmp_path: Path) -> None:
    found = resolve(tmp_path, "/nowhere/at/all", "neighbours-first", "has it", script=NEIGHBOURS)

    assert found["error"] == "ModelNotFound"
    assert "directories are not copied between hosts" in found["message"]


@pytest.mark.parametrize("model_id", ["./nowhere", "/nowhere/at/all"])
def test_a_missing_directory_is_named(tmp_path: Path, model_id: str) -> None:
    found = resolve(tmp_path, model_id)

    assert found["error"] == "ModelNotFound"
    assert model_id in found["message"]


@pytest.mark.parametrize("revision", PATHS_AS_REVISIONS)
def test_a_path_is_no_revision(revision: str, tmp_path: Path) -> None:
    """The hub library would take the file at it for a ref, and what is in that for a folder."""
    with pytest.raises(ModelNotFound, match="must be the name of a branch"):
        hub.find_cached(MODEL, revision, tmp_path)


def test_a_ref_that_leads_out_of_the_snapshots_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "private"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_text("weights")
    refs = tmp_path / "cache" / hub.folder_name(MODEL) / "refs"
    refs.mkdir(parents=True)
    (refs.parent / "snapshots").mkdir()
    (refs / "main").write_text("../../../private")

    with pytest.raises(ModelNotFound, match="leads out of its snapshots"):
        hub.find_cached(MODEL, None, tmp_path / "cache")


@pytest.mark.parametrize(
    ("status", "token", "why"),
    [
        (401, "hf_x", "answered 401, HF_TOKEN is refused"),
        (403, "hf_x", "answered 403, HF_TOKEN is refused"),
        (403, None, "answered 403, it asks for a token: set HF_TOKEN"),
    ],
)
def test_a_refused_token_is_named(status: int, token: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    reply: Any = SimpleNamespace(status_code=status, headers={}, request=None)

    with pytest.raises(ModelGated, match=why), hub.hub_failures(MODEL, None):
        raise HfHubHTTPError("refused", response=reply)


def test_a_cache_that_cannot_be_written_is_named() -> None:
    why = r"cache cannot be written: /cache/x: Read-only .*set HF_HOME"
    with pytest.raises(InvalidConfig, match=why), hub.hub_failures(MODEL, None):
        raise OSError(errno.EROFS, "Read-only file system", "/cache/x")


def test_a_model_is_not_offered_in_the_place_of_itself() -> None:
    [packaged, *_] = hub.PACKAGED
    assert repr(packaged) in hub.nearest_here(f"{packaged}x")
    assert repr(packaged) not in hub.nearest_here(packaged)
