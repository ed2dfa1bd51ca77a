"""`teimgr doctor` on this host, and on one where things are wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from teimgr.cli import doctor, doctor_checks
from teimgr.config.settings import Settings
from teimgr.control.ledger.system_memory import free_memory_bytes
from teimgr.spec import InstanceSpec


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "teimgr", "doctor", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def findings(check: doctor_checks.Check, **keys: object) -> dict[str, str]:
    """Outcome by check name, with the text."""
    found = check(Settings(**keys))  # type: ignore[arg-type]
    return {each.check: f"{each.outcome}: {each.text}" for each in found}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "t.toml"
    file.write_text(f'state_file = "{tmp_path}/state/state.toml"\napi_port = {free()}\ngrpc_port = {free()}\n')
    return file


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_good_host_passes_every_check(config: Path) -> None:
    done = run("-c", config, "--json")

    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {
        "config",
        "state",
        "logs",
        "run",
        "ports",
        "limits",
        "cpu",
        "memory",
        "cache",
        "clock",
        "daemon",
        "torch",
        "gpus",
    } == {each["check"] for each in found}
    assert not [each for each in found if each["outcome"] == "fail"]
    assert not (config.parent / "state").exists(), "looking changes nothing"


def test_a_seed_whose_model_is_no_directory_is_a_finding(config: Path) -> None:
    config.write_text(config.read_text() + '[[instances]]\nname = "docs"\nmodel_id = "/no/such/model"\n')

    done = run(config, "--json")

    assert ["/no/such/model" in each["text"] for each in json.loads(done.stdout) if each["check"] == "config"] == [
        False,
        True,
    ]


def test_models_of_the_seeds_are_added_up_with_their_replicas(tmp_path: Path) -> None:
    weights = tmp_path / "m" / "model.safetensors"
    weights.parent.mkdir()
    with weights.open("wb") as file:
        file.truncate(3 * 2**30)  # takes no room on the disk
    (weights.parent / "pytorch_model.bin").write_bytes(b"not loaded beside the other")
    seeds = (
        InstanceSpec(name="a", model_id=str(weights.parent), replicas=2),
        InstanceSpec(name="b", model_id="no/such"),
    )

    found = list(doctor_checks._models(Settings(instances=seeds)))

    assert found[0].text == "not downloaded, so of unknown size: no/such"
    assert found[1].text.startswith("2 workers of the seeds need about 6.2 GiB, ")
    fits = (free_memory_bytes() or 0) > 6.2 * 2**30
    assert found[1].outcome == ("ok" if fits else "warn")


def test_models_that_do_not_fit_are_a_warning_with_advice(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**42)
    seed = InstanceSpec(name="a", model_id=str(tmp_path))

    (found,) = doctor_checks._models(Settings(instances=(seed,)))

    assert (found.outcome, "about 4096.1 GiB" in found.text, "fewer replicas" in found.advice) == ("warn", True, True)


def test_a_wrong_configuration_fails_with_its_fault_and_the_host_is_still_checked(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("api_prot = 1\n")

    done = run("-c", file)

    assert done.returncode == 1
    assert done.stdout.startswith("fail  config")
    assert "api_prot" in done.stdout
    assert "ok    clock" in done.stdout


def test_a_port_in_use_and_an_address_of_another_host() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert findings(doctor_checks._ports, api_port=port, grpc_enabled=False) == {
            "ports": f"warn: api_port 127.0.0.1:{port} is in use"
        }
    found = findings(doctor_checks._ports, api_host="192.0.2.1", api_port=free(), grpc_enabled=False)
    assert "192.0.2.1" in found["ports"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    found = findings(doctor_checks._folders, state_file=file / "state.toml", log_dir=tmp_path, run_dir=tmp_path)

    assert found["state"].startswith("fail: ")
    assert found["logs"] == f"ok: {tmp_path}"


def test_a_state_file_of_the_future_means_that_the_clock_was_set_back(tmp_path: Path) -> None:
    file = tmp_path / "state.toml"
    file.touch()
    os.utime(file, (4e9, 4e9))

    assert findings(doctor_checks.check_clock, state_file=file) == {
        "clock": f"warn: {file} has a modification time in the future"
    }


def test_secrets_are_hidden_in_a_bundle() -> None:
    text = (
        'token=s3c hf_s3cdefgh12345 Authorization: Bearer s3c.1\nhttp://me:s3c@hub/x "password": "s3c", api_key: s3c '
        'teimgr_s3c45678901234567 teimgr1.s3c {"secret": "s3c", "tokens": 5} model=tiny'
    )
    shown = doctor.redacted(text)
    assert "s3c" not in shown
    assert shown.endswith('{"secret": "(hidden)", "tokens": 5} model=tiny')
    assert "@hub/x" in shown
