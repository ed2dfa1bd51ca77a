"""REST and gRPC over Unix sockets: a real daemon, keys, clients, and a successor after a kill."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, toml
from tests.support.models.encoders import build_static
from tests.support.polling import until

from teimgr.cli.main import main
from teimgr.client import Client
from teimgr.client.connection import ConnectionValues, DaemonConnection
from teimgr.errors import Unauthenticated

KEY = "admin-" + "k" * 24
AUTH = {
    "enabled": True,
    "providers": ["api_keys"],
    "api_keys": [{"name": "admin", "key": KEY, "rights": ["admin", "read", "inference"]}],
}


def curl(path: Path, *arguments: str) -> tuple[int, str]:
    """Status and body of a request over the socket."""
    done = subprocess.run(
        ["curl", "-sS", "-w", "\n%{http_code}", "--unix-socket", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


@pytest.fixture
def sockets(tmp_path: Path) -> dict[str, str]:
    return {"api_socket": str(tmp_path / "api.sock"), "grpc_socket": str(tmp_path / "grpc.sock")}


def test_a_daemon_is_served_and_taken_over_at_its_sockets(sockets: dict[str, str], tmp_path: Path) -> None:
    api, grpc_path = map(Path, sockets.values())
    model = build_static(tmp_path / "model")
    with WarmDaemonProcess(auth=AUTH, socket_mode="0660", **sockets) as daemon:
        until(grpc_path.exists, "the socket of gRPC")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (api, grpc_path)] == [0o660, 0o660]
        assert curl(api, "http://localhost/health")[0] == 200
        assert curl(api, "http://localhost/instances")[0] == 401
        key = ("-H", f"Authorization: Bearer {KEY}")
        assert curl(api, *key, "http://localhost/instances") == (200, "[]")
        with Client(f"unix:{api}", f"unix:{grpc_path}", api_key=KEY) as client:
            client.create("a", str(model))
            client.wait_until_running("a", deadline_s=60)
            found = client.embed("The boats lie in the harbour.", instance="a")
            with daemon.client(api_key=KEY) as over_tcp:
                assert (over_tcp.embed("The boats lie in the harbour.", instance="a") == found).all()
        body = ("-d", '{"model": "a", "input": "fog"}', "-H", "Content-Type: application/json")
        status, answer = curl(api, *key, *body, "http://localhost/v1/embeddings")
        assert (status, len(json.loads(answer)["data"])) == (200, 1)
        with Client(f"unix:{api}", f"unix:{grpc_path}") as client:
            for call in (client.list, lambda: client.embed("x", instance="a")):
                with pytest.raises(Unauthenticated):
                    call()
        environ = {"TEIMGR_URL": f"unix:{api}", "TEIMGR_API_KEY": KEY, "HOME": str(tmp_path)}
        connection = DaemonConnection.resolve(ConnectionValues(), environ=environ)
        assert connection.grpc() == f"unix:{grpc_path}"
        assert main(["ps", "--url", f"unix:{api}", "--api-key", KEY]) == 0
        refused(sockets, f"Socket {api} already in use by process {daemon.process.pid}; choose another `api_socket`")

        daemon.kill()
        assert api.exists()
        with Client(f"unix:{api}", f"unix:{grpc_path}", api_key=KEY) as client:
            assert (client.embed("The boats lie in the harbour.", instance="a") == found).all()
            daemon.start()
            assert [each.name for each in client.list()] == ["a"]
            assert (client.embed("The boats lie in the harbour.", instance="a") == found).all()

        assert daemon.stop() == 0
        assert not api.exists()
        assert not grpc_path.exists()


def refused(sockets: dict[str, str], reason: str) -> None:
    """A second daemon at the same sockets ends at once, for this reason."""
    second = DaemonProcess(**sockets)
    config = second.folder / "teimgr.toml"
    config.write_text(toml(second.settings))
    done = subprocess.run(
        [sys.executable, "-m", "teimgr", "serve", "-c", str(config)], capture_output=True, text=True, timeout=60
    )
    second.close()
    assert done.returncode == 1
    assert reason in done.stdout + done.stderr


def test_a_web_page_is_no_more_trusted_at_a_socket(sockets: dict[str, str]) -> None:
    api = Path(sockets["api_socket"])
    with WarmDaemonProcess(api_socket=str(api)) as daemon:
        assert DaemonConnection(f"unix:{api}").grpc() == f"http://localhost:{daemon.grpc_port}"
        create = ("-X", "POST", "-d", "{}", "-H", "Content-Type: application/json", "http://localhost/instances")
        assert curl(api, "-H", "Origin: https://evil.example", *create)[0] == 403
        assert curl(api, "-H", "Host: evil.example", "-H", "Origin: http://evil.example", *create)[0] == 403
        assert curl(api, "-H", "Origin: http://localhost", *create)[0] not in (403, 200)
        assert curl(api, *create)[0] not in (403, 200)
