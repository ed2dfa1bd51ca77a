"""Signals while the daemon starts."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.daemon_process import WarmDaemonProcess
from tests.support.models import build
from tests.support.polling import until

LIMIT_S = 120.0


@pytest.mark.slow
def test_a_reload_during_the_start_waits_until_the_daemon_serves(tmp_path: Path) -> None:
    """SIGHUP killed it, or systemd heard READY=1 seconds before the daemon was ready."""
    model = str(build("bert", tmp_path / "model"))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        WarmDaemonProcess() as daemon,
        ThreadPoolExecutor(1) as pool,
    ):
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        with daemon.client() as client:
            client.create("a", model, dtype="float32")
            client.wait_until_running("a", deadline_s=LIMIT_S)
            worker = client.get("a").pid
        assert worker is not None
        daemon.kill()
        os.kill(worker, signal.SIGSTOP)  # the start waits for it
        try:
            daemon.settings["instances"] = [
                {"name": "a", "model_id": model, "dtype": "float32", "tags": {"new": "yes"}}
            ]
            (daemon.folder / "daemon.log").unlink()
            starting = pool.submit(daemon.start, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
            until(lambda: "daemon starts" in daemon.log(), "the start", LIMIT_S)
            assert daemon.process is not None
            for _ in range(2):
                daemon.process.send_signal(signal.SIGHUP)
        finally:
            os.kill(worker, signal.SIGCONT)
        starting.result(LIMIT_S)
        heard = [systemd.recv(4096).decode().partition("\n")[0] for _ in range(3)]
        assert heard == ["READY=1", "RELOADING=1", "READY=1"]
        with daemon.client() as client:
            assert client.get("a").tags == {"new": "yes"}
        assert (daemon.folder / "daemon.log").read_text().count('"reloaded"') == 1
