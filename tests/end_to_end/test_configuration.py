"""Another configuration for a daemon that runs, its events, proofs on demand, and a state file of tei-manager."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib import request as urllib

import pytest
from tests.support.daemon_process import WarmDaemonProcess, toml
from tests.support.models import build
from tests.support.polling import until

LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(300)


class Daemon(WarmDaemonProcess):
    """With REST calls that are plain JSON."""

    def call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.Request(f"{self.api}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.urlopen(asked, timeout=LIMIT_S) as reply:
            return json.load(reply)

    def configure(self, **settings: Any) -> None:
        """Write the configuration file anew, with these keys over those of the start."""
        (self.folder / "teimgr.toml").write_text(toml(self.settings | settings))

    def status(self, name: str) -> str:
        return str(self.call("GET", f"/instances/{name}")["status"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("model")))


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A receiver of webhooks: its address, and what it was told."""
    told: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", told
    server.shutdown()
    thread.join()
    server.server_close()


def seeds(model: str, *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "model_id": model} | more for name in names]


def test_the_fleet_moves_to_another_configuration(model: str, hook: tuple[str, list[dict[str, Any]]]) -> None:
    url, told = hook
    daemon = Daemon(instances=seeds(model, "a", "b"), prune_seeds=True, log_level="warn")
    with daemon:
        until(lambda: daemon.status("a") == daemon.status("b") == "running")
        daemon.call("POST", "/instances", {"name": "mine", "model_id": model, "max_batch_tokens": "auto"})
        assert daemon.call("GET", "/instances/mine")["max_batch_tokens"] == 16384

        changed = seeds(model, "a", max_batch_tokens=4096) + seeds(model, "c")
        daemon.configure(instances=changed, webhooks=[{"url": url}], log_level="info", grpc_port=9999)
        plan = daemon.call("POST", "/config/reload?dry_run=true")["plan"]
        assert (plan["create"], plan["update"], plan["remove"]) == (["c"], {"a": {"max_batch_tokens": 4096}}, ["b"])
        applies = {each["key"]: each["applies"] for each in plan["settings"]}
        assert applies["grpc_port"] == "at the next start"
        assert applies["log_level"] == applies["webhooks[0].url"] == "at once"
        assert [each["name"] for each in daemon.call("GET", "/instances")] == ["a", "b", "mine"]

        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: [each["name"] for each in daemon.call("GET", "/instances")] == ["a", "mine", "c"])
        until(lambda: daemon.call("GET", "/instances/a")["max_batch_tokens"] == 4096)
        until(lambda: all(daemon.status(name) == "running" for name in ("a", "c", "mine")))
        assert "reloaded" in daemon.log(200)
        until(lambda: {("b", "deleted"), ("c", "running")} <= {(each["instance"], each["event"]) for each in told})
        heard = [(each["instance"], each["event"]) for each in daemon.call("GET", "/events?event=created")]
        assert heard == [("mine", "created"), ("c", "created")]

        (daemon.folder / "teimgr.toml").write_text("api_port = 'x'\n")
        daemon.process.send_signal(signal.SIGHUP)
        alarms = until(lambda: daemon.call("GET", "/health")["alarms"])
        assert "teimgr.toml:1: api_port: must be an integer" in alarms[0]
        assert daemon.status("c") == "running"

        proof = daemon.call("GET", "/instances/c/health?probe=true")
        assert proof["healthy"]
        assert [each["ok"] for each in proof["proofs"]] == [True]
        assert daemon.call("GET", "/health/all?probe=true")["healthy"]


def test_the_state_wins_at_a_start_and_health_says_where_it_differs(model: str) -> None:
    daemon = Daemon(instances=seeds(model, "a"))
    try:
        daemon.start()
        assert daemon.call("GET", "/health")["notices"] == []
        assert daemon.stop() == 0
        daemon.settings["instances"] = seeds(model, "a", max_batch_tokens=512)
        daemon.start()
        assert daemon.call("GET", "/instances/a")["max_batch_tokens"] == 16384
        sentence = "instance 'a' differs from the configuration in max_batch_tokens; a reload moves it"
        assert daemon.call("GET", "/health")["notices"] == [sentence]
        assert sentence in daemon.log(200)
    finally:
        daemon.close()


@pytest.mark.clause("M4-read")
def test_a_state_file_of_tei_manager_is_taken_over_by_pointing_at_it(model: str) -> None:
    """Its name says JSON as in tei-manager's container, and TOML is inside; ports and Prometheus ports stay."""
    daemon = Daemon()
    port, state = daemon.settings["instance_port_start"] + 5, daemon.folder / "tei-manager-state.json"
    state.write_text(
        f"""last_updated = "2026-03-04T12:00:00.123456789Z"

[[instances]]
name = "bge-small"
model_id = "{model}"
port = {port}
max_batch_tokens = 8192
max_concurrent_requests = 64
pooling = "cls"
prometheus_port = {port + 1}
startup_timeout_secs = 120
extra_args = [
    "--dtype",
    "float32",
]
created_at = "2026-03-04T11:59:58.000000001Z"
"""
    )
    daemon.settings |= {"state_file": str(state), "auto_restore_on_restart": True}
    with daemon:
        until(lambda: daemon.status("bge-small") == "running")
        found = daemon.call("GET", "/instances/bge-small")
        expected = {
            "model_id": model,
            "port": port,
            "max_batch_tokens": 8192,
            "max_concurrent_requests": 64,
            "pooling": "cls",
            "prometheus_port": port + 1,
            "startup_timeout_secs": 120,
            "extra_args": ["--dtype", "float32"],
            "dtype": "float32",
            "created_at": "2026-03-04T11:59:58.000000001Z",
            "gpu_id": None,
        }
        assert {key: found[key] for key in expected} == expected
        with urllib.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=LIMIT_S) as reply:
            assert b"te_" in reply.read()
        assert daemon.call("GET", "/health")["alarms"] == []
