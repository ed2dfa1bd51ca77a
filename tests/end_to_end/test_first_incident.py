"""What an operator sees of seeds, waits, kills and adoption, on one real daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models import build, build_cross_encoder
from tests.support.polling import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": build("bert", folder / "dense"), "reranker": build_cross_encoder("bert", folder / "reranker")}


@pytest.fixture(scope="module")
def daemon(models: dict[str, Path]) -> Iterator[DaemonProcess]:
    seeds = [{"name": "seed", "model_id": str(models["dense"]), "max_batch_tokens": "auto"}]
    with WarmDaemonProcess(instances=seeds, log_format="pretty", startup_timeout_secs=60) as running:
        yield running


def rest(daemon: DaemonProcess, method: str, path: str, body: object = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(daemon.api + path, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=90) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def daemon_log(daemon: DaemonProcess) -> str:
    return (daemon.folder / "daemon.log").read_text()


def test_the_first_line_of_the_log_has_the_places(daemon: DaemonProcess) -> None:
    first = next(line for line in daemon_log(daemon).splitlines() if not line.startswith("teimgr: warning"))
    assert "daemon starts" in first
    for name, place in (("state_file", "state.toml"), ("log_dir", "logs"), ("config", "teimgr.toml")):
        assert f"{name}={daemon.folder}/{place}" in first


def test_a_create_that_waits_answers_when_it_runs_or_failed(daemon: DaemonProcess, models: dict[str, Path]) -> None:
    body = {"name": "waited", "model_id": str(models["dense"])}
    status, info = rest(daemon, "POST", "/instances?wait=true", body)
    assert (status, info["status"], info["requested"]["dtype"]) == (201, "running", "auto")
    assert rest(daemon, "POST", "/instances/waited/stop")[0] == 200
    assert rest(daemon, "POST", "/instances/waited/start?wait=true")[1]["status"] == "running"

    status, info = rest(daemon, "POST", "/instances?wait=true", {"name": "gone", "model_id": "nobody/has-this"})
    assert (status, info["status"]) == (201, "failed")
    assert "neither a directory here nor in the hub cache" in info["reason"]
    alarms = rest(daemon, "GET", "/health")[1]["alarms"]
    assert [alarm for alarm in alarms if alarm.startswith("gone: failed: Model 'nobody/has-this' is neither")] == alarms
    assert rest(daemon, "DELETE", "/instances/gone?purge=true")[0] == 200
    assert rest(daemon, "GET", "/health")[1]["alarms"] == []
    assert not (daemon.folder / "logs" / "gone.log").exists()


def test_instances_log_in_json_whatever_the_daemon_does_and_are_shown_to_people(daemon: DaemonProcess) -> None:
    rest(daemon, "POST", "/instances/seed/start?wait=true")
    lines = rest(daemon, "GET", "/instances/seed/logs?level=info")[1]["lines"]
    assert any(json.loads(line)["message"] == "worker ready" for line in lines)
    request = urllib.request.Request(f"{daemon.api}/instances/seed/logs", headers={"Accept": "text/plain"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        text = reply.read().decode()
    assert " info     worker ready " in text


def test_a_kill_is_a_warning_and_its_restart_is_counted_by_the_next_daemon(daemon: DaemonProcess) -> None:
    def seed() -> dict[str, Any]:
        info: dict[str, Any] = rest(daemon, "GET", "/instances/seed")[1]
        return info

    until(lambda: seed()["status"] == "running", "the seed runs")
    before = seed()["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: (now := seed())["status"] == "running" and now["pid"] != before, "another worker")
    lines = [line for line in daemon_log(daemon).splitlines() if "killed by SIGKILL" in line]
    assert any(" error    worker crashed" in line for line in lines)
    assert any(" warning  phase" in line for line in lines)

    pid = seed()["pid"]
    daemon.kill()
    daemon.start()
    until(lambda: seed()["status"] == "running", "the seed is adopted")
    assert (seed()["pid"], seed()["restarts"]) == (pid, 1)


def test_the_deletion_of_a_seed_says_that_it_does_not_last(daemon: DaemonProcess) -> None:
    says = "instance 'seed' was deleted, but the configuration lists it: the next start or a reload creates it again"
    status, deleted = rest(daemon, "DELETE", "/instances/seed")
    assert status == 200
    assert deleted["notice"].startswith(says)
    assert rest(daemon, "GET", "/health")[1]["notices"][0].startswith(says)
    assert says in daemon_log(daemon)


def test_the_stubs_of_the_package_and_generated_ones_work_as_documented(
    daemon: DaemonProcess, models: dict[str, Path], tmp_path: Path
) -> None:
    rest(daemon, "POST", "/instances?wait=true", {"name": "mini", "model_id": str(models["dense"])})
    text = (ROOT / "proto" / "README.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    program = program.replace("localhost:9001", f"127.0.0.1:{daemon.grpc_port}")
    (tmp_path / "stubs").mkdir()
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    words = [sys.executable, *shlex.split(command.replace("\\\n", " "))[1:]]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    generated = program.replace("teimgr.wire.pb.", "")
    for code, path in ((program, None), (generated, tmp_path / "stubs")):
        environ = os.environ | ({"PYTHONPATH": str(path)} if path else {})
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.stdout, done.returncode) == ("32\n", 0), done.stderr
