"""Real workers under a budget of host memory: what does not fit is refused, and fits once there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models import build
from tests.support.polling import until

from teimgr.client import Client, Instance


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("model")))


def _settled(client: Client, name: str) -> Instance:
    until(lambda: client.get(name).status.value in ("running", "failed"), f"{name} to run or fail", 120)
    return client.get(name)


def _measured_bytes(daemon: DaemonProcess) -> int:
    """What the daemon keeps as the host memory of the one model that ran."""
    kept = daemon.folder / "state.memory.json"
    figures = until(lambda: kept.is_file() and json.loads(kept.read_bytes())["measured"], "the measured figure", 60)
    (figure,) = figures.values()
    return int(figure["host_bytes"])


def test_a_worker_that_does_not_fit_is_refused_and_starts_once_there_is_room(model: str) -> None:
    with WarmDaemonProcess(page=False) as daemon:
        with daemon.client() as client:
            client.create("a", model)
            assert _settled(client, "a").status.value == "running"
        host_bytes = _measured_bytes(daemon)  # which a daemon that ends at once does not wait for
        daemon.stop()
        assert 15 < host_bytes / 2**20 < 45
        budget_mib = int(2.5 * host_bytes / 2**20)  # two of them, whatever one takes on this machine
        daemon.settings["host_memory_budget_mib"] = budget_mib
        daemon.start()
        _fill_the_budget(daemon, model, budget_mib)


def test_an_adopted_worker_takes_what_it_took_before(model: str) -> None:
    """Over 200 MiB that it had shared with its fork server are its own by the kernel's figures."""
    with DaemonProcess() as daemon:  # with a fork server that nothing shares memory with
        with daemon.client() as client:
            client.create("a", model)
            assert _settled(client, "a").status.value == "running"
            before = _private_mib_after(client, calls=10)
        workers = [process for process in daemon.processes() if process.name() == "tei:a"]
        others = [process for process in daemon.processes() if process not in workers]
        daemon.kill()
        psutil.wait_procs([each for each in others if "mux" not in " ".join(each.cmdline())], timeout=20)
        daemon.start()
        with daemon.client() as client:
            assert _settled(client, "a").pid == workers[0].pid
            after = _private_mib_after(client, calls=50)
        assert before - 1 < after < before + 10


def _private_mib_after(client: Client, calls: int) -> float:
    """As of the second probe after calls; after twice as many as before a worker adds up its memory anew."""
    for number in range(calls):
        client.embed(f"call {number}", instance="a")
    for _ in range(2):
        last = client.get("a").last_health_check
        until(lambda last=last: client.get("a").last_health_check != last, "a probe", 20)  # type: ignore[misc]
    (worker,) = client.get("a").details["workers"]
    return float(worker["private_bytes"]) / 2**20


def _needs_mib(reason: str) -> int:
    """The figure at the head of a refusal: "needs 35 MiB of host memory, 18 MiB are free …"."""
    needs, mib, unit, *_ = reason.split()
    assert (needs, unit) == ("needs", "MiB"), reason
    return int(mib)


def _fill_the_budget(daemon: DaemonProcess, model: str, budget_mib: int) -> None:
    with daemon.client() as client:
        client.create("b", model)
        for name in ("a", "b"):
            assert _settled(client, name).status.value == "running"
        (planned,) = client.plan([{"name": "c", "model_id": model}])["workers"]
        assert (planned["outcome"], planned["source"]) == ("refused", "measured")
        client.create("c", model)
        refused = _settled(client, "c")
        assert refused.status.value == "failed"
        assert "MiB of host memory" in str(refused.reason)
        assert f"budget {budget_mib}" in str(refused.reason)
        # The neighbours are measured again while they run: between the two decisions the figure may move.
        assert abs(_needs_mib(planned["reason"]) - _needs_mib(str(refused.reason))) <= 3

        client.delete("a")
        client.delete("c")
        file = daemon.folder / "wanted.toml"
        file.write_text(f'[[instances]]\nname = "c"\nmodel_id = "{model}"\n')
        command = [sys.executable, "-m", "teimgr", "plan", str(file), "--json"]
        environ = os.environ | {"TEIMGR_URL": f"http://127.0.0.1:{daemon.api_port}"}
        for options, exists in (([], False), (["--apply"], True)):
            done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, check=True)
            (worker,) = json.loads(done.stdout)["workers"]
            assert (worker["instance"], worker["outcome"]) == ("c", "starts")
            assert ("c" in {each.name for each in client.list()}) is exists
        until(lambda: client.get("c").status.value == "running", "c to run in the room of a", 120)
