"""A load that cannot succeed ends: `create --wait` answers with the reason, through a real daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.daemon_process import DaemonProcess
from tests.support.hub_server import Hub
from tests.support.models import build, edit, read, write

from teimgr.errors import InvalidConfig, TeimgrError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 90868376\n"
MODEL = "somebody/tiny"
LIMIT_S = 60.0


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _no_positions(weights: dict[str, torch.Tensor]) -> None:
    del weights["embeddings.position_embeddings.weight"]


def _nan(weights: dict[str, torch.Tensor]) -> None:
    weights["encoder.layer.0.output.dense.weight"][0, 0] = torch.nan


def _pointer(name: str) -> tuple[Callable[[Path], object], str]:
    return lambda folder: (folder / name).write_bytes(POINTER), f"{name} is a pointer of git-lfs"


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _no_pad_id(folder: Path) -> None:
    write(folder / "config.json", read(folder / "config.json") | {"model_type": "roberta", "pad_token_id": None})


NEEDED = ("model.safetensors", "config.json", "modules.json", "tokenizer.json", "1_Pooling/config.json")
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"pointer-{name}": _pointer(name) for name in (*NEEDED, "2_Dense/model.safetensors")},
    "null": (lambda folder: (folder / "1_Pooling" / "config.json").write_text("null"), "1_Pooling/config.json holds"),
    "pipe": (lambda folder: _pipe(folder / "tokenizer.json"), "tokenizer.json is a FIFO"),
    "positions-without-pad-id": (_no_pad_id, "config.json has no pad_token_id"),
    "width-of-dense": (lambda folder: edit(folder / "2_Dense" / "config.json", in_features=7), "2_Dense"),
    "huge-dense": (lambda folder: edit(folder / "2_Dense" / "config.json", out_features=2**40), "linear.weight is (16"),
    "no-positions": (lambda folder: _weights(folder, _no_positions), "position_embeddings"),
    "nan": (lambda folder: _weights(folder, _nan), "NaN or infinity"),
    "no-pad-id": (lambda folder: edit(folder / "config.json", pad_token_id=10**6), "Padding_idx"),
    "cut-short": (lambda folder: _cut(folder / "model.safetensors"), "model.safetensors"),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(MODEL, {"config.json": b"{}", "model.safetensors": b"w"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def daemon(hub: Hub, home: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess()
    try:
        yield daemon.start(
            {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_revoked"}
        )
    finally:
        daemon.close()


def _reason(daemon: DaemonProcess, name: str, model_id: str) -> str:
    """Why the instance failed, once `create` that waits has answered, or why it was refused at once."""
    began = time.monotonic()
    with daemon.client() as client:
        try:
            client.create(name, model_id, dtype="float32")
        except InvalidConfig as refusal:
            return refusal.message
        with pytest.raises(TeimgrError) as failure:
            client.wait_until_running(name, deadline_s=LIMIT_S)
        info = client.get(name)
        client.delete(name)
    assert time.monotonic() - began < LIMIT_S
    assert info.status == "failed", failure.value
    return str(info.reason)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("whole") / "model", modules=("Dense", "Normalize"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_model_fails_at_once_with_the_cause(
    name: str, daemon: DaemonProcess, whole: Path, tmp_path: Path
) -> None:
    spoil, named = FAULTS[name]
    folder = shutil.copytree(whole, tmp_path / "model")
    spoil(folder)

    assert named in _reason(daemon, name.replace("/", "-"), str(folder))


@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_the_token_is_named(status: int, daemon: DaemonProcess, hub: Hub) -> None:
    hub.refuses = status
    try:
        assert f"the hub answered {status}, HF_TOKEN is refused" in _reason(daemon, f"refused-{status}", MODEL)
    finally:
        hub.refuses = None


@pytest.mark.parametrize("name", ["pointer-model.safetensors", "nan", 401])
def test_the_command_ends_with_the_reason(
    name: str | int, daemon: DaemonProcess, hub: Hub, whole: Path, tmp_path: Path
) -> None:
    """`teimgr create --wait`, as a deployment's script calls it."""
    model, named = MODEL, "the hub answered 401, HF_TOKEN is refused"
    if isinstance(name, str):
        spoil, named = FAULTS[name]
        model = str(shutil.copytree(whole, tmp_path / "model"))
        spoil(Path(model))
    hub.refuses = name if isinstance(name, int) else None
    try:
        instance = f"by-command-{name}".lower().replace(".", "-")
        call = [sys.executable, "-m", "teimgr", "create", instance, model, "--wait"]
        found = subprocess.run(
            [*call, "--dtype", "float32", "--url", daemon.api],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        hub.refuses = None
    assert found.returncode != 0
    assert named in found.stderr, found.stderr


def test_a_cache_that_is_no_folder_is_named(daemon: DaemonProcess, home: Path) -> None:
    shutil.rmtree(home / "hub", ignore_errors=True)
    (home / "hub").write_bytes(b"")  # root may write anywhere, but not below a file

    assert "hub cache cannot be read: Not a directory" in _reason(daemon, "unwritable", MODEL)
