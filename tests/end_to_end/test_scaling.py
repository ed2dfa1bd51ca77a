"""Replicas that follow the load: an instance goes from 1 to 3 and back under calls, of which none fails."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support import models
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.polling import until

from teimgr.errors import ObjectNotFound
from teimgr.spec import State

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmDaemonProcess]:
    with WarmDaemonProcess() as running:
        with running.client() as client:
            path = str(models.build("bert", tmp_path_factory.mktemp("model")))
            client.create("e5.small", path, max_replicas=3, scale_down_delay_secs=4)
            until(lambda: client.get("e5.small").status is State.RUNNING, "start")
        yield running


def get(daemon: WarmDaemonProcess, path: str) -> Any:
    with urllib.request.urlopen(f"{daemon.api}{path}", timeout=60) as answer:
        body = answer.read()
    return json.loads(body) if answer.headers["content-type"].startswith("application/json") else body.decode()


def patch(daemon: WarmDaemonProcess, **keys: Any) -> None:
    request = urllib.request.Request(
        f"{daemon.api}/instances/e5.small",
        json.dumps(keys).encode(),
        {"content-type": "application/json"},
        method="PATCH",
    )
    urllib.request.urlopen(request, timeout=60).close()


def test_replicas_come_and_go_without_a_failed_call(daemon: WarmDaemonProcess) -> None:
    stop, failures, calls = threading.Event(), [], [0]

    def call() -> None:
        body = json.dumps({"model": "e5.small", "input": ["rain and fog"] * 8}).encode()
        while not stop.is_set():
            try:
                request = urllib.request.Request(
                    f"{daemon.api}/v1/embeddings", body, {"content-type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=60).close()
                calls[0] += 1
            except OSError as error:
                failures.append(error)

    def replicas() -> int:
        found = get(daemon, "/metrics/scaling")
        assert found["flat"]["e5_small"] == found["instances"]["e5.small"]
        return int(found["flat"]["e5_small"]["replicas"])

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        patch(daemon, min_replicas=3)
        until(lambda: replicas() == 3, "three replicas")
        patch(daemon, min_replicas=1)
        until(lambda: replicas() == 1, "one replica")
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    assert not failures
    assert calls[0] > 20
    reasons = [each["reason"] for each in get(daemon, "/events") if each["event"] == "scaled"]
    assert reasons[0] == "1 → 3: min_replicas is 3"
    assert "would have been enough for the last 4 s" in reasons[-1]
    assert 'teimgr_scaling_replicas{instance="e5.small"} 1' in get(daemon, "/metrics")


def test_an_idle_instance_is_recommended_and_made_one_on_demand(daemon: WarmDaemonProcess) -> None:
    with daemon.client() as client:
        found = until(lambda: client.recommendations(window_secs=5)["recommendations"], "a second reading")
        assert [each["id"] for each in found] == ["idle.e5.small"]
        assert found[0]["patch"]["load"] == "on_demand"
        assert found[0]["evidence"]["held_bytes"] > 2**20
        made = client.apply_recommendation("idle.e5.small", window_secs=5)
        assert (made["state"], made["before"]) == ("watched", {"load": "eager", "idle_timeout_secs": 0})
        assert client.get("e5.small").load == "on_demand"
        with pytest.raises(ObjectNotFound):
            client.apply_recommendation("idle.e5.small")
        again = client.recommendations()
        assert (again["recommendations"], again["applied"]) == ([], [made])
    assert [each["reason"] for each in get(daemon, "/events") if each["event"] == "applied"]


def test_an_instance_without_a_replica_has_its_figures(daemon: WarmDaemonProcess) -> None:
    with daemon.client() as client:
        client.stop("e5.small")
    found = get(daemon, "/metrics/scaling")["instances"]["e5.small"]
    assert (found["queued_tokens"], found["replicas"]) == (0, 0)
    assert 'teimgr_scaling_queued_tokens{instance="e5.small"} 0' in get(daemon, "/metrics")
