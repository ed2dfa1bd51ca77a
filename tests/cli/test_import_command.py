"""`teimgr import`: the file it writes, its report, its exit statuses."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from teimgr.cli.failures import ExitStatus
from teimgr.cli.main import main

COMPOSE = """
services:
  embedder:
    image: ghcr.io/huggingface/text-embeddings-inference:1.9
    command: --model-id BAAI/bge-small-en-v1.5 --pooling cls --api-key ${KEY}
    environment: {HF_TOKEN: hf_of_mine}
    ports: ["127.0.0.1:8081:80"]
    volumes: ["./data:/data"]
"""
SECRETS = ("a-key-of-clients", "hf_of_mine")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `teimgr import` in a folder with a compose file."""
    (tmp_path / "docker-compose.yml").write_text(COMPOSE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", SECRETS[0])

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(["import", *(arguments or ("docker-compose.yml",))])
        return status, *capsys.readouterr()

    return call


def test_a_configuration_that_only_its_owner_reads_and_a_report_without_secrets(run: Run, tmp_path: Path) -> None:
    status, out, err = run()

    assert status == ExitStatus.OK, err
    file = tmp_path / "teimgr.toml"
    assert tomllib.loads(file.read_text())["instances"] == [
        {
            "name": "embedder",
            "model_id": "BAAI/bge-small-en-v1.5",
            "port": 8081,
            "pooling": "cls",
            "extra_args": ["--api-key", SECRETS[0]],
        }
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hf_of_mine" not in file.read_text()
    assert not [secret for secret in SECRETS if secret in out + err]
    rows = [line.split("\t") for line in out.splitlines()]
    assert ["docker-compose.yml", "services.embedder", "ports", "carried over", "port = 8081", ""] in rows
    assert err.splitlines() == [
        "teimgr.toml: 1 instance; carried over: 8, same by default: 1, no counterpart: 1",
        "set in the daemon's environment: HF_TOKEN",
        f"next: HF_HUB_CACHE={tmp_path}/data teimgr serve -c teimgr.toml",
    ]
    assert main(["config", "check", str(file)]) == ExitStatus.OK


def test_as_json(run: Run, tmp_path: Path) -> None:
    status, out, err = run("docker-compose.yml", "--json", "-o", "other.toml")

    report = json.loads(out)
    assert (status, err, report["file"], report["instances"]) == (ExitStatus.OK, "", "other.toml", ["embedder"])
    assert report["environment"] == {"HF_TOKEN": "", "HF_HUB_CACHE": str(tmp_path / "data")}
    assert report["outcomes"] == {"carried over": 8, "same by default": 1, "no counterpart": 1}
    assert report["faults"] == report["warnings"] == []
    assert {"source", "place", "key", "outcome", "target", "note"} == report["findings"][0].keys()


def test_a_file_that_exists_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "teimgr.toml").write_text("# mine\n")

    status, _, err = run()
    assert (status, err) == (
        ExitStatus.REFUSED,
        "teimgr: teimgr.toml exists; --overwrite replaces it, -o names another\n",
    )
    assert (tmp_path / "teimgr.toml").read_text() == "# mine\n"
    assert run("docker-compose.yml", "--overwrite")[0] == ExitStatus.OK


def test_strict_fails_where_something_needs_a_decision(run: Run, tmp_path: Path) -> None:
    assert run("docker-compose.yml", "--strict")[0] == ExitStatus.OK
    with (tmp_path / "docker-compose.yml").open("a") as file:
        file.write("    mac_address: x\n  other: {image: text-embeddings-inference}\n")

    status, _, err = run("docker-compose.yml", "--overwrite", "--strict")
    assert status == ExitStatus.INCOMPLETE
    assert "needs a decision: 1" in err
    assert run("docker-compose.yml", "--overwrite")[0] == ExitStatus.OK


def test_a_table_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")

    _, out, _ = run()
    assert "\ndocker-compose.yml: services.embedder\n" in out
    assert "IN TEIMGR" in out


def test_faults_of_what_is_written_are_reported(run: Run, tmp_path: Path) -> None:
    mtls = {name: f'"{tmp_path}/{name}.pem"' for name in ("ca_cert", "server_cert", "server_key")}
    (tmp_path / "tm.toml").write_text(
        '[[instances]]\nname = "a"\nmodel_id = "m"\n[auth]\nenabled = true\nproviders = ["mtls"]\n[auth.mtls]\n'
        + "".join(f"{name} = {path}\n" for name, path in mtls.items())
    )

    status, _, err = run("tm.toml")
    assert status == ExitStatus.FAILED
    assert "ca_cert" in err


def test_what_cannot_be_read_writes_nothing(run: Run, tmp_path: Path) -> None:
    for arguments in (("none.yml",), ("docker-compose.yml", "--env-file", "none.env")):
        status, _, err = run(*arguments)
        assert status == ExitStatus.FAILED
        assert "none." in err
        assert "cannot be read: No such file or directory" in err
    assert run("docker-compose.yml", "-o", "no/folder.toml")[2] == (
        "teimgr: no/folder.toml: cannot be written: No such file or directory\n"
    )
    assert not (tmp_path / "teimgr.toml").exists()
