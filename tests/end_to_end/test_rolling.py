"""An instance is changed, scaled and hit under load: nobody loses a call, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tests.end_to_end.rolling_load import SteadyLoad
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, free_ports
from tests.support.models import build
from tests.support.polling import until

from teimgr.wire.pb.tei.v1 import tei_pb2

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of different dimensions, and one whose weights are no weights."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("small", "large", "broken")}
    build("bert", found["small"])
    build("bert", found["large"], dense=(48, "torch.nn.modules.linear.Identity"))
    build("bert", found["broken"])
    weights = found["broken"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with WarmDaemonProcess(orphan_grace_secs=30, health_check_interval_secs=5) as running:
        yield running


@pytest.fixture
def daemon(shared: DaemonProcess, models: dict[str, Path]) -> Iterator[DaemonProcess]:
    """The daemon of this file, with a new instance `a` of the small model."""
    with shared.client() as client:
        metrics_port = free_ports(1)[0]  # the range from 9100 is shared with every other daemon of the machine
        client.create("a", str(models["small"]), dtype="float32", prometheus_port=metrics_port)
        client.wait_until_running("a", deadline_s=LIMIT_S)
        yield shared
        if shared.is_running:
            client.delete("a")


def rest(daemon: DaemonProcess, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
    request = urllib.request.Request(
        daemon.api + path,
        json.dumps(body).encode() if body is not None else None,
        {"content-type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            found, answer = reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        found, answer = error.code, json.loads(error.read())
    assert found == status, answer
    return answer


def instance(daemon: DaemonProcess) -> Any:
    return rest(daemon, "GET", "/instances/a")


def load(daemon: DaemonProcess) -> SteadyLoad:
    return SteadyLoad(daemon, "a", instance(daemon)["port"])


def only_serving(daemon: DaemonProcess, replicas: int) -> bool:
    """Whether there are so many workers, all serve, and nothing of others is left."""
    workers = instance(daemon)["workers"]
    sockets = [name for name in daemon.run_files() if name.endswith(".sock") and not name.startswith("mux")]
    return [each["role"] for each in workers] == ["serving"] * replicas and len(sockets) == replicas


def test_a_change_of_model_dtype_and_replicas_under_load_loses_no_call(
    daemon: DaemonProcess, models: dict[str, Path]
) -> None:
    with load(daemon) as calls:
        told = rest(daemon, "PATCH", "/instances/a", {"model_id": str(models["large"])}, status=202)
        assert told["update"]["state"] == "rolling"
        until(lambda: instance(daemon)["update"]["state"] == "done")
        calls.progress(10)
        for change in ({"dtype": "bfloat16"}, {"replicas": 2}, {"max_batch_tokens": 4096}, {"replicas": 1}):
            rest(daemon, "PATCH", "/instances/a?wait=true", change)
            calls.progress(10)
        rest(daemon, "POST", "/instances/a/restart?wait=true", {"rolling": True})
        calls.progress(10)
        until(lambda: only_serving(daemon, 1))
        calls.progress(10)

    assert calls.failures == {}
    assert all(len(found) == 2 for found in calls.dimensions().values()), calls.dimensions()
    shown = instance(daemon)
    assert (shown["model"]["dtype"], shown["max_batch_tokens"], shown["restarts"]) == ("bfloat16", 4096, 1)


def test_once_a_change_is_acknowledged_no_call_is_answered_by_the_old_model(
    daemon: DaemonProcess, models: dict[str, Path]
) -> None:
    port = instance(daemon)["port"]
    body, headers = json.dumps({"inputs": "a text"}), {"content-type": "application/json"}

    def over_http(kept: HTTPConnection, path: str = "/embed") -> int:
        kept.request("POST", path, body, headers)
        return len(json.loads(kept.getresponse().read())[0])

    def over_grpc(channel: grpc.Channel) -> int:
        embed = channel.unary_unary(
            "/tei.v1.Embed/Embed", tei_pb2.EmbedRequest.SerializeToString, tei_pb2.EmbedResponse.FromString
        )
        return len(embed(tei_pb2.EmbedRequest(inputs="a text"), timeout=LIMIT_S).embeddings)

    with ExitStack() as held:
        client = held.enter_context(daemon.client())
        kept = [held.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=LIMIT_S))) for _ in range(6)]
        api = held.enter_context(closing(HTTPConnection("127.0.0.1", daemon.api_port, timeout=LIMIT_S)))
        channels = [
            held.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", [("number", number)])) for number in range(2)
        ]

        def dimensions() -> list[int]:
            return [
                *map(over_http, kept),
                *map(over_grpc, channels),
                over_http(api, "/instances/a/embed"),
                client.embed("a text", instance="a").shape[1],
            ]

        assert set(dimensions()) == {32}
        for model, dimension in (("large", 48), ("small", 32)):
            rest(daemon, "PATCH", "/instances/a?wait=true", {"model_id": str(models[model])})
            assert all(each.sock is not None for each in kept), "the connections are kept"
            assert dimensions() == [dimension] * 10


def test_a_new_worker_that_does_not_load_leaves_the_old_one_serving(
    daemon: DaemonProcess, models: dict[str, Path]
) -> None:
    before = instance(daemon)
    with load(daemon) as calls:
        body = {"model_id": str(models["broken"])}
        refusal = rest(daemon, "PATCH", "/instances/a?wait=true", body, status=409)
        calls.progress(10)

    after = instance(daemon)
    assert refusal["code"] == "UPDATE_FAILED"
    assert (after["pid"], after["model_id"], after["status"]) == (before["pid"], before["model_id"], "running")
    assert (after["update"]["state"], after["update"]["changes"]) == ("failed", ["model_id"])
    assert after["update"]["reason"] in refusal["error"]
    assert calls.failures == {}
    assert only_serving(daemon, 1)


def test_a_replica_that_is_killed_costs_its_own_calls_alone(daemon: DaemonProcess) -> None:
    rest(daemon, "PATCH", "/instances/a?wait=true", {"replicas": 2})
    workers = instance(daemon)["workers"]
    with load(daemon) as calls:
        in_flight = calls.in_flight
        os.kill(workers[1]["pid"], signal.SIGKILL)
        until(lambda: instance(daemon)["workers"][1]["restarts"] == 1)
        assert instance(daemon)["status"] == "running"
        until(lambda: all(each["state"] == "running" for each in instance(daemon)["workers"]))
        after = calls.failures.copy()
        calls.progress(20)

    assert instance(daemon)["workers"][0]["pid"] == workers[0]["pid"]
    assert calls.failures == after, "what fails, fails at once"
    assert calls.failures.total() <= max(20, in_flight), calls.failures


@pytest.mark.parametrize(
    "moment_s",
    [pytest.param(0.05, marks=pytest.mark.long), 0.4, pytest.param(1.5, marks=pytest.mark.long)],
)
def test_a_change_in_which_the_daemon_is_killed_is_completed_by_the_next(
    daemon: DaemonProcess, models: dict[str, Path], moment_s: float
) -> None:
    with load(daemon) as calls:
        rest(daemon, "PATCH", "/instances/a", {"model_id": str(models["large"])}, status=202)
        time.sleep(moment_s)
        daemon.kill()
        calls.progress(10)
        daemon.start()
        until(lambda: instance(daemon)["model_id"] == str(models["large"]) and only_serving(daemon, 1))
        until(lambda: (instance(daemon)["update"] or {}).get("state") != "rolling")
        calls.progress(10)
        serving = instance(daemon)
        rest(daemon, "POST", "/instances/a/restart?wait=true", {"rolling": True})  # of an adopted worker
        calls.progress(10)

    assert serving["model"]["model_id"] == serving["model_id"]
    assert calls.failures == {}


def test_the_end_leaves_no_process_port_socket_or_file(daemon: DaemonProcess, models: dict[str, Path]) -> None:
    rest(daemon, "PATCH", "/instances/a?wait=true", {"replicas": 3})
    rest(daemon, "PATCH", "/instances/a", {"model_id": str(models["large"])}, status=202)
    everything = daemon.processes()
    port = instance(daemon)["port"]

    assert daemon.stop() == 0

    psutil.wait_procs(everything, timeout=10)
    assert daemon.processes() == []
    assert [name for name in daemon.run_files() if name.endswith((".sock", ".json", ".exit", ".run"))] == []
    assert port not in {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
