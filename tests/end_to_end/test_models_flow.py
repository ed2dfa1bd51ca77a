"""A model's way through a real daemon: pulled from a hub, checked in a worker, served, guarded, deleted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import MINILM, DaemonProcess
from tests.support.hub_server import SHA, Hub
from tests.support.models import WIDTH, build

from teimgr.cli.main import main

Models = Callable[..., tuple[str, str]]
MODEL = "somebody/tiny"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = build("bert", tmp_path_factory.mktemp("model"))
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Hub(MODEL, files | {"onnx/model.onnx": b"for another runtime"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def daemon(hub: Hub, home: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(models=["configured/model"])
    try:
        yield daemon.start({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home)})
    finally:
        daemon.close()


@pytest.fixture
def models(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Models:
    """What `teimgr models VERB …` says on stdout and stderr."""

    def run(verb: str, *arguments: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        ended = main(["models", verb, "--url", daemon.api, *arguments])
        out, err = capsys.readouterr()
        assert ended == status, err + daemon.log()
        return out, err

    return run


def listed(models: Models) -> dict[str, Any]:
    out, _ = models("list", "--json")
    return {model["model_id"]: model for model in json.loads(out)}


def test_a_model_is_pulled_checked_served_guarded_and_deleted(
    daemon: DaemonProcess, models: Models, hub: Hub, home: Path
) -> None:
    assert {name: model["status"] for name, model in listed(models).items()} == {"configured/model": "available"}

    out, bar = models("pull", MODEL)
    snapshot = home / "hub" / "models--somebody--tiny" / "snapshots" / SHA
    assert out == f"{snapshot}\n"
    assert bar == ""  # on a terminal alone
    assert "onnx/model.onnx" not in hub.asked
    assert (snapshot / "1_Pooling" / "config.json").exists()

    out, _ = models("check", MODEL, "--cpu", "--dtype", "float32")
    assert f"embedding, dimension {WIDTH}" in out
    assert "against sentence-transformers " in out
    assert "lowest cosine 1.0000000" in out
    model = listed(models)[MODEL]
    assert (model["status"], model["downloaded"], model["commit"]) == ("verified", True, SHA)
    trial = model["verification"]
    assert (trial["dtype"], trial["device"], trial["dimension"]) == ("float32", "cpu", WIDTH)
    assert min(trial["texts_per_s"], trial["tokens_per_s"], trial["load_s"], trial["private_bytes"]) > 0
    assert trial["peak_rss_bytes"] >= trial["private_bytes"]
    assert trial["compared_with"].startswith("sentence-transformers ")
    assert (trial["min_cosine"], "not_compared" in trial) == (pytest.approx(1.0, abs=1e-5), False)

    hub.asked.clear()
    with daemon.client() as client:
        client.create("tiny", MODEL)
        client.wait_until_running("tiny", deadline_s=60)
        assert client.embed(["fog"], instance="tiny").shape == (1, WIDTH)
    assert hub.asked == []
    _, said = models("rm", MODEL, status=6)
    assert "used by tiny" in said

    with daemon.client() as client:
        client.delete("tiny")
    models("rm", MODEL)
    assert MODEL not in listed(models)
    assert not snapshot.exists()
    assert not [name for name in daemon.run_files() if name.endswith(".json")]


@pytest.mark.long
def test_what_was_found_outlives_the_daemon_and_failures_are_told(
    daemon: DaemonProcess, models: Models, hub: Hub, home: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "nonsense"}')
    (broken / "model.safetensors").write_bytes(b"no tensors")

    _, said = models("check", str(broken), status=1)
    assert str(broken) in said
    models("check", MINILM, "--cpu")  # the packaged weights
    _, said = models("pull", "no/such", status=4)
    assert "is not on the hub" in said
    before = listed(models)
    assert (before[str(broken)]["status"], before[MINILM]["status"]) == ("failed", "verified")
    assert before[MINILM]["verification"]["dimension"] == 384

    assert daemon.stop() == 0
    daemon.start({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home)})
    after = listed(models)
    assert [after[name] for name in (str(broken), MINILM)] == [before[name] for name in (str(broken), MINILM)]


def test_a_daemon_that_stops_ends_a_download(daemon: DaemonProcess, hub: Hub) -> None:
    """The last test here, as the daemon is that of all."""
    hub.open.clear()
    hub.holding.clear()
    try:
        pulling = subprocess.Popen(
            [sys.executable, "-m", "teimgr", "models", "pull", MODEL, "--url", daemon.api],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert hub.holding.wait(60)
        assert daemon.stop() == 0
        _, said = pulling.communicate(timeout=30)
    finally:
        hub.open.set()
    assert pulling.returncode == 7
    assert b"the daemon is stopping" in said
    assert daemon.processes() == []
