"""`teimgr create --wait`: it waits for a host that joins."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from teimgr.cli.failures import ExitStatus
from teimgr.cli.main import main

_NO_HOST = {"error": "no host for 'far' (one: it is not 'two')", "code": "NO_HOST", "timestamp": "2026-01-01T00:00:00Z"}
_FAR = {"name": "far", "model_id": "m", "port": 8080, "status": "running", "ready": True, "restarts": 0, "reason": None}


class HostThatJoins(BaseHTTPRequestHandler):
    """The REST API of a cluster whose host joins after `refusals` calls to create."""

    refusals = 0
    placement_s = 30.0

    def do_GET(self) -> None:
        setting = {"key": "cluster.placement_timeout_secs", "value": self.placement_s, "source": "default"}
        self._reply(200, [setting] if self.path == "/config" else _FAR)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).refusals -= 1
        self._reply(*((503, _NO_HOST) if self.refusals >= 0 else (201, _FAR)))

    def _reply(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a test's output is its own."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HostThatJoins) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("wait", "placement_s", "status"),
    [(["--wait"], 30.0, ExitStatus.OK), (["--wait"], 0.0, ExitStatus.NOT_NOW), ([], 30.0, ExitStatus.NOT_NOW)],
)
def test_only_a_create_that_waits_waits_for_a_host(
    url: str, wait: list[str], placement_s: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    HostThatJoins.refusals, HostThatJoins.placement_s = 1, placement_s
    assert main(["create", "far", "m", "--node", "two", "--url", url, *wait]) == status
    assert ("waiting up to 30 s for a host to join" in capsys.readouterr().err) == (status == 0)
