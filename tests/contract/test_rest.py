"""Clauses of the REST contract that only a real daemon shows."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.config.loaded_settings import load
from tests.support.daemon_process import MINILM, DaemonProcess

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parents[2] / "configs"
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6}|\.\d{9})?Z")


def ask(served: DaemonProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and decoded JSON of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(served.api + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.clause("M2-slash", "M2.2-path")
@pytest.mark.parametrize(
    ("path", "status"),
    [("/instances/", 404), ("/health/", 404), ("/models/", 404), ("/instances/%FF", 400), ("/models/%FF", 400)],
)
def test_paths_that_lead_nowhere(served: DaemonProcess, path: str, status: int) -> None:
    found, answer = ask(served, "GET", path)

    assert found == status, answer
    assert set(answer) == {"error", "code", "timestamp"}


@pytest.mark.clause("M2.2-timestamp")
def test_timestamps_are_rfc_3339_in_utc(served: DaemonProcess) -> None:
    told = [
        ask(served, "GET", "/health")[1]["timestamp"],
        ask(served, "GET", "/instances/nobody")[1]["timestamp"],
        ask(served, "GET", "/instances/mini")[1]["created_at"],
        ask(served, "POST", "/models", {"model_id": "org/model"})[1]["added_at"],
    ]

    assert [text for text in told if not RFC_3339.fullmatch(text)] == []


@pytest.mark.clause("M2.4-defaults")
def test_batches_and_requests_have_the_contracts_defaults(served: DaemonProcess) -> None:
    status, found = ask(served, "GET", "/instances/mini")

    assert (status, found["max_batch_tokens"], found["max_concurrent_requests"]) == (200, 16384, 512)


@pytest.mark.clause("M2.4-pooling")
@pytest.mark.parametrize(
    ("pooling", "status"), [("cls", 201), ("mean", 201), ("last-token", 201), ("splade", 201), ("median", 422)]
)
def test_poolings_are_those_of_tei(served: DaemonProcess, pooling: str, status: int) -> None:
    # An id that is nowhere: what is judged here is the word.
    body = {"name": f"by-{pooling}", "model_id": "org/nowhere", "pooling": pooling}

    found, answer = ask(served, "POST", "/instances", body)
    if found == 201:
        ask(served, "DELETE", f"/instances/by-{pooling}")

    assert found == status, answer


@pytest.mark.clause("M8-create-delete-create")
def test_create_delete_create_keeps_ports_distinct(served: DaemonProcess) -> None:
    kept = [ask(served, "GET", f"/instances/{name}")[1]["port"] for name in ("mini", "prompted")]
    for _ in range(3):
        status, found = ask(served, "POST", "/instances", {"name": "passing", "model_id": MINILM})
        ask(served, "DELETE", "/instances/passing")
        assert status == 201
        assert found["port"] not in kept


@pytest.mark.clause("N-info")
def test_an_instances_info_is_on_the_daemons_port_too(served: DaemonProcess) -> None:
    status, found = ask(served, "GET", "/instances/mini/info")

    assert (status, found["model_id"], found["max_input_length"]) == (200, MINILM, 256)


@pytest.mark.clause("N-json-metrics")
def test_metrics_come_as_json_too(served: DaemonProcess) -> None:
    status, found = ask(served, "GET", "/metrics?format=json")

    assert status == 200
    assert "tei_manager_instances_count" in json.dumps(found["families"])


@pytest.mark.clause("M3.4-container")
def test_the_containers_configuration_has_the_contracts_ports_and_all_interfaces() -> None:
    settings = load(CONFIGS / "container.toml", {})

    assert (settings.api_port, settings.grpc_port, settings.max_instances) == (9000, 9001, 10)
    assert (settings.instance_port_start, settings.instance_port_end) == (8080, 8180)
    assert {settings.api_host, settings.grpc_host, settings.instance_host} == {"0.0.0.0"}
    assert settings.auto_restore_on_restart


def test_the_document_keeps_the_routes_that_share_a_path_with_inference(served: DaemonProcess) -> None:
    _, document = ask(served, "GET", "/openapi.json")

    assert {"get", "patch", "delete", "post"} <= set(document["paths"]["/instances/{name}"])
    assert "503" in document["paths"]["/instances/{name}/info"]["get"]["responses"]
