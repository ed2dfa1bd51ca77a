"""What a model id, a revision and a link lead to: every spelling of a place that is not allowed is refused."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.directory import check_links, fault_of
from teimgr.models.source import (
    Directory,
    HubModel,
    WrongSourceError,
    decide,
    file_problem,
    ref_problem,
    revision_problem,
)
from tests.support.hub_server import SHA

PATHS_AS_REVISIONS = (
    *("/srv/uploads/file-1", "../../x", "a/../b", "a//b", "-x", "a b", "x.lock", "\0", "", ".", "..", "/", "a/"),
    *("refs/pr/1/../../../x", "refs/../x", "refs/pr/.", "main/../../..", "main\\..\\x", "main^{}", "HEAD@{1}"),
    *("main\n", "a..b", "refs/pr/1/", "~", "x:y", "a?", "*", "[x]", "\u202e", "x" * 256, ".git", "a/.b", "a./b"),
)


@pytest.mark.parametrize("revision", PATHS_AS_REVISIONS)
def test_a_path_is_no_revision(revision: str) -> None:
    assert revision_problem(revision)
    with pytest.raises(WrongSourceError) as raised:
        decide("somebody/tiny", revision)
    assert raised.value.key == "revision"


@pytest.mark.parametrize("revision", ["main", "refs/pr/1", "v1.5", SHA, "feature/größer_2"])
def test_names_are_revisions(revision: str) -> None:
    assert revision_problem(revision) is None
    assert decide("somebody/tiny", revision) == HubModel("somebody/tiny", revision)


@pytest.mark.parametrize("model_id", ["gpt2", "BAAI/bge-m3", "a/b.c_d-e", "0x/1"])
def test_ids_of_the_hub(model_id: str) -> None:
    assert decide(model_id, roots=()) == HubModel(model_id, None)


@pytest.mark.parametrize(
    "model_id",
    [
        *("", "a/b/c", "a//b", "a/", "a b", "a--b/c", "a/b--c", "a/b.git", "-a/b", "a/b.", "a\\b", "a/b\n", "a/\0"),
        *("%2Fetc", "%252Fetc", "..%2Fx", "file:///etc", "a/../b", "a/..", "somebody/\uff0e\uff0e", "\uff0fetc"),
        *("x" * 97, "x" * 5000, "größe/x", "models--a--b", "a/b@main", "a/b?x", "\u202egpt2"),
    ],
)
@pytest.mark.parametrize("roots", [None, ()])
def test_what_is_neither_a_directory_nor_an_id_is_refused(model_id: str, roots: tuple[str, ...] | None) -> None:
    with pytest.raises(WrongSourceError):
        decide(model_id, roots=roots)


def test_a_directory_has_to_be_below_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots, private = tmp_path / "roots", tmp_path / "private"
    for folder in (roots / "ours", private, tmp_path / "roots-too"):
        folder.mkdir(parents=True)
    (roots / "out").symlink_to(private)
    (roots / "in").symlink_to(roots / "ours")
    (roots / "loop").symlink_to("loop")
    monkeypatch.chdir(roots)
    allowed = (str(roots), "~nobody-such/models")
    for model_id in (str(roots), f"{roots}/ours", f"{roots}/in", f"{private}/../roots/ours", "./ours", "ours", "in"):
        assert isinstance(decide(model_id, roots=allowed), Directory), model_id
        with pytest.raises(WrongSourceError):
            decide(model_id, roots=())
    outside = [
        str(private),
        f"/{private}",
        f"{roots}/../private",
        f"{roots}/out",
        f"{roots}/out/.",
        "out",
        "../private",
    ]
    outside += [
        f"{roots}-too",
        "ours/../../private",
        f"{roots}/loop",
        f"/proc/self/root{private}",
        "/proc/self/cwd/out",
    ]
    outside += ["/", "..", "~root/x", "~nobody-such/x", "/dev/fd/0", f"{roots}/ours/../../private", "./out"]
    for model_id in outside:
        for some in (allowed, ()):
            with pytest.raises(WrongSourceError, match="outside of local_model_roots") as raised:
                decide(model_id, roots=some)
            assert raised.value.is_outside, model_id
    assert decide(str(private)) == Directory(private)
    encoded = quote(str(private), safe="")
    with pytest.raises(WrongSourceError, match="neither a directory nor a hub id"):
        decide(encoded, roots=allowed)


@pytest.mark.parametrize("linked", ["tokenizer.json", "1_Pooling/config.json", "1_Pooling", "2_Dense", "own.jinja"])
def test_a_link_out_of_a_model_is_refused(tmp_path: Path, linked: str) -> None:
    root, private = tmp_path / "roots" / "a", tmp_path / "private"
    (root / "2_Dense").mkdir(parents=True)
    (root / "1_Pooling").mkdir()
    (root / "modules.json").write_text(
        '[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense", "path": "2_Dense"}]'
    )
    private.mkdir()
    (private / "file").write_text("{}")
    check_links(root, ())
    target = root / linked
    if target.is_dir():
        target.rmdir()
    target.symlink_to(private if target.suffix == "" else private / "file")

    if linked == "2_Dense":  # refused by the reader of modules.json already
        with pytest.raises(ModelLoadFailed, match="points out of the model's directory"):
            check_links(root, ())
        return
    with pytest.raises(InvalidConfig, match=f"{linked} is a link out of the model's directory"):
        check_links(root, (str(tmp_path / "roots"),))
    check_links(root, (str(tmp_path),))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "file").write_text("x")
    found = {
        name: file_problem(tmp_path / name) for name in ("fifo", "loop", "device", "dangling", "file", "none", ".")
    }
    assert found == {
        "fifo": "is a FIFO, not a file",
        "loop": "cannot be read: Too many levels of symbolic links",
        "device": "is a device, not a file",
        "dangling": None,
        "file": None,
        "none": None,
        ".": "is a directory, not a file",
    }
    os.mkfifo(tmp_path / "x.safetensors")
    assert fault_of(tmp_path / "x.safetensors") == "is a FIFO, not a file"  # and it returns
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").symlink_to(tmp_path / "fifo")
    assert ref_problem(tmp_path, "main") == "is a FIFO, not a file"
    (tmp_path / "refs" / "long").write_text("x" * 300)
    assert ref_problem(tmp_path, "long") == "is not a ref: it is too long"
    assert ref_problem(tmp_path, "absent") is None
