"""README.md, "More than one host": two commands make a fleet of two hosts, and the second one answers an embedding."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
from tests.support.cluster import needs_ray
from tests.support.daemon_process import DaemonProcess, free_ports, kill_ray
from tests.support.fleet import ROOT
from tests.support.polling import until

LIMIT_S = 200.0
pytestmark = [needs_ray, pytest.mark.timeout(500)]


class Commands:
    """Runs the README's commands in a folder of their own, with ports of the test in the place of the usual ones."""

    def __init__(self, daemon: DaemonProcess, ray_port: int) -> None:
        self._ray_port = str(ray_port)
        self._environ = os.environ | {"TEIMGR_URL": daemon.api}
        self._folder = daemon.folder

    def _command(self, command: str) -> list[str]:
        programs = shlex.quote(str(Path(sys.executable).parent))
        return ["bash", "-euc", command.replace("6379", self._ray_port).replace(".venv/bin/", f"{programs}/")]

    def run(self, command: str) -> str:
        done = subprocess.run(
            self._command(command), cwd=self._folder, env=self._environ, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def started(self, command: str, log: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it until the end of the block, then stop it as Ctrl-C does."""
        with (self._folder / log).open("ab") as output:
            process = subprocess.Popen(
                self._command(f"exec {command}"),
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_commands_make_a_fleet_of_two_hosts_and_the_second_answers() -> None:
    _, _, section = (ROOT / "README.md").read_text().partition("## More than one host\n")
    both, then = re.findall(r"^```console\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    first, second = both.strip().split("\n")
    ray_port, enrolment_port = free_ports(2)
    assert "--name two" in second
    configured = (ROOT / "configs" / "two-hosts.toml").read_text()
    assert "127.0.0.2:6379" in configured
    cluster = {
        "address": f"127.0.0.2:{ray_port}",
        "node": "one",
        "enrolment_port": enrolment_port,
        "placement_timeout_secs": LIMIT_S,
    }
    assert 'node = "one"' in configured
    daemon = DaemonProcess(cluster=cluster, graceful_shutdown_timeout_secs=5)
    (daemon.folder / "configs").mkdir()
    (daemon.folder / "configs" / "two-hosts.toml").write_text(tomli_w.dumps(daemon.settings))
    commands = Commands(daemon, ray_port)
    try:
        with commands.started(first, "daemon.log") as daemon.process, daemon.client() as client:
            until(lambda: listens(daemon.api_port), f"the daemon: {daemon.log()}", LIMIT_S)
            with commands.started(f"{second} --enrolment-port {enrolment_port} --grace 1", "node.log"):
                *create, embed = then.strip().split("\n")
                for command in create:
                    commands.run(command)
                vector = commands.run(embed)
                until(lambda: "host two serves" in (daemon.folder / "node.log").read_text(), "its word", LIMIT_S)
                (worker,) = client.get("far").details["workers"]
                client.delete("far")
    finally:
        kill_ray(daemon.folder / "state" / "node" / "run")
        daemon.close()

    assert worker["node"] == "two"
    assert len(re.findall(r"-?\d+\.\d+", vector)) >= 384
